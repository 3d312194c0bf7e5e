"""Models that checkpoint parts of their forward: the plan says what is computed again instead."""

import functools
import logging

import pytest
import torch
import transformers
from exec_cases.training import assert_bitwise_equal, train
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

import remat
from loop_cases.frameworks import trainer
from loop_cases.models import gpt2, tokens

LIMIT_SECONDS = 0.1


class Net(nn.Module):
    """Layers, each checkpointed, and within another checkpoint if it is `nested`."""

    def __init__(self, how="directly"):
        super().__init__()
        torch.manual_seed(0)
        parts = (nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
        self.enter = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Sequential(*parts) for _ in range(4))
        self.how = how

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + self._run(layer, x)
        return x

    def _run(self, layer, x):
        reentrant = self.how == "reentrant"
        if self.how == "nested":
            return checkpoint(self._once, layer, x, use_reentrant=False)
        if self.how == "selective":
            return checkpoint(layer, x, use_reentrant=False, context_fn=selected)
        return layer(x) if self.how == "directly" else checkpoint(layer, x, use_reentrant=reentrant)

    def _once(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


selected = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])


def rows():
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


def squares(output):
    return output.square().mean()


def record(model):
    return train(model, lambda m, _: m(rows()), squares)


def own_peak(model):
    with remat.measure_peak() as peak:
        squares(model(rows())).backward()
    return peak.peak_bytes


@pytest.mark.parametrize("how", [pytest.param("reentrant", marks=pytest.mark.sweep), "nested"])
def test_a_checkpointed_model_is_planned_as_one_without(how, caplog):
    caplog.set_level(logging.INFO, logger="remat")
    original, options = Net(how), {"budget": 0.7, "limit_seconds": LIMIT_SECONDS}
    model = remat.rematerialize(original, rows(), **options)
    plain = remat.rematerialize(Net(), rows(), **options)
    assert len(model.plan.graph.ops) == len(plain.plan.graph.ops)
    assert model.plan.plain_peak_bytes == pytest.approx(plain.plan.plain_peak_bytes, rel=0.01)
    assert_bitwise_equal(record(model), record(Net()))
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    count = 8 if how == "nested" else 4
    assert f"{count} checkpointed calls are planned as any other code" in caplog.text
    assert own_peak(original) < 0.8 * own_peak(Net()), "the original lost its checkpoints"


@pytest.mark.parametrize(
    ("how", "way"),
    [
        pytest.param("without", "torch.compile", marks=pytest.mark.sweep),
        pytest.param("reentrant", "rematerialize", marks=pytest.mark.sweep),
        ("nested", "torch.compile"),
        ("selective", "rematerialize"),
    ],
)
def test_a_call_that_runs_as_it_is_keeps_its_checkpoints(how, way):
    """What is computed again draws the same numbers: dropout drops the same."""
    options = {"budget": 1000, "on_infeasible": "plain", "limit_seconds": 0.1}
    if way == "rematerialize":
        model = remat.rematerialize(Net(how), **options)
    else:
        torch.compiler.reset()
        model = Net(how)
        model.compile(backend="remat", options=options)
    with pytest.warns(remat.BudgetWarning):
        model(rows())
    assert_bitwise_equal(record(model), record(Net(how)))
    if how != "selective":  # which keeps all but some
        assert own_peak(model) < 0.8 * own_peak(Net())


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["without", "reentrant"])
def test_a_dry_plan_knows_of_no_checkpoints_either(how):
    x = rows().requires_grad_()
    plans = [remat.plan(Net(each), x, budget=0.8, limit_seconds=0.1) for each in (how, "directly")]
    assert len(plans[0].graph.ops) == len(plans[1].graph.ops)
    assert plans[0].plain_peak_bytes == pytest.approx(plans[1].plain_peak_bytes, rel=0.01)
    assert own_peak(Net(how)) < 0.8 * own_peak(Net()), "torch is not as it was"


@pytest.mark.parametrize(
    "regions", [pytest.param(None, marks=pytest.mark.sweep), GradientCheckpointingLayer]
)
def test_gradient_checkpointing_of_transformers_is_planned_instead(regions):
    records, ids = [], tokens()
    for planned in (True, False):
        model = gpt2()
        model.activation_checkpointing_enable()
        if planned:
            model = remat.rematerialize(
                model, budget="4MiB" if regions else 0.8, regions=regions, limit_seconds=0.1
            )
        records.append(train(model, lambda m, _: m(ids, labels=ids), lambda o: o.loss, steps=5))
        if planned:
            assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert_bitwise_equal(*records)


@pytest.mark.sweep
def test_the_switch_of_the_trainer_is_no_obstacle(tmp_path):
    transformers.utils.logging.set_verbosity_error()
    options = {"activation_checkpointing": True}
    eager = trainer(gpt2(), tmp_path, **options).model
    model = remat.rematerialize(gpt2(), budget=0.8, limit_seconds=0.1)
    trainer(model, tmp_path, **options)
    assert model.is_activation_checkpointing
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("how", [pytest.param("without", marks=pytest.mark.sweep), "reentrant"])
def test_a_plan_within_a_checkpoint_is_refused(how):
    """It would run again in the backward, and no plan was ever made of these regions."""
    model = remat.rematerialize(Net(how), budget="8MiB", regions="layers.*")
    with pytest.raises(remat.RematError, match="Sequential runs by a plan, and is called by torch"):
        model(rows())
    whole = remat.rematerialize(Net(), rows(), budget="8MiB")
    with pytest.raises(remat.RematError, match="Net runs by a plan, and is called by torch"):
        checkpoint(whole, rows(), use_reentrant=False)


def test_what_is_compiled_within_a_checkpoint_is_refused():
    model = torch.compile(nn.Linear(32, 32), backend="remat", options={"budget": "8MiB"})
    for _ in range(2):
        with pytest.raises(remat.RematError, match="made runs by a plan, and is called by torch"):
            checkpoint(model, rows(), use_reentrant=False)
    model(rows()).sum().backward()


class Halves(nn.Module):
    """A checkpointed part whose graph breaks in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def part(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.second(x)

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


def test_a_checkpointed_part_that_cannot_be_one_graph_is_named():
    model = remat.rematerialize(Halves(), budget="1MiB", costs="estimate")
    with pytest.raises(remat.RematError) as refused:
        model(torch.ones(4, 8))
    told = str(refused.value)
    assert "test_checkpointed_models.py:" in told
    assert "checkpoint(self.part, x, use_reentrant=False)" in told
    assert "Call to `torch._dynamo.graph_break()`" in told
    assert "Leave the checkpoint out" in told


class BesideACheckpoint(nn.Module):
    """Statements that change tensors in place and whose results nobody reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5, inplace=True)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.ones(32))

    def forward(self, x):
        y = checkpoint(self.linear, x, use_reentrant=False)
        y = self.norm(y)
        y.mul_(2)
        self.calls.add_(1)
        torch.rand(3)
        checkpoint(self.drop, self.seen, use_reentrant=False)
        return y + 1


@pytest.mark.parametrize("way", ["example", "later", "compiled"])
def test_what_changes_in_place_beside_a_checkpoint_changes(way):
    original = BesideACheckpoint()
    options = {"budget": "1MiB", "limit_seconds": LIMIT_SECONDS}
    if way == "compiled":
        model = torch.compile(original, backend="remat", options=options)
    else:
        model = remat.rematerialize(original, rows() if way == "example" else None, **options)
    plain = BesideACheckpoint()
    assert_bitwise_equal(record(model), record(plain))
    for (name, ours), theirs in zip(
        original.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name


class TrainsInEager(nn.Module):
    """A graph in which nothing is trained, then a break that leaves the rest to eager."""

    def __init__(self, goes_on):
        super().__init__()
        self.linear, self.scale = nn.Linear(32, 32), nn.Parameter(torch.ones(32))
        self.linear.register_full_backward_hook(lambda module, into, out: None)
        self.goes_on = goes_on

    def forward(self, x):
        x = x + (x * self.scale).detach()
        y = checkpoint(self.linear, x, use_reentrant=False)
        if self.goes_on:
            x = x * 1.5
        return y


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_step_trained_in_eager_alone_is_no_step_within_the_budget(goes_on):
    """Not even if a graph follows that hands on what eager code computed."""
    model = remat.rematerialize(TrainsInEager(goes_on), budget="1MiB", costs="estimate")
    with pytest.raises(remat.RematError, match="ran as it is, without a plan: TorchDynamo made no"):
        model(rows())


class Adapted(nn.Module):
    """Adapters in reentrant checkpoints after a frozen layer whose output is made to need one.

    What the checkpoints run breaks the graph, and so does the forward before them.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(32, 32).requires_grad_(False)
        self.embedding.register_forward_hook(self.make_inputs_require_grad)
        self.adapters = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 32)

    @staticmethod
    def make_inputs_require_grad(module, given, output):
        output.requires_grad_(True)

    @staticmethod
    def _run(adapter, x):
        x = adapter(x).tanh()
        torch._dynamo.graph_break()
        return x + 1

    def forward(self, x):
        x = self.embedding(x)
        torch._dynamo.graph_break()
        for adapter in self.adapters:
            x = checkpoint(self._run, adapter, x, use_reentrant=True)
        return self.head(x)


def test_reentrant_checkpoints_after_a_frozen_layer_give_their_gradients():
    """They give none unless an input requires a gradient: what makes it do so is not left out."""
    eager = Adapted()
    expected = record(eager)
    assert all(adapter.weight.grad is not None for adapter in eager.adapters)
    assert_bitwise_equal(record(remat.rematerialize(Adapted(), budget="1GiB")), expected)

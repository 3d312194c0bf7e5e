"""A model that has changed is planned anew: its modules, counters, globals and hooks."""

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, assert_close
from integration_cases.new_calls import LIMIT_SECONDS, batch, loss, net, planned, run
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat.session import region_captures

SCALE = 1.0


def test_a_counter_that_changes_nothing_in_the_graph_leaves_the_plan():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = net(), 0

        def forward(self, x):
            self.calls += 1
            return self.body(x)

    model = planned(Counting())
    plan = model.plan
    assert model.calls == 0
    assert_close(run(model, *[batch()] * 5), run(Counting(), *[batch()] * 5))
    assert model.calls == 5
    assert model.plan is plan


@pytest.mark.parametrize("loss_at_once", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_counter_is_traced_for_twice_at_most_however_far_it_counts(monkeypatch, loss_at_once):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls, self.halves = net(), 0, 0

        def forward(self, x):
            self.calls = self.calls + 1
            self.halves = max(1, self.calls // 2)
            return self.body(x), self.calls

    captured = []
    capture = region_captures.get_capture("aot")
    counting = lambda *args, **rest: captured.append(1) or capture(*args, **rest)  # noqa: E731
    monkeypatch.setattr(region_captures, "get_capture", lambda _: counting)
    handed = {"loss": lambda output: loss(output[0])} if loss_at_once else {}
    model = remat.rematerialize(Counting(), budget=0.8, limit_seconds=LIMIT_SECONDS, **handed)
    eager = Counting()
    for step in range(1, 7):
        found = []
        for each in (model, eager):
            torch.manual_seed(step)
            output, calls = each(batch())
            loss(output).backward()
            found.append((output.detach(), calls, each.calls, each.halves))
        (ours, *counts), (theirs, *expected) = found
        assert counts == expected == [step, step, max(1, step // 2)]
        torch.testing.assert_close(ours, theirs)
    assert len(captured) <= 2


def test_a_counter_that_the_result_depends_on_is_followed():
    class Warming(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.calls = net(), 0

        def forward(self, x):
            self.calls += 1
            return self.body(x) * min(1.0, self.calls / 4)

    model, eager = planned(Warming()), Warming()
    assert_close(run(model, *[batch()] * 6), run(eager, *[batch()] * 6))
    assert model.calls == eager.calls == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].requires_grad_(False),
        lambda m: m[1].eval(),
        lambda m: m.__setitem__(5, nn.ReLU()),
        pytest.param(lambda m: m.double(), marks=pytest.mark.sweep),
        pytest.param(lambda m: setattr(m[1], "momentum", 0.5), marks=pytest.mark.sweep),
        lambda m: torch.utils.swap_tensors(m[4].weight, nn.Parameter(torch.eye(24))),
    ],
    ids=["frozen layer", "batch norm in eval", "replaced layer", "double", "momentum", "swapped"],
)
def test_a_changed_model_is_planned_anew(change):
    """The second step runs the changed model; more changes are in `test_changed_calls.py`."""

    def at_step_one(model, step):
        if step == 1:
            change(model)

    dtype = torch.float64 if "double" in str(change.__code__.co_names) else torch.float32
    calls = (batch(), batch().to(dtype))
    assert_close(run(planned(), *calls, change=at_step_one), run(net(), *calls, change=at_step_one))


class Stack(nn.Module):
    """Layers that could stand for one another."""

    def __init__(self, breaks):
        super().__init__()
        torch.manual_seed(0)
        self.breaks = breaks
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(4))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.tanh(layer(x)))
            if self.breaks and norm is self.norms[2]:
                torch._dynamo.graph_break()
        return x


def tie_weights(model):
    model.layers[2].weight = model.layers[0].weight


def tie_a_layer(model):
    model.layers[3] = model.layers[2]


def use_a_norm_twice(model):
    model.norms[1] = model.norms[0]


@pytest.mark.parametrize(
    "change", swept([tie_weights, tie_a_layer, use_a_norm_twice], [tie_weights])
)
@pytest.mark.parametrize("breaks", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_what_comes_to_be_shared_is_planned_anew(change, breaks):
    """TorchDynamo does not see that parameters are the same from then on."""

    def at_step_three(model, step):
        if step == 3:
            change(model)

    calls = [batch(24 + 8 * (step // 2)) for step in range(6)]
    model = remat.rematerialize(Stack(breaks), budget=2**24, limit_seconds=LIMIT_SECONDS)
    found = run(model, *calls, change=at_step_three)
    assert_bitwise_equal(found, run(Stack(breaks), *calls, change=at_step_three))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        return self.body(x) * SCALE


def test_a_changed_global_variable_is_planned_for_and_the_old_plan_kept(monkeypatch, caplog):
    def change(model, step):
        monkeypatch.setitem(globals(), "SCALE", (1.0, 3.0, 1.0)[step])

    calls = [batch()] * 3
    model = planned(Scaled())
    first = model.plan
    with caplog.at_level("INFO", logger="remat"):
        assert_close(run(model, *calls, change=change), run(Scaled(), *calls, change=change))
    assert model.plan is first
    assert [record.message for record in caplog.records].count("measuring one plain step") == 1


def test_a_changed_closure_is_followed():
    def made():
        scale = 1.0

        class Closed(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = net()

            def forward(self, x):
                return self.body(x) * scale

        def change(_, step):
            nonlocal scale
            scale = (1.0, 3.0, 1.0)[step]

        return Closed(), change

    (original, change), (eager, change_eager) = made(), made()
    model = planned(original)
    first, calls = model.plan, [batch()] * 3
    assert_close(run(model, *calls, change=change), run(eager, *calls, change=change_eager))
    assert model.plan is first


def test_a_forward_of_torchs_own_that_is_replaced_is_followed(monkeypatch):
    forward = nn.Linear.forward

    def change(_, step):
        replaced = (forward, lambda linear, x: 2 * forward(linear, x), forward)[step]
        monkeypatch.setattr(nn.Linear, "forward", replaced)

    calls = [batch()] * 3
    assert_close(run(planned(), *calls, change=change), run(net(), *calls, change=change))


def test_hooks_of_all_modules_registered_later_are_noticed():
    def double(module, _, output):
        return output * 2 if isinstance(module, nn.Linear) else None

    model, eager = planned(), net()
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        assert_bitwise_equal(run(model, batch()), run(eager, batch()))
    finally:
        handle.remove()
    assert_bitwise_equal(run(model, batch()), run(eager, batch()))


def test_a_hook_for_which_each_call_is_traced_anew_is_told_of_once(caplog):
    calls = []
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    plain[0].register_forward_hook(lambda module, args, output: calls.append(len(calls)))
    model = remat.rematerialize(plain, budget="1MB", costs="estimate")
    for _ in range(10):
        model(torch.rand(3, 4)).sum().backward()
    told = [record.message for record in caplog.records if "traced anew" in record.message]
    assert len(calls) == 10
    assert len(told) == 1
    assert "calls.append(len(calls))" in told[0]

"""Who asks for the gradient of an output that the model also reads gets eager's, once planned for.

The first time is refused.
"""

import copy

import pytest
import torch
from integration_cases.asking import (
    ASKS,
    READS,
    Reading,
    asked,
    assert_eagers,
    by_changing,
    by_edge,
    by_hook,
    by_hook_after_node,
    by_hook_of_several,
    by_inputs,
    by_none,
    by_retaining,
    compiled,
    refused_until_planned,
    rematerialized,
)
from integration_cases.sweeps import swept
from torch import nn

from remat_exec import BackwardError, measure_peak


@pytest.mark.parametrize(
    "read", swept(READS, ["a view", "a part of a view", "changing in place", "an inner region"])
)
def test_whole_gradients_are_eagers_from_the_second_time_on(read):
    model, x = Reading(READS[read]), torch.randn(4, 6).double()
    planned = rematerialized(model, x)
    refused = refused_until_planned(planned, model, x, by_retaining)
    assert (refused == 0) == (read == "a view")  # of its own, which nothing reads
    for ask in ASKS:
        assert_eagers(planned, model, x, ask)


@pytest.mark.parametrize(
    "ask", swept(ASKS[:-1], [by_edge, by_inputs, by_hook_after_node, by_hook_of_several])
)
def test_each_way_to_ask_is_seen(ask):
    model, x = Reading(READS["whole"]), torch.randn(4, 6).double()
    planned = rematerialized(model, x)
    assert_eagers(planned, model, x, by_none)
    assert refused_until_planned(planned, model, x, ask) == 1
    assert_eagers(planned, model, x, ask)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's
@pytest.mark.parametrize("read", swept(["whole", "a break"], ["a break"]))
def test_so_are_those_of_what_torch_compiles(read):
    model, x = Reading(READS[read]), torch.randn(4, 6).double()
    planned = compiled(model, x)
    assert refused_until_planned(planned, model, x, by_hook) == 1
    for each in (x, x, x[:2], x[:3]):
        assert_eagers(planned, model, each, by_hook)


@pytest.mark.sweep
def test_so_are_those_of_copies_and_of_other_sizes():
    model, x = Reading(READS["whole"]), torch.randn(8, 6).double()
    planned = rematerialized(model, x)
    refused_until_planned(planned, model, x, by_hook)
    for size in (8, 4, 5, 6, 7):
        assert_eagers(planned, model, x[:size], by_hook)
    twin = copy.deepcopy(planned)
    module = Reading(READS["whole"])
    module.load_state_dict(model.state_dict())
    with pytest.raises(BackwardError):
        asked(twin, twin, x, by_hook)
    got, expected = asked(twin, twin, x, by_hook), asked(module, module, x, by_hook)
    assert all(map(torch.equal, got, expected))


class ViewingInput(Reading):
    """Returns a view of what it is given, and what it makes of that."""

    def forward(self, x):
        view = x.view(2, 12)
        return view, self.head(torch.tanh(self.hidden(view.view(4, 6))))


def test_a_view_of_an_input_has_its_whole_gradient():
    model, x = ViewingInput(None), torch.randn(4, 6).double().requires_grad_()
    planned = rematerialized(model, x)
    assert refused_until_planned(planned, model, x, by_hook) == 1
    for ask in (by_hook, by_retaining, by_changing, by_none):
        assert_eagers(planned, model, x, ask)


class Deep(nn.Module):
    """Two stacks of layers; what the first gives is returned, too."""

    def __init__(self, width=64, depth=3):
        super().__init__()

        def stack():
            layers = (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
            return [copy.deepcopy(layer) for _ in range(depth) for layer in layers]

        self.first, self.second = nn.Sequential(*stack()), nn.Sequential(*stack())

    def forward(self, x):
        hidden = self.first(x)
        return hidden, self.second(torch.tanh(hidden))


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")  # the first step has no plan yet
@pytest.mark.parametrize("budget", swept([0.7, "1100KiB"], [0.7]))
def test_steps_that_are_planned_for_it_stay_within_the_budget(budget):
    model, x = Deep(), torch.randn(256, 64)
    planned = rematerialized(model, x, budget=budget, costs="measure")
    limit = planned.plan.budget_bytes
    assert refused_until_planned(planned, model, x, by_hook) == 1
    for _ in range(3):
        assert_eagers(planned, model, x, by_changing)
        model.zero_grad()
        with measure_peak() as peak:
            asked(planned, model, x, by_changing)
    assert peak.peak_bytes <= limit
    assert planned.plan.measured_peak_bytes <= limit
    assert len(planned.plan.calls) == 2


class Scores(nn.Module):
    """Returns a loss, and the scores that it is computed from."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 512)

    def forward(self, x):
        scores = self.head(self.embedding(x))
        loss = nn.functional.cross_entropy(scores.view(-1, 512), x.view(-1))
        return {"loss": loss, "scores": scores}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.sweep),
        {"outputs": "loss"},
        pytest.param({"numerics": "rounding"}, marks=pytest.mark.sweep),
    ],
)
def test_scores_beside_the_loss_have_their_gradient(options):
    model, x = Scores(), torch.randint(16, (4, 12))
    planned = rematerialized(model, x, **options)
    for _ in range(5):
        outputs = planned(x)
        model.zero_grad()
        outputs["loss"].backward()  # until here nobody asks
    outputs = planned(x)
    outputs["scores"].retain_grad()
    outputs["loss"].backward()
    with pytest.raises(BackwardError, match="output 1 of a region"):
        _ = outputs["scores"].grad + 0
    found = []
    for one in (planned, planned, planned, model):
        model.zero_grad()
        outputs = one(x)
        outputs["scores"].retain_grad()
        outputs["loss"].backward()
        found.append([outputs["scores"].grad + 0, model.head.weight.grad + 0])
    for got in found:
        for a, b in zip(got, found[-1], strict=True):
            torch.testing.assert_close(a, b)

"""Backwards over other outputs, or with other gradients, than were planned for."""

import copy

import pytest
import torch
from exec_cases.gradients import assert_same_gradients, pair
from exec_cases.models import HEADS, Case, Scheduled
from exec_cases.schedules import again_in_the_backward
from torch import nn

from remat_exec import BackwardError, BudgetExceeded, Executable, MemoryChanged
from remat_graph.torch import capture, read_call
from remat_solvers import store_all


@pytest.mark.parametrize("wanted", [("left",), ("right",)])
def test_backward_over_some_of_the_outputs(wanted):
    results = []
    for model in pair(HEADS):
        output = model(*HEADS.args())
        sum(output[name].square().sum() for name in wanted).backward()
        results.append(model)
    assert_same_gradients(*results)
    unused = results[0].module.right if wanted == ("left",) else results[0].module.left
    assert unused.weight.grad is None


def test_backward_over_each_output_in_turn_says_that_memory_is_gone():
    output = HEADS.remat()(*HEADS.args())
    output["left"].sum().backward(retain_graph=True)
    with pytest.raises(BackwardError, match="second time"):
        output["right"].sum().backward()


def test_a_backward_with_fewer_gradients_than_planned_for_runs_within_the_plan():
    model = HEADS.remat()
    model.executable.budget_bytes = 1  # which such a backward need not ask for
    plain = HEADS.model()
    for step in (model, plain):
        step(*HEADS.args())["left"].square().sum().backward()
    assert_same_gradients(model, plain, rtol=0, atol=0)


class Tanhs(nn.Module):
    """Two outputs that its backward reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        last = torch.tanh(self.second(hidden))
        return hidden, last, last.square().mean()


@pytest.mark.parametrize(
    ("keep", "gone"),
    [
        (lambda outputs: None, {0, 1}),
        (lambda outputs: outputs[:2], set()),
        (lambda outputs: outputs[0], {1}),
        (lambda outputs: outputs[0].detach(), {1}),
        (lambda outputs: outputs[1][:2], {0}),
    ],
)
def test_what_the_backward_keeps_of_outputs_is_not_held_by_the_user(keep, gone):
    case = Case("tanhs", Tanhs, lambda: (torch.randn(4, 5),), lambda out: out[2])
    model, told = case.remat(), []
    outputs = model.executable(
        model.module,
        list(case.args()),
        lambda missing, released_outputs: told.append(released_outputs),
    )
    held, loss = keep(outputs), outputs[2]
    del outputs
    loss.backward()
    del held
    assert told[0] - {2} == gone


def test_what_depends_on_missing_gradients_alone_is_not_computed():
    """Zero times infinity would be no zero."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            y = self.layer(x)
            return y.square(), (y - y.detach()).sqrt()  # of infinite slope

    case = Case("root", Root, lambda: (torch.randn(4, 5),), lambda out: out[0].sum())
    results = []
    for model in pair(case):
        case.loss(model(*case.args())).backward()
        results.append(model)
    assert all(p.grad.isfinite().all() for p in results[0].parameters())
    assert_same_gradients(*results)


@pytest.mark.parametrize("wanted", [("left",), ("right",), ("left", "right")])
@pytest.mark.parametrize("planned", [0, 1])
def test_a_backward_with_a_gradient_that_was_not_planned_for(wanted, planned):
    captured = HEADS.captured.variant(frozenset({planned}))
    model = Scheduled(HEADS.model(), captured)
    plain = HEADS.model()
    for step in (model, plain):
        output = step(*HEADS.args())
        sum(output[name].square().sum() for name in wanted).backward()
    assert_same_gradients(model, plain)


def test_what_only_a_backward_that_was_not_planned_for_reads_is_computed_again():
    """The mask of a dropout is no value of a graph that lacks its gradient."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            y = self.layer(x)
            return y.square(), nn.functional.dropout(y.tanh()) + y

    case = Case("root", Root, lambda: (torch.randn(4, 5),), lambda out: out[0].sum() + out[1].sum())
    captured = case.captured.variant(frozenset({1}))
    model, plain = Scheduled(case.model(), captured), case.model()
    for step in (model, plain):
        torch.manual_seed(0)
        case.loss(step(*case.args())).backward()
    assert_same_gradients(model, plain)


def test_a_plan_that_lacks_what_another_backward_reads_does_not_take_all():
    """A sigmoid's backward reads its result, which is the user's to let go of."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            y = self.layer(x)
            return y.square(), y.sigmoid()

    case = Case("root", Root, lambda: (torch.randn(4, 5),), lambda out: out[0].sum() + out[1].sum())
    model = Scheduled(case.model(), case.captured.variant(frozenset({1})))
    assert not model.executable.takes_all
    with pytest.raises(BackwardError, match="run forward again"):
        case.loss(model(*case.args())).backward()


class Beside(nn.Module):
    """A loss, and an output beside it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean(), x * 2


def noted(model):
    """List the parameters of which the forward of a plan keeps checksums."""
    (line,) = (line for line in model.executable.source.splitlines() if "note__" in line)
    inputs = model.executable.capture.program.inputs
    return [item.key for item in inputs if f"{item.variable}={item.variable}" in line]


def test_no_checksum_is_kept_where_no_other_backward_computes_from_anything_again():
    case = Case("beside", Beside, lambda: (torch.randn(4, 5),), sum)
    model, plain = Scheduled(case.model(), case.captured.variant(frozenset({1}))), case.model()
    assert "note__" not in model.executable.source
    for step in (model, plain):
        loss, beside = step(*case.args())
        (loss + beside.sum()).backward()
    assert_same_gradients(model, plain)


def test_checksums_are_kept_of_what_other_backwards_compute_from_again_alone():
    """The backward over the other head runs the trunk again, and no head."""
    model = Scheduled(HEADS.model(), HEADS.captured.variant(frozenset({0})))
    assert noted(model) == ["trunk.0.weight", "trunk.0.bias", "trunk.2.bias"]
    for name in noted(model):
        output = model(*HEADS.args())
        model.module.get_parameter(name).data.mul_(1.5)
        with pytest.raises(MemoryChanged, match="written to"):
            (output["left"].square().sum() + output["right"].square().sum()).backward()


def test_a_backward_with_a_gradient_that_was_not_planned_for_over_budget_is_refused():
    captured = HEADS.captured.variant(frozenset({0}))
    model = Scheduled(HEADS.model(), captured)
    model.executable.budget_bytes = 1
    output = model(*HEADS.args())
    with pytest.raises(BudgetExceeded, match="run forward again") as error:
        (output["left"].square().sum() + output["right"].square().sum()).backward()
    assert error.value.budget_bytes == 1
    assert error.value.peak_bytes > 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_backward_over_budget_runs_where_it_is_told():
    captured = HEADS.captured.variant(frozenset({0}))
    executable = Executable(captured, store_all(captured.graph), budget_bytes=1)
    plain, model, told = HEADS.model(), HEADS.model(), []
    outputs = executable(model, list(HEADS.args()), exceeded=told.append)
    sum(output.square().sum() for output in outputs).backward()
    sum(output.square().sum() for output in plain(*HEADS.args()).values()).backward()
    assert_same_gradients(model, plain)
    (error,) = told
    assert error.peak_bytes > error.budget_bytes == 1


def test_no_backward_captures_or_measures(monkeypatch):
    captured = HEADS.captured.variant(frozenset({0}))
    model = Scheduled(HEADS.model(), captured)
    output = model(*HEADS.args())

    def refuse(*args, **kwargs):
        raise AssertionError("captured or measured within a backward")

    monkeypatch.setattr("remat_graph.torch.capturing.captures.finish", refuse)
    monkeypatch.setattr("remat_graph.torch.capturing.ways.measure_costs", refuse)
    (output["left"].square().sum() + output["right"].square().sum()).backward()


def test_a_parameter_used_by_both_heads_gets_the_gradient_of_the_one_that_is_used():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            return self.layer(x), [self.layer(x + 1)]

    case = Case("twice", Twice, lambda: (torch.randn(4, 5),), lambda out: out[0].square().sum())
    results = []
    for model in pair(case):
        case.loss(model(*case.args())).backward()
        results.append(model)
    assert_same_gradients(*results)


def test_an_output_returned_twice_gets_the_sum_of_its_gradients_once():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            y = self.layer(x)
            return y, y

    case = Case("same", Same, lambda: (torch.randn(4, 5),), lambda o: (2 * o[0] + o[1].exp()).sum())
    results = []
    for model in pair(case):
        output = model(*case.args())
        case.loss(output).backward()
        results.append(model)
    assert_same_gradients(*results)


def test_without_outputs_to_differentiate_there_is_nothing_to_capture():
    captured = capture(HEADS.model(), HEADS.args(), costs="estimate")
    assert store_all(captured.graph).steps
    with pytest.raises(ValueError, match="none of the module's outputs gets a gradient"):
        captured.variant(frozenset(captured.program.tangents.values()))


@pytest.mark.parametrize("save_all", [False, True])
def test_an_output_that_is_let_go_of_is_not_counted_after_the_loss(save_all):
    missing = frozenset({1}) if save_all else frozenset()
    whole = HEADS.captured.variant(missing) if save_all else HEADS.captured
    captured = whole.with_released_outputs(frozenset({0, 1}))
    schedule = store_all(captured.graph)
    assert captured.graph.results < whole.graph.results
    before = Executable(whole, store_all(whole.graph))
    executable = Executable(captured, schedule, budget_bytes=before.code.peak_bytes)
    assert executable.code.peak_bytes <= before.code.peak_bytes
    model, plain = HEADS.model(), HEADS.model()
    for holding in (False, True):
        model.zero_grad()
        outputs = executable(model, list(HEADS.args()), lambda *told: None)
        held = list(outputs) if holding else []
        loss = outputs.pop(0).square().sum()
        outputs.clear()
        loss.backward()
        del held
    plain(*HEADS.args())["left"].square().sum().backward()
    assert_same_gradients(model, plain)


def test_an_output_that_is_held_against_the_plan_is_refused_if_there_is_no_room():
    captured = HEADS.captured.with_released_outputs(frozenset({0, 1}))
    executable = Executable(captured, store_all(captured.graph), budget_bytes=1)
    model = HEADS.model()
    outputs = executable(model, list(HEADS.args()), lambda *told: None)
    loss = sum(output.sum() for output in outputs)
    with pytest.raises(BudgetExceeded, match="outputs are held"):
        loss.backward()


class Handing(nn.Module):
    """Its backward computes again from what it hands out, and could write over that."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x):
        first, second = self.first(x), self.second(x)
        return first, (first - 0.5).square(), second, torch.sin(second * 2)


def test_what_was_handed_out_is_never_written_over():
    torch.manual_seed(0)
    model, x = Handing(), torch.randn(32, 8)
    whole = capture(model, (x,), costs="estimate")
    captured = whole.with_released_outputs(frozenset(range(len(whole.program.returned))))
    pairs = [pair for op in whole.graph.ops[: whole.graph.boundary_index] for pair in op.overwrites]
    assert {read for read, _ in pairs} <= whole.graph.results - captured.graph.results
    schedule = again_in_the_backward(captured.graph, {made for _, made in pairs})
    outputs = Executable(captured, schedule)(model, read_call((x,), {}).tensors)
    before = [output.detach().clone() for output in outputs]
    sum(output.square().sum() for output in outputs).backward()
    assert all(map(torch.equal, outputs, before))
    plain = copy.deepcopy(model)
    plain.zero_grad()
    sum(output.square().sum() for output in plain(x)).backward()
    assert_same_gradients(model, plain)

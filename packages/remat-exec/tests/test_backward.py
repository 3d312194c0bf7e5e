"""One backward for one forward, in whatever order and over whatever outputs; or a clear error."""

import copy

import pytest
import torch
from exec_cases.models import HEADS, MLP, NORMED, SHARED, Case, Scheduled
from torch import nn

from remat_exec import BackwardError, BudgetExceeded, Executable
from remat_graph.torch import capture
from remat_solvers import store_all


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_same_gradients(model, other, **tolerance):
    for got, expected in zip(model.parameters(), other.parameters(), strict=True):
        if expected.grad is None or got.grad is None:
            assert got.grad is expected.grad
        else:
            torch.testing.assert_close(got.grad, expected.grad, **tolerance)


def pair(case):
    """A model run by its schedule, and the same one run by eager."""
    return case.remat(), case.model()


def test_two_forwards_before_the_backwards():
    results = []
    for model in pair(SHARED):
        torch.manual_seed(5)
        first = SHARED.loss(model(*SHARED.args()))
        second = SHARED.loss(model(*(2 * x for x in SHARED.args())))
        second.backward()
        first.backward()
        results.append(model)
    assert_same_gradients(*results)


def test_the_losses_of_two_forwards_in_one_backward():
    results = []
    for model in pair(SHARED):
        torch.manual_seed(5)
        loss = sum(SHARED.loss(model(*(s * x for x in SHARED.args()))) for s in (1, 2))
        loss.backward()
        results.append(model)
    assert_same_gradients(*results)


def test_a_model_after_itself():
    case = Case("square", lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
                lambda: (torch.randn(3, 6).requires_grad_(),),
                lambda y: y.square().mean())  # fmt: skip
    results = []
    for model in pair(case):
        (x,) = case.args()
        case.loss(model(model(x) + 1)).backward()
        results.append(model)
        results.append(x.grad)
    assert_same_gradients(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_interleaved_models_do_not_meet():
    alone, together = [], []
    for case in (MLP, NORMED):
        model = case.remat()
        case.loss(model(*case.args())).backward()
        alone.append(gradients(model))
    models = [case.remat() for case in (MLP, NORMED)]
    losses = [c.loss(m(*c.args())) for c, m in zip((MLP, NORMED), models, strict=True)]
    for loss in losses:
        loss.backward()
    together = [gradients(model) for model in models]
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_two_modules_share_one_executable():
    first, second = MLP.remat(), MLP.model()
    with torch.no_grad():
        second[0].weight.mul_(2)
    other = Scheduled(second, MLP.captured)
    other.executable = first.executable
    losses = [MLP.loss(model(*MLP.args())) for model in (first, other)]
    losses[0].backward()
    losses[1].backward()
    eager = MLP.model()
    MLP.loss(eager(*MLP.args())).backward()
    assert_same_gradients(first, eager)
    assert not torch.equal(first.module[0].weight.grad, second[0].weight.grad)


def test_gradients_are_added_to_those_that_are_there():
    results = []
    for model in pair(MLP):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kept = [parameter.grad for parameter in model.parameters()]
        MLP.loss(model(*MLP.args())).backward()
        for parameter, before in zip(model.parameters(), kept, strict=True):
            assert parameter.grad is before
        results.append(model)
    assert_same_gradients(*results)


def test_no_two_gradients_share_memory():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(4)) for _ in range(2))

        def forward(self, x):
            return x + self.a + self.b

    case = Case("sum", Sum, lambda: (torch.randn(4),), lambda y: y.sum())
    model = case.remat()
    case.loss(model(*case.args())).backward()
    model.module.a.grad.add_(1)
    assert torch.equal(model.module.b.grad, torch.ones(4))


def test_a_second_backward_is_refused():
    model = MLP.remat()
    loss = MLP.loss(model(*MLP.args()))
    loss.backward(retain_graph=True)
    with pytest.raises(BackwardError, match="run forward again"):
        loss.backward()
    model.zero_grad()
    MLP.loss(model(*MLP.args())).backward()
    eager = MLP.model()
    MLP.loss(eager(*MLP.args())).backward()
    assert_same_gradients(model, eager)


def test_a_second_backward_without_retaining_is_refused_by_autograd_or_by_us():
    model = MLP.remat()
    output = model(*MLP.args())
    output.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


def test_a_gradient_of_a_gradient_is_refused():
    output = MLP.remat()(*MLP.args())
    with pytest.raises(BackwardError, match="create_graph=True"):
        output.sum().backward(create_graph=True)


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


def test_a_backward_tells_when_it_starts_and_ends():
    model, told = HEADS.remat(), []
    outputs = model.executable(
        model.module,
        list(HEADS.args()),
        lambda missing, released_outputs: told.append((missing, released_outputs)),
        lambda: told.append("end"),
    )
    loss = outputs.pop(0).sum()  # nobody holds this output now
    loss.backward()
    assert told == [(frozenset({1}), frozenset({0})), "end"]


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


def test_a_parameter_changed_between_forward_and_backward_is_an_error():
    model = MLP.remat()
    loss = MLP.loss(model(*MLP.args()))
    with torch.no_grad():
        model.module[2].weight.mul_(2)
    with pytest.raises(BackwardError, match="changed in place"):
        loss.backward()


def test_a_parameter_changed_before_an_unplanned_backward_is_an_error():
    model = HEADS.remat()
    output = model(*HEADS.args())
    with torch.no_grad():
        model.module.trunk[2].weight.mul_(2)
    with pytest.raises(BackwardError, match="changed in place"):
        output["left"].sum().backward()


def test_an_input_changed_between_forward_and_backward_is_an_error():
    model = MLP.remat()
    (x,) = MLP.args()
    loss = MLP.loss(model(x))
    x.zero_()
    with pytest.raises(BackwardError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda y: torch.ones(()).expand_as(y),
        lambda y: torch.randn(y.shape[::-1]).t(),
        lambda y: torch.randn(2 * y.shape[0], y.shape[1])[::2],
        lambda y: torch.zeros_like(y),
    ],
    ids=["expanded", "transposed", "strided", "zero"],
)
def test_incoming_gradients_of_any_layout(make):
    results = []
    for model in pair(MLP):
        output = model(*MLP.args())
        torch.manual_seed(4)
        output.backward(make(output))
        results.append(model)
    assert_same_gradients(*results)


def test_the_gradient_that_the_user_gives_is_left_as_it_is():
    class Assigns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 4)

        def forward(self, x):
            y = self.layer(x)
            y[:, 1:3] = 0.0
            return y

    case = Case("assigns", Assigns, lambda: (torch.randn(6, 5),), lambda y: y.sum())
    model, eager = pair(case)
    given = torch.ones(6, 4)
    for each in (model, eager):
        each(*case.args()).backward(given)
    assert torch.equal(given, torch.ones(6, 4))
    assert_same_gradients(model, eager)


def test_gradients_of_chosen_tensors_alone():
    model, eager = pair(MLP)
    chosen = [m.get_parameter(name) for m in (model.module, eager) for name in ("0.weight",)]
    got, expected = (
        torch.autograd.grad(MLP.loss(m(*MLP.args())), [p])[0]
        for m, p in zip((model, eager), chosen, strict=True)
    )
    torch.testing.assert_close(got, expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_inputs_that_require_a_gradient_get_one():
    case = Case("input", MLP.make, lambda: (torch.randn(4, 8).requires_grad_(),), MLP.loss)
    found = []
    for model in pair(case):
        (x,) = case.args()
        case.loss(model(x)).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_the_gradient_reaches_what_made_the_input():
    case = Case("inner", MLP.make, lambda: (torch.randn(4, 8).requires_grad_(),), MLP.loss)
    found = []
    for model in pair(case):
        weight = torch.full((8,), 0.5, requires_grad=True)
        case.loss(model(case.args()[0].detach() * weight)).backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found)


def test_hooks_of_parameters_and_outputs_run():
    results = []
    for model in pair(MLP):
        calls = []
        parameter = next(model.parameters())
        parameter.register_hook(lambda g: 2 * g)
        parameter.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p))
        output = model(*MLP.args())
        output.register_hook(lambda g: g + 1)
        MLP.loss(output).backward()
        assert len(calls) == 1
        results.append(model)
    assert_same_gradients(*results)


def test_a_frozen_parameter_gets_no_gradient():
    def frozen():
        model = MLP.make()
        model[2].requires_grad_(False)
        return model

    case = Case("frozen", frozen, MLP.make_args, MLP.loss)
    model, eager = pair(case)
    for each in (model, eager):
        MLP.loss(each(*MLP.args())).backward()
    assert_same_gradients(model, eager)
    assert model.module[2].weight.grad is None


def test_a_backward_in_another_thread_finds_its_step():
    import threading

    model, eager = pair(MLP)
    loss = MLP.loss(model(*MLP.args()))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    MLP.loss(eager(*MLP.args())).backward()
    assert_same_gradients(model, eager)


def test_without_outputs_to_differentiate_there_is_nothing_to_capture():
    captured = capture(HEADS.model(), HEADS.args(), costs="estimate")
    assert store_all(captured.graph).steps
    with pytest.raises(ValueError, match="none of the module's outputs gets a gradient"):
        captured.variant(frozenset(captured.program.tangents.values()))


def test_a_parameter_may_be_stepped_as_soon_as_its_gradient_is_there():
    class Gains(nn.Module):
        def __init__(self):
            super().__init__()
            self.gains = nn.ParameterList(torch.rand(600, 1024) + 0.5 for _ in range(3))
            self.enter = nn.Linear(4, 1024)

        def forward(self, x):
            x = self.enter(x)
            for gain in self.gains:
                x = torch.sin(x * gain)
            return x

    x = torch.randn(600, 4)
    torch.manual_seed(0)
    eager = Gains()
    copied = copy.deepcopy(eager)
    captured = capture(copied, (x,), costs="estimate")
    seen = []
    for model in (eager, Scheduled(copied, captured)):
        found = {}
        for name, parameter in model.named_parameters():

            def step(parameter, name=name, found=found):
                found[name.removeprefix("module.")] = parameter.grad.clone()
                with torch.no_grad():
                    parameter.add_(1.0)
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        model(x).square().sum().backward()
        seen.append(found)
    assert seen[0].keys() == seen[1].keys()
    for name, gradient in seen[0].items():
        assert torch.equal(seen[1][name], gradient), name


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

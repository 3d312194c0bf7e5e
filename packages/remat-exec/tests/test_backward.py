"""One backward for one forward, in whatever order and over whatever outputs; or a clear error."""

import copy

import pytest
import torch
from exec_cases.gradients import assert_same_gradients, pair
from exec_cases.models import HEADS, MLP, NORMED, SHARED, Case, Scheduled
from torch import nn

from remat_exec import BackwardError
from remat_graph.torch import capture


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


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

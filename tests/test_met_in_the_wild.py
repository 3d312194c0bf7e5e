"""What models of other packages do, in the smallest models that show it: right by every door."""

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from integration_cases.made import Made, linear, rows, weighted
from integration_cases.met_in_the_wild import (
    NOT_PLANNED,
    ONE_REGION,
    SEVERAL_REGIONS,
    MixedVolume,
)
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat_graph.torch import flatten

LIMIT_SECONDS = 0.1
STEPS = 3


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    yield
    torch.compiler.reset()


def by_example(model, args, budget, **options):
    return remat.rematerialize(model, args, budget=budget, limit_seconds=LIMIT_SECONDS, **options)


def at_first_call(model, args, budget, **options):
    return remat.rematerialize(model, budget=budget, limit_seconds=LIMIT_SECONDS, **options)


def by_backend(model, args, budget, **options):
    options |= {"budget": budget, "limit_seconds": LIMIT_SECONDS}
    return torch.compile(model, backend="remat", options=options)


def trained(make, args, door=None, budget="1MiB", **options):
    """Train by a door, or as it is; give what is left, and what stood for the model."""
    torch.manual_seed(0)
    model = make().train()
    run = model
    if door is not None:
        before = {name: _dense(tensor) for name, tensor in model.state_dict().items()}
        torch.manual_seed(1)
        run = door(model, args, budget, **options)
        after = model.state_dict()
        assert all(torch.equal(_dense(after[name]), tensor) for name, tensor in before.items())
    record = train(run, lambda m, _: m(*args), _loss, steps=STEPS)
    record.tensors = {
        name: None if item is None else _dense(item) for name, item in record.tensors.items()
    }
    return record, run


def _dense(tensor):
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor.clone()


def _loss(output):
    return weighted(item for item in flatten(output)[0] if item.requires_grad)


pytestmark = pytest.mark.filterwarnings(  # of torch, where it compiles by itself
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
    "ignore:.torch.jit:DeprecationWarning",
    "ignore:torch.ao.quantization is deprecated:DeprecationWarning",
    "ignore:Please use quant_min:UserWarning",
    "ignore:Sparse CSR tensor support is in beta:UserWarning",
)
DOORS = pytest.mark.parametrize("door", [by_example, at_first_call, by_backend])
BY_A_DOOR = [  # each case by one door, in turn; by the others in a sweep
    pytest.param(name, door, marks=() if (place - at) % 3 == 0 else pytest.mark.sweep)
    for place, name in enumerate({**ONE_REGION, **SEVERAL_REGIONS, **NOT_PLANNED})
    for at, door in enumerate((by_example, at_first_call, by_backend))
]


@pytest.mark.parametrize(
    ("name", "door"), [case for case in BY_A_DOOR if case.values[0] not in NOT_PLANNED]
)
@pytest.mark.filterwarnings("ignore:what was compiled ran as it is:remat.BudgetWarning")
def test_trains_as_eager_does(name, door):
    make, args = {**ONE_REGION, **SEVERAL_REGIONS}[name]
    assert_bitwise_equal(trained(make, args, door)[0], trained(make, args)[0])


@pytest.mark.parametrize(
    "name",
    swept(
        ONE_REGION, ["sparsemax", "repeated by counts", "lengths of segments", "a momentum encoder"]
    ),
)
@pytest.mark.filterwarnings(  # the loss is outside
    "ignore:(a step took|no plan leaves room):remat.BudgetWarning"
)
def test_trains_at_the_least_budget_as_eager_does(name):
    make, args = ONE_REGION[name]
    with pytest.raises(remat.BudgetTooSmall) as error:
        by_example(make().train(), args, 1)
    enough = int(1.05 * error.value.smallest_bytes)
    record, model = trained(make, args, by_example, enough)
    assert_bitwise_equal(record, trained(make, args)[0])
    assert model.plan.measured_peak_bytes <= enough


@DOORS
def test_a_view_lies_as_it_was_traced(door):
    """Real views have another stride for the batch of one, by which a norm chooses its layout."""
    args = (torch.randn(1, 1, 4, 4, 4),)
    planned, plain = trained(MixedVolume, args, door)[0], trained(MixedVolume, args)[0]
    assert planned.tensors.keys() == plain.tensors.keys()
    for name, gradient in plain.tensors.items():
        torch.testing.assert_close(planned.tensors[name], gradient)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.jit.script(linear()), lambda: torch.jit.trace(linear(), rows())],
    ids=["scripted", "traced"],
)
def test_what_jit_made_is_refused_as_a_whole(make):
    with pytest.raises(remat.RematError, match=r"Linear was made by torch\.jit.*give the module"):
        remat.rematerialize(make(), budget="1MiB")
    whole = nn.Sequential(linear(), make())
    with pytest.raises(remat.RematError, match=r"Linear was made by torch\.jit.*give the module"):
        remat.rematerialize(whole, budget="1MiB", regions="1")
    with pytest.raises(remat.CaptureError, match=r"^1 was made by torch\.jit.*between regions"):
        remat.plan(whole, rows(), budget="1MiB")


@pytest.mark.parametrize(
    ("name", "door"), [case for case in BY_A_DOOR if case.values[0] in NOT_PLANNED]
)
def test_is_refused_by_name_or_runs_as_it_is(name, door):
    make, args, message = NOT_PLANNED[name]
    with pytest.raises(remat.CaptureError, match=message):
        door(make().train(), args, "1MiB")(*args)
    with pytest.warns(remat.BudgetWarning, match="runs without a plan, and may take more") as told:
        record, model = trained(make, args, door, on_infeasible="plain")
    assert len(told) == 1
    assert_bitwise_equal(record, trained(make, args)[0])
    if door is not by_backend:
        assert "runs without a plan" in str(model.plan)


def test_a_model_without_a_graph_runs_as_it_is_if_asked_to():
    scores = torch.randn(12, 2, 5).log_softmax(2).requires_grad_()
    given = scores, torch.randint(1, 5, (2, 3)), torch.full((2,), 12), torch.full((2,), 3)
    model = remat.rematerialize(nn.CTCLoss(), budget=10**6, on_infeasible="plain")
    with pytest.warns(remat.BudgetWarning, match="the model runs without a plan") as told:
        losses = [model(*given) for _ in range(2)]
    assert len(told) == 1
    assert torch.equal(losses[0], nn.CTCLoss()(*given))
    assert "without a plan" in str(model.plan)


@pytest.mark.parametrize("door", [at_first_call, pytest.param(by_example, marks=pytest.mark.sweep)])
def test_a_singular_matrix_is_an_error_of_its_step(door):
    model = Made(lambda m, x, matrix: m.layer(x) @ torch.linalg.inv(matrix), layer=linear())
    args = rows(), torch.eye(16)
    run = door(model, args, "1MiB")
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"inv_ex: .* singular"):
            run(rows(), torch.zeros(16, 16))
        run(*args).sum().backward()

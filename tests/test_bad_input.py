"""Bad input: an error of ours that says what would work, and an original that trains as before."""

import copy
import importlib.metadata

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from torch import nn

import remat
from remat_graph import plugins
from remat_solvers import store_all as plugin_module

LIMIT_SECONDS = 0.5


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 24),
        nn.Sigmoid(), nn.Linear(24, 4),
    )  # fmt: skip


def batch(size=32):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(1))


def loss(output):
    return output.square().mean()


def trains_as_before(model, fresh, call=lambda m, _: m(batch())):
    assert "forward" not in vars(model)
    assert_bitwise_equal(train(model, call, loss), train(fresh, call, loss))


@pytest.fixture
def original():
    """A model that must train as a fresh one does after the test."""
    model = net()
    state = torch.get_rng_state()
    yield model
    assert torch.equal(torch.get_rng_state(), state)
    trains_as_before(model, net())


def rematerialize(model, args=None, **kwargs):
    kwargs.setdefault("budget", 0.8)
    args = (batch(),) if args is None else args
    return remat.rematerialize(model, args, limit_seconds=LIMIT_SECONDS, **kwargs)


class Branches(nn.Module):
    """Forward with control flow that depends on data."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:  # the line that the error names
            return y
        return -y


def test_control_flow_that_depends_on_data_names_the_line():
    model = Branches()
    fresh = copy.deepcopy(model)
    with pytest.raises(remat.CaptureError, match="depends on the data of a tensor") as error:
        rematerialize(model)
    assert __file__ in str(error.value)
    assert "if y.sum() > 0" in str(error.value)
    assert "torch.where" in str(error.value)
    trains_as_before(model, fresh)


@pytest.mark.parametrize("budget", ["8 parsecs", "plenty", 0, -1, "-1GiB", 0.0, 1.5, None, [1]])
def test_a_budget_that_is_none(original, budget):
    with pytest.raises(remat.BudgetError, match="budget="):
        rematerialize(original, budget=budget)


def test_a_budget_that_is_too_small_names_one_that_is_not(original):
    with pytest.raises(remat.BudgetTooSmall, match="raise the budget") as error:
        rematerialize(copy.deepcopy(original), budget=2000)
    assert error.value.budget_bytes == 2000
    assert error.value.smallest_bytes > 2000
    assert error.value.least_bytes <= error.value.smallest_bytes
    model = rematerialize(copy.deepcopy(original), budget=error.value.smallest_bytes)
    assert model.plan.measured_peak_bytes <= error.value.smallest_bytes


def test_a_lazy_plan_that_fails_leaves_the_model_usable(original):
    model = remat.rematerialize(original, budget=2000, limit_seconds=LIMIT_SECONDS)
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(remat.BudgetTooSmall):
            model(batch())
    model.eval()(batch())
    model.train()
    torch.set_rng_state(state)


def test_example_inputs_on_another_device(original):
    with pytest.raises(remat.CaptureError, match=r"is on meta, the module on cpu; move one"):
        rematerialize(original, (batch().to("meta"),))


def test_costs_cannot_be_measured_on_the_meta_device():
    with pytest.raises(remat.CaptureError, match=r"measured on the meta device; give costs='est"):
        remat.plan(net().to("meta"), (batch().to("meta"),), budget=0.5)


def test_no_parameter_that_requires_a_gradient():
    model = net().requires_grad_(False)
    with pytest.raises(remat.CaptureError, match="no parameter of the module requires a gradient"):
        rematerialize(model)
    trains_as_before(model.requires_grad_(True), net())


def test_an_output_that_depends_on_no_parameter(original):
    class Constant(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return x * 2

    with pytest.raises(remat.CaptureError, match="no backward pass to plan"):
        rematerialize(Constant(original))


def test_an_unknown_solver(original):
    with pytest.raises(remat.SolverError, match=r"no solver is called 'refin'; did you mean 'ref"):
        rematerialize(original, solver="refin")


class OverBudget(plugin_module.StoreAll):
    """A third party's solver that stores everything, whatever the budget."""

    def solve(self, problem, limit, report):
        import dataclasses

        roomy = dataclasses.replace(problem, budget_bytes=10**12)
        return dataclasses.replace(super().solve(roomy, limit, report), peak_bytes=1)


class Failing(plugin_module.StoreAll):
    """A third party's solver that fails."""

    def solve(self, problem, limit, report):
        raise KeyError("boom")


@pytest.fixture
def third_party(monkeypatch):
    """Offer solvers of this module, and one that does not import, by entry points."""
    installed = importlib.metadata.entry_points
    plugin_module.OverBudget, plugin_module.Failing = OverBudget, Failing
    points = [
        importlib.metadata.EntryPoint(name, f"remat_solvers.{target}", "remat.solvers")
        for name, target in (
            ("over", "store_all:OverBudget"), ("failing", "store_all:Failing"),
            ("missing", "nowhere:Nothing"),
        )
    ]  # fmt: skip

    def entry_points(**params):
        found = installed(**params)
        if params.get("group") == "remat.solvers":
            return importlib.metadata.EntryPoints([*found, *points])
        return found

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    plugins._find_on.cache_clear()
    yield
    plugins._find_on.cache_clear()
    del plugin_module.OverBudget, plugin_module.Failing


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("solver", "message"),
    [("over", "over the budget"), ("failing", "KeyError"), ("missing", "does not load")],
)
def test_a_broken_solver_of_a_third_party_is_named(original, solver, message):
    assert solver in remat.list_solvers()
    with pytest.raises(remat.SolverError, match=f"solver '{solver}' of .*{message}"):
        rematerialize(original, solver=solver)


@pytest.mark.usefixtures("third_party")
def test_a_broken_solver_disturbs_no_other(original):
    assert rematerialize(copy.deepcopy(original)).plan.recomputations >= 0


def test_a_second_backward(original):
    model = rematerialize(copy.deepcopy(original))
    torch_state = torch.get_rng_state()
    output = loss(model(batch()))
    output.backward(retain_graph=True)
    with pytest.raises(remat.BackwardError, match="run forward again"):
        output.backward()
    torch.set_rng_state(torch_state)


def test_a_batch_of_another_shape_that_the_model_cannot_take(original):
    model = rematerialize(copy.deepcopy(original))
    with pytest.raises(remat.CaptureError, match=r"cannot be traced.*same reduction dim"):
        model(torch.randn(4, 9, generator=torch.Generator()))


def test_a_model_in_eval_mode(original):
    with pytest.raises(remat.RematError, match=r"call model\.train\(\)"):
        rematerialize(copy.deepcopy(original).eval())


def test_something_that_is_no_module():
    with pytest.raises(remat.RematError, match=r"need a torch\.nn\.Module, not a function"):
        rematerialize(net)


def test_costs_that_are_none(original):
    with pytest.raises(remat.CaptureError, match="costs='guess'"):
        rematerialize(original, costs="guess")


def test_progress_that_fails_is_the_users_own_error(original):
    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rematerialize(original, progress=fail)


def test_a_negative_time_limit(original):
    with pytest.raises(remat.SolverError, match="limit_seconds=-1"):
        remat.rematerialize(original, batch(), budget=0.8, limit_seconds=-1)

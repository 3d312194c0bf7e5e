"""Steps by compiled groups of operators: right, within the budget, by eager kernels at first."""

import copy
import logging
import pickle
from dataclasses import replace

import pytest
import torch
from integration_cases.grouped import Layers, assert_same_steps, batch, compiled, groups, step

import remat
from remat.planning import planner
from remat_exec import measure_peak
from remat_graph.torch import run_fused, run_over
from remat_graph.torch.fusing import compiling

pytestmark = pytest.mark.usefixtures("kernels_compiled_here")


@pytest.fixture(scope="module")
def planned():
    """A model by compiled groups, and the one that it came from."""
    plain = Layers().double()
    return compiled(copy.deepcopy(plain), batch()), plain


def test_a_step_of_groups_is_right(planned):
    ours, plain = planned
    assert groups(ours) > 4
    assert "run_fused" in ours.plan.source
    assert "compiled groups of operations" in str(ours.plan)
    assert "in no group" not in str(ours.plan)
    assert_same_steps(ours, plain, batch())


@pytest.mark.sweep
@pytest.mark.parametrize("of", ["last", "both"])
def test_other_backwards_than_planned_for_are_right(planned, of):
    ours, plain = planned
    ours, plain = copy.deepcopy(ours), copy.deepcopy(plain)

    def loss(output):
        last = output["last"].square().sum()
        return last if of == "last" else last + output["loss"]

    assert_same_steps(ours, plain, batch(), of=loss)


@pytest.mark.sweep
def test_a_backward_in_part_is_right(planned):
    ours, plain = planned
    x = batch()
    found = []
    for model in (ours, plain):
        torch.manual_seed(1)
        found.append(
            torch.autograd.grad(model(x)["loss"], [model.up[0].weight, model.norms[1].bias])
        )
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.sweep
def test_what_groups_take_lowers_no_target_of_eager_kernels(planned, monkeypatch):
    plain, x = copy.deepcopy(planned[1]), batch()
    budget = remat.plan(plain, x, budget=1.0, costs="estimate").budget_bytes * 5 // 4
    rehearse, taken = planner.rehearsed, []

    def rehearsed(executable, *args):
        peak = rehearse(executable, *args)
        grouped = "run_fused" in executable.source or "run_over" in executable.source
        taken.append(grouped)
        return replace(peak, peak_bytes=peak.peak_bytes + budget) if grouped else peak

    monkeypatch.setattr(planner, "rehearsed", rehearsed)
    ours = compiled(copy.deepcopy(plain), x, budget=budget)
    assert groups(ours) == 0
    assert ours.plan.recomputations == 0
    assert (taken[0], taken[-1]) == (True, False)
    assert ours.plan.measured_peak_bytes <= budget
    assert_same_steps(ours, plain, x)


@pytest.mark.sweep
def test_the_budget_holds():
    plain = Layers(depth=4).double()
    x = batch(rows=64)
    with measure_peak() as whole:
        step(plain, x)
    plain.zero_grad(set_to_none=True)
    ours = compiled(copy.deepcopy(plain), x, budget=0.6)
    assert ours.plan.recomputations > 0
    step(ours, x)
    ours.zero_grad(set_to_none=True)
    with measure_peak() as peak:
        loss = step(ours, x)
    assert peak.peak_bytes <= ours.plan.budget_bytes <= 0.6 * whole.peak_bytes + 4096
    del loss


@pytest.mark.sweep
def test_several_regions_run_groups():
    plain = Layers(broken=True).double()
    ours = compiled(copy.deepcopy(plain), batch())
    assert_same_steps(ours, plain, batch())
    assert_same_steps(ours, plain, batch())
    assert groups(ours) > 0


@pytest.mark.sweep
def test_under_autocast():
    plain = Layers()
    x = batch().float()
    ours = remat.rematerialize(
        copy.deepcopy(plain), budget="1MiB", kernels="inductor", wait=True, costs="estimate"
    )
    losses = []
    for model in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(step(model, x))
    assert groups(ours) > 4
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 0.05 * b.grad.abs().max()


@pytest.mark.sweep
def test_copies_and_pickles_plan_by_groups(planned):
    ours, plain = planned
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same_steps(again, copy.deepcopy(plain), batch())
        assert groups(again) > 4


@pytest.mark.sweep
def test_a_plan_file_says_which_operators_are_in_groups(planned, tmp_path):
    ours, plain = planned
    path = tmp_path / "plan.json"
    ours.plan.save(path)
    assert remat.Plan.load(path).kinds[0].unfused == ours.plan.kinds[0].unfused == ()
    again = compiled(copy.deepcopy(plain), batch(), plan=path)
    assert [op.name for op in again.plan.graph.ops] == [op.name for op in ours.plan.graph.ops]
    assert_same_steps(again, copy.deepcopy(plain), batch())


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    def fail(_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(compiling, "_compiled", fail)
    plain = Layers(1).double()
    x = batch(rows=5)
    ours = compiled(copy.deepcopy(plain), x)
    assert len(ours.plan.left_out) > 4
    assert f"{len(ours.plan.left_out)} operations, slower compiled or not" in str(ours.plan)
    assert ours.plan.left_out[0] in str(ours.plan)
    assert_same_steps(ours, plain, x)


@pytest.fixture
def _asks_for_a_compiler():
    compiling.missing_compiler.cache_clear()
    yield
    compiling.missing_compiler.cache_clear()


@pytest.mark.usefixtures("_asks_for_a_compiler")
def test_without_a_compiler_eager_kernels_run(monkeypatch, caplog):
    monkeypatch.setattr(
        "torch._inductor.cpp_builder.get_cpp_compiler", lambda: (_ for _ in ()).throw(OSError())
    )
    plain = Layers(1).double()
    with caplog.at_level(logging.WARNING):
        ours = compiled(copy.deepcopy(plain), batch())
    assert_same_steps(ours, plain, batch())
    assert groups(ours) == 0
    assert caplog.text.count("there is no C++ compiler") == 1
    assert "all operations: there is no compiler" in str(ours.plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "triton"}, "give 'eager' or 'inductor'"),
        ({"kernels": "inductor", "numerics": "bitwise"}, "leave out numerics='bitwise'"),
        ({"wait": True}, "give kernels='inductor', too"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(remat.RematError, match=message):
        remat.rematerialize(Layers(), batch(), budget=1.0, **options)


@pytest.mark.sweep
def test_as_a_back_end(planned):
    plain = copy.deepcopy(planned[1])
    plans = []
    torch._dynamo.reset()  # other tests have come near its limit
    ours = torch.compile(
        copy.deepcopy(plain),
        backend="remat",
        options={
            "budget": "1MiB", "kernels": "inductor", "wait": True, "costs": "estimate",
            "on_plan": plans.append,
        },
    )  # fmt: skip
    assert_same_steps(ours, plain, batch())
    assert any(op.name.endswith("__fused") for op in plans[-1].graph.ops)


def test_a_dry_plan_counts_groups():
    plan = remat.plan(Layers(1).double(), batch(), budget=1.0, costs="estimate", kernels="inductor")
    assert any(op.name.endswith("__fused") for op in plan.graph.ops)
    eager = remat.plan(Layers(1).double(), batch(), budget=1.0, costs="estimate")
    assert plan.time < eager.time


def test_groups_are_calls_that_any_executor_runs(planned):
    ours, _ = planned
    source = ours.plan.source
    calls = sum(source.count(f"{run.__name__}__(") for run in (run_fused, run_over))
    assert calls >= groups(ours)

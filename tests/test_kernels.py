"""Steps by compiled groups of operators: right, within the budget, by eager kernels at first."""

import copy
import logging
import pickle
from dataclasses import replace

import pytest
import torch
from integration_cases.kernels import Here, compiled_here
from torch import nn

import remat
from remat.planning import planner
from remat.session import kernels as region_kernels
from remat.session import step_kernels, step_planner
from remat_exec import measure_peak
from remat_graph import Status
from remat_graph.torch import run_fused, run_over
from remat_graph.torch.capturing import ways
from remat_graph.torch.fusing import compiling
from remat_graph.torch.fusing.missing import see_compiled

WIDTH = 8


class Layers(nn.Module):
    """Layers with a norm, a GELU that is written out, and a dropout; all outputs can be trained."""

    def __init__(self, depth=2, broken=False):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(depth))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.broken = broken

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            hidden = up(norm(x))
            hidden = 0.5 * hidden * (1 + torch.tanh(0.8 * (hidden + 0.04 * hidden**3)))
            x = x + down(nn.functional.dropout(hidden, 0.2, self.training))
            if self.broken:
                torch._dynamo.graph_break()
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)))
        return {"loss": x.square().mean(), "last": x.sigmoid() * 2}


@pytest.fixture(autouse=True, scope="module")
def _here():
    with compiled_here():
        yield


def batch(rows=4):
    return torch.randn(rows, 6, WIDTH, dtype=torch.double)


def compiled(model, *args, budget="1MiB", **options):
    """Plan by estimates, by which groups are faster."""
    return remat.rematerialize(
        model, args, budget=budget, kernels="inductor", wait=True, costs="estimate",
        limit_seconds=0.1, **options,
    )  # fmt: skip


def groups(model):
    return sum(op.name.endswith("__fused") for graph, _ in model.plan.runs for op in graph.ops)


def step(model, *args, of=lambda output: output["loss"]):
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    loss = of(model(*args))
    loss.backward()
    return loss.detach()


def assert_same_steps(ours, plain, *args, **options):
    for _ in range(2):
        one, two = (step(model, *args, **options) for model in (ours, plain))
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        for a, b in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


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


class Later:
    """A compilation that is done when it is told so: then this process may load the kernels."""

    done = False

    def __init__(self, kernels):
        self.kernels = list(kernels)
        self.count = len(self.kernels)

    @property
    def is_done(self):
        if Later.done:
            see_compiled(self.kernels)
        return Later.done

    def wait(self):
        assert Later.done


def test_until_kernels_are_there_eager_ones_run(planned, monkeypatch):
    plain = copy.deepcopy(planned[1])
    monkeypatch.setattr(region_kernels, "Compilation", Later)
    monkeypatch.setattr(Later, "done", False)
    ours = remat.rematerialize(
        copy.deepcopy(plain), budget="1MiB", kernels="inductor", costs="estimate", limit_seconds=0.1
    )
    for _ in range(3):
        assert_same_steps(ours, plain, batch())
        assert groups(ours) == 0
        assert "all operations: compiled groups are made beside the steps" in str(ours.plan)
    monkeypatch.setattr(Later, "done", True)
    assert_same_steps(ours, plain, batch())
    assert groups(ours) > 4
    assert ours.plan.no_groups is None


class Two(nn.Module):
    """Two regions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Layers(1), Layers(1)

    def forward(self, x):
        x = self.first(x)["last"]
        torch._dynamo.graph_break()
        return self.second(x)


LATER = {"budget": "1MiB", "kernels": "inductor", "costs": "estimate", "limit_seconds": 0.1}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo's
@pytest.mark.parametrize("way", ["rematerialize", pytest.param("compile", marks=pytest.mark.sweep)])
def test_steps_of_several_regions_run_eager_kernels_at_first(monkeypatch, way):
    monkeypatch.setattr(step_kernels, "Compilation", Later)
    monkeypatch.setattr(Later, "done", False)
    plain, loaded = Two().double(), []
    ours = copy.deepcopy(plain)
    if way == "compile":
        ours.compile(backend="remat", options=LATER)
    else:
        ours = remat.rematerialize(ours, **LATER)
    load = compiling.compile_kernels
    monkeypatch.setattr(
        "remat_graph.torch.capturing.ways.compile_kernels",
        lambda kernels: loaded.append(len(kernels)) or load(kernels),
    )
    for _ in range(3):
        assert_same_steps(ours, plain, batch())
    assert not loaded
    monkeypatch.setattr(Later, "done", True)
    for _ in range(3):
        assert_same_steps(ours, plain, batch())
    assert sum(loaded) > 4
    if way == "rematerialize":
        assert groups(ours) > 4
        assert ours.plan.measured_peak_bytes <= ours.plan.budget_bytes


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:a step of:remat.BudgetWarning")
@pytest.mark.parametrize("on_infeasible", ["raise", "plain"])
def test_steps_go_on_as_before_where_groups_have_no_plan(monkeypatch, caplog, on_infeasible):
    monkeypatch.setattr(step_kernels, "Compilation", Later)
    monkeypatch.setattr(Later, "done", False)
    plain = Two().double()
    ours = remat.rematerialize(copy.deepcopy(plain), **LATER, on_infeasible=on_infeasible)
    for _ in range(2):
        assert_same_steps(ours, plain, batch())
    monkeypatch.setattr(Later, "done", True)
    choose = step_planner.choose_options

    def refuse(kinds, record, room):
        if any(kind.unfused is not None for kind in kinds):
            raise remat.BudgetTooSmall(1, 2, 0, None, Status.LIMIT)
        return choose(kinds, record, room)

    monkeypatch.setattr(step_planner, "choose_options", refuse)
    for _ in range(2):
        assert_same_steps(ours, plain, batch())
    assert "go on by eager kernels" in caplog.text
    assert groups(ours) == 0
    assert_same_steps(ours, plain, batch(5))  # regions of another size, found after that


@pytest.mark.sweep
def test_steps_of_ever_new_regions_run_eager_kernels(monkeypatch, caplog):
    monkeypatch.setattr(step_kernels, "_MOST", 3)
    monkeypatch.setattr(step_kernels, "Compilation", Later)
    monkeypatch.setattr(Later, "done", True)
    plain = Two().double()
    ours = remat.rematerialize(copy.deepcopy(plain), **LATER)
    with caplog.at_level(logging.INFO, "remat"):
        for rows in (3, 4, 4, 4):
            assert_same_steps(ours, plain, batch(rows))
    assert "ever new regions" in caplog.text
    assert groups(ours) == 0


@pytest.mark.sweep
def test_kernels_of_one_size_are_compiled_at_a_time(planned, monkeypatch):
    plain = copy.deepcopy(planned[1])
    started = []

    class Counted(Later):
        def __init__(self, kernels):
            super().__init__(kernels)
            started.append(len(kernels))

    monkeypatch.setattr(region_kernels, "Compilation", Counted)
    monkeypatch.setattr(Later, "done", False)
    ours = remat.rematerialize(
        plain, budget="1MiB", kernels="inductor", costs="estimate", limit_seconds=0.1
    )
    for rows in (4, *[7] * 6, *[9] * 8):  # from the second size on they share a graph
        step(ours, batch(rows))
    assert len(started) == 1
    monkeypatch.setattr(Later, "done", True)
    step(ours, batch(9))
    assert len(started) == 2


@pytest.mark.sweep
def test_kernels_that_a_plan_needs_besides_are_compiled_beside_the_steps(monkeypatch):
    """Which these are is known once some were measured, and are left out of groups."""
    plain, batches = Layers(1).double(), [batch(9) for _ in range(8)]
    started, there, within_steps = [], set(), []
    compile_ = compiling._compiled

    def noted(kernel):
        within_steps.extend([] if kernel.key in there else [kernel.key])
        return compile_(kernel)

    class Counted(Here):
        def __init__(self, kernels):
            there.update(kernel.key for kernel in kernels)
            super().__init__(kernels)
            started.append(self.count)

    def left_out(program, times_of, left_out=frozenset()):
        times_of(program)
        return left_out | {op for op in program.calls if op == "mul_3"}

    monkeypatch.setattr(compiling, "_compiled", noted)
    monkeypatch.setattr(region_kernels, "Compilation", Counted)
    monkeypatch.setattr(ways, "ops_left_out", left_out)
    ours = remat.rematerialize(
        copy.deepcopy(plain), budget="1MiB", kernels="inductor", limit_seconds=0.1
    )
    for inputs in batches:
        assert_same_steps(ours, plain, inputs)
    assert groups(ours) > 0
    assert len(started) >= 2
    assert all(started)
    assert not within_steps


def test_where_no_plan_by_groups_is_found_eager_kernels_go_on(planned, monkeypatch, caplog):
    plain = copy.deepcopy(planned[1])
    monkeypatch.setattr(region_kernels, "Compilation", Later)
    monkeypatch.setattr(Later, "done", True)
    ours = remat.rematerialize(
        copy.deepcopy(plain), budget="1MiB", kernels="inductor", costs="estimate", limit_seconds=0.1
    )
    assert_same_steps(ours, plain, batch())

    def refuse(*_):
        raise remat.RematError("there is no such plan")

    monkeypatch.setattr("remat.session.session.Session.plan", refuse)
    for _ in range(3):
        assert_same_steps(ours, plain, batch())
    assert groups(ours) == 0
    assert "goes on by eager kernels: there is no such plan" in caplog.text


def test_what_cannot_be_compiled_runs_as_it_is(monkeypatch):
    def fail(_):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(compiling, "_compiled", fail)
    plain = Layers().double()
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
    plain = Layers().double()
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
    plan = remat.plan(Layers().double(), batch(), budget=1.0, costs="estimate", kernels="inductor")
    assert any(op.name.endswith("__fused") for op in plan.graph.ops)
    eager = remat.plan(Layers().double(), batch(), budget=1.0, costs="estimate")
    assert plan.time < eager.time


def test_groups_are_calls_that_any_executor_runs(planned):
    ours, _ = planned
    source = ours.plan.source
    calls = sum(source.count(f"{run.__name__}__(") for run in (run_fused, run_over))
    assert calls >= groups(ours)

"""Until compiled groups are there steps run by eager kernels, and go on by them where none come."""

import copy
import logging

import pytest
import torch
from integration_cases.grouped import Layers, assert_same_steps, batch, groups, step
from integration_cases.kernels import Here
from torch import nn

import remat
from remat.session import kernels as region_kernels
from remat.session import step_kernels, step_planner
from remat_graph import Status
from remat_graph.torch.capturing import ways
from remat_graph.torch.fusing import compiling
from remat_graph.torch.fusing.missing import see_compiled

pytestmark = pytest.mark.usefixtures("kernels_compiled_here")


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


def test_until_kernels_are_there_eager_ones_run(monkeypatch):
    plain = Layers(1).double()
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
def test_kernels_of_one_size_are_compiled_at_a_time(monkeypatch):
    plain = Layers().double()
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


def test_where_no_plan_by_groups_is_found_eager_kernels_go_on(monkeypatch, caplog):
    plain = Layers(1).double()
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

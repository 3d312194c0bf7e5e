"""Plans as documents: what is written is read again, and what contradicts itself is refused."""

import json
from dataclasses import replace

import pytest

import remat
from remat.plans.origin import Origin
from remat.plans.regions import PlannedRegion
from remat.report.facts import title_of
from remat_graph import (
    Compute,
    DocumentError,
    Free,
    Graph,
    Op,
    Schedule,
    Stage,
    Status,
    Trial,
    Value,
    simulate,
)
from remat_solvers.step import RegionBound, RegionFront, TimeStep, measure_option


def graph_of(size):
    sizes = {"x": 100, "w": 10, "a": size, "y": 60, "dy": 60, "dw": 10}
    ops = (
        Op("f", ("x", "w"), ("a",), 1.0),
        Op("g", ("a",), ("y",), 2.0),
        Op("loss", ("y",), ("dy",), 0.0, stage=Stage.BACKWARD, replayable=False),
        Op("back", ("a", "dy"), ("dw",), 4.0, stage=Stage.BACKWARD),
    )
    values = tuple(Value(name, each) for name, each in sizes.items())
    return Graph(values, ops, resident={"x", "w"}, results={"dw"}, boundary="loss")


def schedule_of(text):
    words = text.split()
    return Schedule(tuple(Free(w[1:]) if w[0] == "-" else Compute(w) for w in words))


AGAIN = schedule_of("f g -a loss -y f back -a -dy")
STORED = schedule_of("f g loss -y back -a -dy")


def region(size, **taken):
    graph = graph_of(size)
    options = tuple(
        measure_option(graph, schedule, lower_bound=7.0) for schedule in (AGAIN, STORED)
    )
    bounds = (RegionBound(0, 500, float("inf")), RegionBound(60, 500, 7.0))
    return PlannedRegion(RegionFront(graph, options, bounds, 60, 160, 70), **taken)


ONE = replace(
    remat.Plan.of(graph_of(400), AGAIN, 600),
    status=Status.OPTIMAL,
    trials=(Trial("refine", Status.LIMIT, None, 700, 7.0, 0.5),),
    measured_peak_bytes=590,
    source="def forward():",
)
ONE = replace(
    ONE,
    kinds=(
        replace(ONE.kinds[0], missing=frozenset({2, 1}), released_outputs={3}, laid_out=(4, 0)),
    ),
)
SEVERAL = remat.Plan(
    calls=(("Net.block", 0), ("Net.head", 1), ("Net.block", 0)),
    kinds=(region(400), region(900, missing=frozenset({1}))),
    chosen=(0, 0, 1),
    budget_bytes=5000,
    lower_bound=21.0,
    origin=Origin("1", "2", "cpu"),
    moments=(
        TimeStep(50, (), (0, "forward")),
        TimeStep(70, ((0, 1),), (1, "forward")),
        TimeStep(70, ((0, 1), (1, 1)), (2, "forward")),
        TimeStep(90, ((0, 1), (1, 1), (2, 1)), None),
        TimeStep(90, ((0, 1), (1, 1)), (2, "backward")),
        TimeStep(80, ((0, 1),), (1, "backward")),
        TimeStep(80, (), (0, "backward")),
    ),
    breaks=("a line of  code",),
    set_aside_bytes=30,
    plain_peak_bytes=6000,
    plain_basis="in proportion",
)
both = pytest.mark.parametrize("plan", [ONE, SEVERAL], ids=["one", "several"])


@both
def test_a_file_holds_all_of_a_plan(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    read = remat.Plan.load(path)
    assert read == replace(plan, source="")
    assert read.is_one_region == (plan is ONE)
    assert str(read) == str(plan)
    assert read.encode() == path.read_bytes()
    doubted = replace(plan, doubt="HIGHS was wrong")
    assert "not certified        HIGHS was wrong" in str(doubted)
    assert remat.Plan.decode(doubted.encode()) == replace(doubted, source="")


@both
def test_a_plan_is_one_graph_and_its_schedule(plan):
    timeline = simulate(plan.graph, plan.schedule)
    assert timeline.peak_bytes + plan.set_aside_bytes == plan.predicted_peak_bytes
    assert timeline.time == plan.time == plan.solution.time
    assert simulate(plan.graph, plan.store_all_schedule).peak_bytes == plan.store_all_peak_bytes
    assert plan.recomputations == sum(option.schedule == AGAIN for option in plan.options)
    assert plan.predicted_overhead > plan.bound_overhead == pytest.approx(0)


def test_what_is_printed_names_the_regions_or_the_solver():
    assert str(ONE).startswith("remat plan\n  operations           2 forward, 2 backward, 1 recomp")
    assert "solver               given (optimal), 0.0 s after 0.0 s of capture" in str(ONE)
    assert str(SEVERAL).startswith("remat plan of 3 calls of regions\n  budget")
    assert "plain autograd       0.0 MiB, by one step that was measured, in prop" in str(SEVERAL)
    assert "  break                a line of code" in str(SEVERAL)
    assert "solver" not in str(SEVERAL)
    assert title_of(replace(SEVERAL, calls=SEVERAL.calls[:1])) == "remat plan of one call"


def test_each_region_is_told_by_itself():
    step = SEVERAL.explain()
    assert [region.name for region in step.regions] == ["Net.block", "Net.head", "Net.block"]
    assert step.parts == tuple(part for region in step.regions for part in region.parts)
    assert ONE.explain().regions == ()


def change(key, value):
    return lambda document: document["body"].update({key: value})


def of_first(key, **changes):
    return lambda document: document["body"][key][0].update(changes)


def drop_a_step(document):
    document["body"]["kinds"][0]["options"][0]["schedule"]["body"]["steps"].pop(0)


def schedule_as_graph(document):
    kind = document["body"]["kinds"][0]
    kind["graph"] = kind["options"][0]["schedule"]


@both
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d.update(version=99), "is a plan of schema version 99"),
        (lambda d: d.update(version=1), "is a plan of schema version 1; this remat reads"),
        (lambda d: d.update(version=1, kind="step plan"), "is a step plan of schema version 1"),
        (lambda d: d.update(kind="graph"), "is of kind 'graph'; a plan is needed"),
        (change("more", 1), "more"),
        (change("budget_bytes", -1), "budget_bytes"),
        (change("budget_bytes", 2**63), "budget_bytes"),
        (change("predicted_peak_bytes", 5), "the peak of its schedule is"),
        (change("store_all_peak_bytes", 7), "the peak of storing everything is"),
        (change("lower_bound", 1e9), "less than its bound"),
        (change("status", "unknown"), "status"),
        (change("status", "infeasible"), "is said to be infeasible"),
        (change("kinds", []), "kinds"),
        (change("calls", []), "calls"),
        (change("chosen", []), "run by 0 options"),
        (of_first("kinds", options=[]), "options"),
        (of_first("kinds", outline="0" * 64), "hash of the outline of region 0"),
        (lambda d: d["body"]["chosen"].__setitem__(0, 99), "call 0 is of no option"),
        (lambda d: d["body"]["calls"].__setitem__(0, ["x", 99]), "call 0 is of no option"),
        (drop_a_step, "invalid plan"),
        (schedule_as_graph, "is of kind 'schedule'"),
    ],
)
def test_a_damaged_file_is_refused_by_name(plan, tmp_path, damage, said):
    refused(plan, tmp_path, damage, said)


@pytest.mark.parametrize(
    ("plan", "damage", "said"),
    [
        (ONE, lambda d: d["body"]["kinds"][0]["options"].extend(
            d["body"]["kinds"][0]["options"]), "it has no moments, and more than one"),
        (SEVERAL, change("moments", []), "it has no moments, and more than one"),
        (SEVERAL, of_first("moments", live=[[99, 1]]), "names a call that there is not"),
        (SEVERAL, of_first("moments", live=[[1, 1], [1, 1]]), "names a call that there is not"),
        (SEVERAL, of_first("moments", live=[[1, 2]]), "names a call that there is not"),
        (SEVERAL, of_first("moments", live=[[0, 1]]), "or one twice"),
        (SEVERAL, of_first("moments", fixed_bytes=-1), "a moment holds -1 bytes"),
        (SEVERAL, of_first("moments", running=[0, "sideways"]), "running"),
        (SEVERAL, lambda d: d["body"]["kinds"][0].update(
            graph=d["body"]["kinds"][1]["graph"]), "region 0"),
        (SEVERAL, lambda d: d["body"]["kinds"][0]["options"][0].update(lower_bound=1e9),
         "a bound of region 0"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused(plan, tmp_path, damage, said):
    refused(plan, tmp_path, damage, said)


def refused(plan, tmp_path, damage, said):
    path = tmp_path / "bad.json"
    document = json.loads(plan.encode())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(DocumentError, match=r"bad\.json") as error:
        remat.Plan.load(path)
    assert said in str(error.value)


@both
def test_a_file_that_is_cut_short_is_refused_by_name(plan, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(plan.encode()[:-20])
    with pytest.raises(DocumentError, match=r"bad\.json"):
        remat.Plan.load(path)

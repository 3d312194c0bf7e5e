"""Plans of models that are cut where a gradient was asked for, in files and from them."""

import json
import subprocess
import sys

import pytest
import torch
from integration_cases.asking import (
    ASKS,
    READS,
    Reading,
    assert_eagers,
    by_asking_for_others,
    by_hook,
    by_none,
    by_retaining,
    compiled,
    refused_until_planned,
    rematerialized,
)
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat.session import choosing, kind_finder
from remat_graph import DocumentError


def plan_of_one_region(x):
    return remat.plan(Reading(READS["whole"]), (x,), budget="1GiB", costs="estimate")


@pytest.mark.sweep
def test_a_model_with_a_plan_of_one_region_is_planned_anew(caplog):
    model, x = Reading(READS["whole"]), torch.randn(4, 6).double()
    planned = remat.rematerialize(model, plan=plan_of_one_region(x), costs="estimate")
    assert_eagers(planned, model, x, by_none)
    assert len(planned.plan.calls) == 1
    for ask in (by_asking_for_others, by_hook):
        refused = refused_until_planned(planned, model, x, ask)
        assert refused == (ask is by_asking_for_others)
        assert_eagers(planned, model, x, ask)
    assert len(planned.plan.calls) == 2
    assert "Reading.forward, 4 reads itself: steps are planned anew" in caplog.text


def saved(path, read, x, way=rematerialized):
    """Save the plan of a model whose hidden layer has had its gradient asked for."""
    model = Reading(READS[read])
    if way is compiled:
        torch._dynamo.reset()
        plans = []
        options = {"budget": "1GiB", "costs": "estimate", "on_plan": plans.append}
        planned = torch.compile(model, backend="remat", options=options)
    else:
        planned = way(model, x)
    refused_until_planned(planned, model, x, by_hook)
    for _ in range(3):
        assert_eagers(planned, model, x, by_hook)
    plan = plans[-1] if way is compiled else planned.plan
    plan.save(path)
    return plan


@pytest.mark.filterwarnings("error")  # that it is planned anew, say
@pytest.mark.parametrize(
    "read", swept(["whole", "in contexts", "a break", "twice", "drawing"], ["a break"])
)
def test_a_plan_that_was_saved_after_a_cut_is_followed_from_the_first_step_on(
    read, tmp_path, monkeypatch, caplog
):
    x = torch.randn(4, 6).double()
    plan = saved(tmp_path / "plan.json", read, x)
    monkeypatch.setattr(kind_finder, "region_front", None)  # nothing is solved
    monkeypatch.setattr(choosing, "choose", None)
    for args in ((x,), None):
        model = Reading(READS[read])
        loaded = remat.rematerialize(model, args, plan=tmp_path / "plan.json", costs="estimate")
        for ask in (by_hook, by_asking_for_others, by_retaining, by_none):
            assert_eagers(loaded, model, x, ask)
        assert loaded.plan.regions == plan.regions
        assert loaded.plan.cuts == plan.cuts
    assert not [record for record in caplog.records if "planned anew" in record.message]


IN_A_NEW_PROCESS = """
import sys, torch, remat
sys.path.insert(0, {folder!r})
from integration_cases.asking import *
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))  # another frame comes first
for way, path in {paths!r}.items():
    model, x = Reading(READS["whole"]), torch.randn(4, 6).double()
    if way == "compiled":
        options = {{"plan": path, "costs": "estimate"}}
        loaded = torch.compile(model, backend="remat", options=options)
    else:
        loaded = remat.rematerialize(model, (x,), plan=path, costs="estimate")
    for ask in (by_hook, by_asking_for_others, by_none, by_retaining):
        assert_eagers(loaded, model, x, ask)
"""


@pytest.mark.sweep
def test_so_it_is_in_a_new_process(tmp_path):
    paths = {}
    for way in (rematerialized, compiled):
        paths[way.__name__] = path = str(tmp_path / f"{way.__name__}.json")
        saved(path, "whole", torch.randn(4, 6).double(), way)
    folder = str(__file__).rpartition("/")[0]
    code = IN_A_NEW_PROCESS.format(folder=folder, paths=paths)
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


class Two(nn.Module):
    """Two blocks of one class, with a break between, or as regions; one output is returned."""

    def __init__(self, breaks):
        super().__init__()
        self.hidden, self.other = (Reading(READS["whole"]) for _ in range(2))
        self.other.hidden = nn.Linear(8, 8).double()
        self.breaks = breaks

    def forward(self, x):
        first, after = self.hidden(x)
        if self.breaks:
            torch._dynamo.graph_break()
        second, last = self.other(after)
        return first, second + last


@pytest.mark.sweep
@pytest.mark.parametrize("regions", [None, ["hidden", "other"]])
def test_regions_of_one_name_are_cut_alike_and_saved_so(regions, tmp_path, caplog):
    x = torch.randn(4, 6).double()
    model = Two(regions is None)
    planned = rematerialized(model, x, regions=regions)
    assert refused_until_planned(planned, model, x, by_retaining) == 1
    for _ in range(3):
        assert_eagers(planned, model, x, by_retaining)
    planned.plan.save(tmp_path / "plan.json")
    loaded = remat.rematerialize(
        model, (x,), regions=regions, plan=tmp_path / "plan.json", costs="estimate"
    )
    for _ in range(3):
        assert_eagers(loaded, model, x, by_retaining)
    assert loaded.plan.regions == planned.plan.regions
    assert "planned anew" not in caplog.text


@pytest.mark.sweep
def test_a_later_ask_cuts_a_loaded_plan_further(tmp_path):
    x = torch.randn(4, 6).double()
    saved(tmp_path / "plan.json", "one of another", x)
    model = Reading(READS["one of another"])
    loaded = remat.rematerialize(model, (x,), plan=tmp_path / "plan.json", costs="estimate")
    assert_eagers(loaded, model, x, by_hook)
    assert refused_until_planned(loaded, model, x, by_retaining) == 1
    for ask in ASKS:
        assert_eagers(loaded, model, x, ask)
    loaded.plan.save(tmp_path / "again.json")
    again = remat.rematerialize(model, (x,), plan=tmp_path / "again.json", costs="estimate")
    for ask in (by_retaining, by_hook):
        assert_eagers(again, model, x, ask)


def test_a_plan_of_schema_version_2_is_read(tmp_path):
    x = torch.randn(4, 6).double()
    document = json.loads(plan_of_one_region(x).encode())
    assert document["version"] == 6
    del document["body"]["cuts"]
    (tmp_path / "old.json").write_text(json.dumps(document | {"version": 2}))
    model = Reading(READS["whole"])
    loaded = remat.rematerialize(model, (x,), plan=tmp_path / "old.json", costs="estimate")
    assert_eagers(loaded, model, x, by_none)


@pytest.fixture(scope="module")
def cut_document(tmp_path_factory):
    """What the file of a plan says that was saved after a cut."""
    path = tmp_path_factory.mktemp("cut") / "plan.json"
    return json.loads(saved(path, "whole", torch.randn(4, 6).double()).encode())


@pytest.mark.parametrize(
    ("cuts", "error", "said"),
    [
        ([["Reading.forward, 4", [7]]], remat.PlanMismatch, "'Reading.forward, 4' at output 7"),
        ([["Reading.forward, 4", [1]]], remat.PlanMismatch, "'Reading.forward, 4' at output 1"),
        ([["Other.forward, 5", [0]]], remat.PlanMismatch, "cuts 'Other.forward, 5' at output 0"),
        ([], remat.PlanMismatch, "no plan for the region of call 0 of the step, 'Reading.forward"),
        ([["Reading.forward, 4", [0]]] * 2, DocumentError, "it cuts 'Reading.forward, 4' twice"),
        ([["Reading.forward, 4", []]], DocumentError, "cuts"),
        ([["Reading.forward, 4", [-1]]], DocumentError, "cuts"),
    ],
)
def test_damaged_and_foreign_cuts_are_refused_by_name(cuts, error, said, cut_document, tmp_path):
    assert cut_document["body"]["cuts"] == [["Reading.forward, 4", [0]]]
    document = cut_document | {"body": cut_document["body"] | {"cuts": cuts}}
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(error, match=r"bad\.json") as raised:
        rematerialized(
            Reading(READS["whole"]), torch.randn(4, 6).double(), plan=tmp_path / "bad.json"
        )
    assert said in str(raised.value)


def test_cuts_of_a_plan_of_one_region_are_refused(tmp_path):
    document = json.loads(plan_of_one_region(torch.randn(4, 6).double()).encode())
    document["body"]["cuts"] = [["Reading.forward, 4", [0]]]
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(DocumentError, match="is of one region, and cuts 'Reading"):
        remat.Plan.load(tmp_path / "bad.json")

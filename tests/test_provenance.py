"""Operations of a rematerialized model know the module and the source line that they come from."""

import torch
from torch import nn

import remat
from remat_graph import Stage


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.linear(self.norm(x)).relu()


class Model(nn.Module):
    """Two stages of blocks; between them a break, if there is to be one."""

    def __init__(self, *, broken=False):
        super().__init__()
        self.first = nn.Sequential(Block(), Block())
        self.second = nn.Sequential(Block(), Block())
        self.broken = broken

    def forward(self, x):
        x = self.first(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.second(x).square().sum()


X = torch.ones(4, 16)
MODULES = {
    f"{stage}.{index}{part}"
    for stage in ("first", "second")
    for index in range(2)
    for part in ("", ".norm", ".linear")
}


def modules(graph, stage):
    known = [op.provenance for op in graph.ops if op.stage is stage]
    return {place.module for place in known if place is not None}


def test_modules_are_named_as_in_the_model():
    model = remat.rematerialize(Model(), X, budget="1MiB")
    model(X).backward()
    graph = model.plan.graph
    assert modules(graph, Stage.FORWARD) == MODULES | {""}
    assert modules(graph, Stage.BACKWARD) == MODULES | {""}
    files = {op.provenance.source.split(":")[0] for op in graph.ops if op.provenance is not None}
    assert len(files) == 1
    assert files.pop().endswith("test_provenance.py")


def test_a_dry_plan_names_them_alike():
    graph = remat.plan(Model(), X, budget="1MiB", costs="estimate").graph
    assert modules(graph, Stage.FORWARD) == MODULES | {""}


def test_the_regions_of_a_step_name_them_and_are_told_one_by_one(tmp_path):
    model = remat.rematerialize(Model(broken=True), X, budget="1MiB")
    for _ in range(3):  # the first two are recorded
        model(X).backward()
    found = set()
    for graph in model.plan.graphs:
        found |= modules(graph, Stage.FORWARD)
    assert found == MODULES | {""}
    told = {each.name: each for each in model.plan.explain(by="module").regions}
    assert len(told) == 2
    labels = [{part.label for part in region.parts} for region in told.values()]
    assert "first.1.linear" in labels[0] - labels[1]
    assert "second.0.norm" in labels[1] - labels[0]
    model.plan.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<h3>Memory over the step</h3>") == 3
    assert all(f"<h2>{name}</h2>" in page for name in told)

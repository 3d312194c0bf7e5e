"""Who asks for the gradient of an output that the model also reads gets eager's, once planned for.

The first time is refused.
"""

import copy
import json
import subprocess
import sys

import pytest
import torch
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat.dynamo.parts import cut_at
from remat.session import choosing, kind_finder
from remat_exec import BackwardError, measure_peak
from remat_graph import DocumentError


class Reading(nn.Module):
    """Returns a hidden layer, and what `read` makes of it."""

    def __init__(self, read):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8)
        self.double()
        self.read = read

    def forward(self, x):
        return self.read(self, self.hidden(x))


def breaking(m, h):
    h = m.head(h)
    after = h + 1  # eager does not keep its input
    torch._dynamo.graph_break()
    return h, m.head(torch.tanh(after))


def drawing(m, h):
    dropped = nn.functional.dropout(h, 0.5)
    return dropped, m.head(nn.functional.dropout(dropped, 0.5))


def changing_in_place(m, h):
    other = h * 2
    h.add_(1)
    other[:, 0].mul_(2)
    return h, m.head(torch.tanh(h) + other)


def batched(m, h):
    """Tensors within `vmap` have no memory, and leave it only together."""
    h, other = torch.vmap(lambda row: (torch.tanh(row), row * 2))(h)
    return h, torch.vmap(lambda row: m.head(row).exp())(h) + other


def of_an_inner_region(m, h):
    h = torch.tanh(h)
    torch._dynamo.graph_break()
    h = m.head(h)
    out = (h.exp(), h.cos())
    torch._dynamo.graph_break()
    return h, out[0] * out[1].sum()


def a_part_of_a_view(m, h):
    first = h.view(2, 2, 8)[:, 0]
    return first, m.head(first.exp()).sum(0), h


def in_contexts(m, h):
    with torch.autocast("cpu", enabled=False):
        h = h * 2
    left, right = h.split(4, 1)
    with torch.no_grad():
        constant = left.sum()
    return h, m.head(nn.functional.dropout(h, 0.5)) * constant + right.sum()


def one_of_another(m, h):
    hidden = torch.tanh(h)
    after = m.head(hidden)
    return hidden, after.cos(), after


READS = {
    "whole": lambda m, h: (h, m.head(torch.tanh(h))),
    "twice": lambda m, h: (h, m.head(h) * h.cos() + h),
    "a view": lambda m, h: (h.view(-1), m.head(torch.tanh(h))),
    "a part of a view": a_part_of_a_view,
    "one of another": one_of_another,
    "in contexts": in_contexts,
    "drawing": drawing,
    "changing in place": changing_in_place,
    "a break": breaking,
    "an inner region": of_an_inner_region,
    "batched": batched,
}


def total(outputs):
    return sum(output.square().sum() for output in outputs)


def see(seen):
    """Make a hook that reads what it is given."""
    return lambda *given: seen.extend(g + 0 for g in given[-1] if g is not None)


def by_hook(outputs, module):
    seen = []
    outputs[0].register_hook(lambda grad: seen.append(grad + 0))
    total(outputs).backward()
    return seen


def by_changing(outputs, module):
    outputs[0].register_hook(lambda grad: 3 * grad)
    total(outputs).backward()
    return []


def by_retaining(outputs, module):
    for output in outputs:
        output.retain_grad()
    total(outputs).backward()
    return [output.grad + 0 for output in outputs]


def by_asking(outputs, module):
    return [g + 0 for g in torch.autograd.grad(total(outputs), outputs)]


def by_asking_for_others(outputs, module):
    asked = [outputs[0], module.hidden.weight]
    return [g + 0 for g in torch.autograd.grad(total(outputs), asked)]


def by_edge(outputs, module):
    edge = torch.autograd.graph.get_gradient_edge(outputs[0])
    found = torch.autograd.grad(total(outputs), [module.hidden.weight, edge])
    return [g + 0 for g in found]


def by_inputs(outputs, module):
    total(outputs).backward(inputs=[outputs[0], module.hidden.weight])
    return [outputs[0].grad + 0]


def by_hook_of_node(outputs, module):
    seen = []
    outputs[0].grad_fn.register_prehook(see(seen))
    total(outputs).backward()
    return seen


def by_hook_after_node(outputs, module):
    seen = []
    outputs[0].grad_fn.register_hook(see(seen))
    total(outputs).backward()
    return seen


def by_hook_of_several(outputs, module):
    seen = []
    torch.autograd.graph.register_multi_grad_hook(outputs, see(seen))
    total(outputs).backward()
    return seen


def of_the_inner_part_alone(outputs, module):
    outputs[0].retain_grad()
    outputs[1].sum().backward()
    return [] if outputs[0].grad is None else [outputs[0].grad + 0]


def by_none(outputs, module):
    total(outputs).backward()
    return []


ASKS = [
    by_hook,
    by_changing,
    by_retaining,
    by_asking,
    by_asking_for_others,
    by_edge,
    by_inputs,
    by_hook_of_node,
    by_hook_after_node,
    by_hook_of_several,
    of_the_inner_part_alone,
    by_none,
]


def asked(model, module, x, ask):
    """Give what is found by one who asks, and all gradients after it."""
    module.zero_grad()
    torch.manual_seed(0)
    found = ask(model(x), module)
    return [*found, *(parameter.grad for parameter in module.parameters())]


def assert_eagers(model, module, x, ask):
    got, expected = (asked(one, module, x, ask) for one in (model, module))
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12)


def refused_until_planned(model, module, x, ask):
    """Ask until autograd has whole gradients, and say how often that was refused."""
    for refused in range(4):
        try:
            asked(model, module, x, ask)
        except BackwardError as error:
            message = str(error)
        else:
            return refused
        assert "run forward again" in message
    pytest.fail("it is refused for good")


def rematerialized(model, x, **options):
    return remat.rematerialize(model, (x,), **{"budget": "1GiB", "costs": "estimate", **options})


def compiled(model, x):
    torch._dynamo.reset()
    return torch.compile(model, backend="remat", options={"budget": "1GiB", "costs": "estimate"})


def copied(model, x):
    return copy.deepcopy(rematerialized(model, x))


@pytest.mark.parametrize(
    "read", swept(READS, ["a view", "a part of a view", "changing in place", "an inner region"])
)
def test_whole_gradients_are_eagers_from_the_second_time_on(read):
    model, x = Reading(READS[read]), torch.randn(4, 6).double()
    planned = rematerialized(model, x)
    refused = refused_until_planned(planned, model, x, by_retaining)
    assert (refused == 0) == (read == "a view")  # of its own, which nothing reads
    for ask in ASKS:
        assert_eagers(planned, model, x, ask)


@pytest.mark.parametrize(
    "ask", swept(ASKS[:-1], [by_edge, by_inputs, by_hook_after_node, by_hook_of_several])
)
def test_each_way_to_ask_is_seen(ask):
    model, x = Reading(READS["whole"]), torch.randn(4, 6).double()
    planned = rematerialized(model, x)
    assert_eagers(planned, model, x, by_none)
    assert refused_until_planned(planned, model, x, ask) == 1
    assert_eagers(planned, model, x, ask)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's
@pytest.mark.parametrize("read", swept(["whole", "a break"], ["a break"]))
def test_so_are_those_of_what_torch_compiles(read):
    model, x = Reading(READS[read]), torch.randn(4, 6).double()
    planned = compiled(model, x)
    assert refused_until_planned(planned, model, x, by_hook) == 1
    for each in (x, x, x[:2], x[:3]):
        assert_eagers(planned, model, each, by_hook)


@pytest.mark.sweep
def test_so_are_those_of_copies_and_of_other_sizes():
    model, x = Reading(READS["whole"]), torch.randn(8, 6).double()
    planned = rematerialized(model, x)
    refused_until_planned(planned, model, x, by_hook)
    for size in (8, 4, 5, 6, 7):
        assert_eagers(planned, model, x[:size], by_hook)
    twin = copy.deepcopy(planned)
    module = Reading(READS["whole"])
    module.load_state_dict(model.state_dict())
    with pytest.raises(BackwardError):
        asked(twin, twin, x, by_hook)
    got, expected = asked(twin, twin, x, by_hook), asked(module, module, x, by_hook)
    assert all(map(torch.equal, got, expected))


class ViewingInput(Reading):
    """Returns a view of what it is given, and what it makes of that."""

    def forward(self, x):
        view = x.view(2, 12)
        return view, self.head(torch.tanh(self.hidden(view.view(4, 6))))


def test_a_view_of_an_input_has_its_whole_gradient():
    model, x = ViewingInput(None), torch.randn(4, 6).double().requires_grad_()
    planned = rematerialized(model, x)
    assert refused_until_planned(planned, model, x, by_hook) == 1
    for ask in (by_hook, by_retaining, by_changing, by_none):
        assert_eagers(planned, model, x, ask)


class Deep(nn.Module):
    """Two stacks of layers; what the first gives is returned, too."""

    def __init__(self, width=64, depth=3):
        super().__init__()

        def stack():
            layers = (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
            return [copy.deepcopy(layer) for _ in range(depth) for layer in layers]

        self.first, self.second = nn.Sequential(*stack()), nn.Sequential(*stack())

    def forward(self, x):
        hidden = self.first(x)
        return hidden, self.second(torch.tanh(hidden))


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")  # the first step has no plan yet
@pytest.mark.parametrize("budget", swept([0.7, "1100KiB"], [0.7]))
def test_steps_that_are_planned_for_it_stay_within_the_budget(budget):
    model, x = Deep(), torch.randn(256, 64)
    planned = rematerialized(model, x, budget=budget, costs="measure")
    limit = planned.plan.budget_bytes
    assert refused_until_planned(planned, model, x, by_hook) == 1
    for _ in range(3):
        assert_eagers(planned, model, x, by_changing)
        model.zero_grad()
        with measure_peak() as peak:
            asked(planned, model, x, by_changing)
    assert peak.peak_bytes <= limit
    assert planned.plan.measured_peak_bytes <= limit
    assert len(planned.plan.calls) == 2


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
from test_asked_gradients import *
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
    assert document["version"] == 4
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


class Scores(nn.Module):
    """Returns a loss, and the scores that it is computed from."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 512)

    def forward(self, x):
        scores = self.head(self.embedding(x))
        loss = nn.functional.cross_entropy(scores.view(-1, 512), x.view(-1))
        return {"loss": loss, "scores": scores}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.sweep),
        {"outputs": "loss"},
        pytest.param({"numerics": "rounding"}, marks=pytest.mark.sweep),
    ],
)
def test_scores_beside_the_loss_have_their_gradient(options):
    model, x = Scores(), torch.randint(16, (4, 12))
    planned = rematerialized(model, x, **options)
    for _ in range(5):
        outputs = planned(x)
        model.zero_grad()
        outputs["loss"].backward()  # until here nobody asks
    outputs = planned(x)
    outputs["scores"].retain_grad()
    outputs["loss"].backward()
    with pytest.raises(BackwardError, match="output 1 of a region"):
        _ = outputs["scores"].grad + 0
    found = []
    for one in (planned, planned, planned, model):
        model.zero_grad()
        outputs = one(x)
        outputs["scores"].retain_grad()
        outputs["loss"].backward()
        found.append([outputs["scores"].grad + 0, model.head.weight.grad + 0])
    for got in found:
        for a, b in zip(got, found[-1], strict=True):
            torch.testing.assert_close(a, b)


def graph_of(function, *inputs):
    graphs = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda graph, _: graphs.append(graph) or graph, dynamic=True)(
        *inputs
    )
    return graphs[0]


def test_parts_of_a_graph_give_what_it_gives():
    def function(x, scale):
        a = x * scale
        left, right = a.split(2, 1)
        b = left @ right.t() + x.shape[0]
        c = b.exp()
        c.add_(1)
        return a, c, (b * c).view(x.shape[0] * 3)

    inputs = torch.rand(3, 4), torch.tensor(2.0)
    graph = graph_of(function, *inputs)
    placeholders = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    given = iter(inputs)
    flat = [3 if isinstance(item, torch.SymInt) else next(given) for item in placeholders]
    expected = graph(*flat)
    for asked_for, count in (([0], 2), ([1], 2), ([0, 1], 3), ([1, 2], 2), ([2], 0), ([], 0)):
        parts = cut_at(graph, asked_for)
        assert (0 if parts is None else len(parts.parts)) == count
        if parts is not None:
            got = parts.run([part.graph for part in parts.parts], flat)
            assert all(a is b or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_graph_is_not_cut_within_a_context_nor_before_a_change_in_place():
    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            a = x * 2
            b = a.sin()
        c = b.cos()
        c[0].add_(1)
        d = c * 3
        c.mul_(2)
        return a, c, d, c + d

    graph = graph_of(function, torch.rand(3, 4))
    (first, second) = (cut_at(graph, [at]).parts for at in (0, 1))
    assert [node.name for node in first[0].outputs] == ["a", "b"]
    assert [node.name for node in second[0].outputs] == ["a", "c", "d"]

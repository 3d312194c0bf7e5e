"""Plans as files: made here, used there, and refused where they do not belong."""

import copy
from dataclasses import replace

import pytest
import torch
from integration_cases.images import IMAGES, Images, choose_layouts
from torch import nn

import remat
from remat.planning import solving
from remat_graph import Compute, DocumentError, Free, Schedule, encode, save

WIDTH = 64


def mlp(depth=6, act=nn.GELU):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(WIDTH, WIDTH), act())))


class Tied(nn.Module):
    """A tied table, batch norm with buffers, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, WIDTH))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))

    def forward(self, tokens):
        x = nn.functional.embedding(tokens, self.table)
        for norm in self.norms:
            x = x + torch.tanh(norm(x))
        return nn.functional.cross_entropy(x @ self.table.T, tokens)


class TiedHead(nn.Module):
    """A table and a head that share their weight, as in GPT-2: its gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.body, self.head.weight = mlp(2, nn.Tanh), self.table.weight

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.body(self.table(tokens))), tokens)


BATCH = torch.randn(128, WIDTH)
TOKENS = torch.arange(64) % 32


@pytest.fixture(scope="module")
def made():
    """A plan that recomputes, and the file of it."""
    return remat.rematerialize(mlp(), BATCH, budget=0.6, costs="estimate").plan


@pytest.fixture
def no_solving(monkeypatch):
    def solve(*args, **kwargs):
        raise AssertionError("solved")

    monkeypatch.setattr(solving, "solve", solve)


def step(model, *call):
    output = model(*call)
    (output if output.ndim == 0 else output.square().sum()).backward()
    return [p.grad for p in model.parameters()]


def trains_as(model, plain, *call):
    plain_gradients = step(plain, *call)
    for ours, theirs in zip(step(model, *call), plain_gradients, strict=True):
        assert torch.equal(ours, theirs)


def use(plan, model, *call, **more):
    return remat.rematerialize(model, call, plan=plan, costs="estimate", **more)


def test_a_saved_plan_is_used_without_solving(made, tmp_path, no_solving):
    path = tmp_path / "plan.json"
    made.save(path)
    model = use(path, mlp(), BATCH)
    assert model.plan.schedule == made.schedule
    assert made.recomputations > 0
    assert model.plan.budget_bytes == made.budget_bytes >= model.plan.measured_peak_bytes
    assert model.plan.solution.status is made.solution.status
    trains_as(model, mlp(), BATCH)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        pytest.param(mlp, BATCH, marks=pytest.mark.sweep),
        pytest.param(Tied, TOKENS, marks=pytest.mark.sweep),
        (TiedHead, TOKENS),
    ],
)
def test_a_dry_plan_of_a_model_without_data_is_used_later(make, call, tmp_path):
    with torch.device("meta"):
        shape = make()
    everything = remat.plan(shape, call, budget=2**40, costs="estimate", solver="store-all")
    dry = remat.Plan.of(everything.graph, leanest(everything), 2**20)
    dry.save(tmp_path / "dry.json")
    plain = make()
    model = use(tmp_path / "dry.json", copy.deepcopy(plain), call)
    assert model.plan.recomputations == dry.recomputations > 0
    trains_as(model, plain, call)
    assert all(map(torch.equal, model.buffers(), plain.buffers()))


def leanest(plan):
    """Drop what the forward made before the backward reads it, and make it again there."""
    steps = list(plan.schedule)
    loss = steps.index(Compute(plan.graph.boundary))
    graph = plan.graph
    for value in graph.value_by_name.keys() - graph.resident - graph.results:
        maker = graph.ops[graph.producer[value]]
        free = Free(value)
        if not maker.replayable or len(maker.outputs) > 1 or steps.index(free) < loss:
            continue
        if maker.stage == "forward" and set(maker.inputs) <= graph.resident:
            first = next(i for i in range(loss, len(steps)) if reads(graph, steps[i], value))
            last = max(i for i in range(loss) if reads(graph, steps[i], value))
            again = [*steps[:first], Compute(maker.name), *steps[first:]]
            return Schedule((*again[: last + 1], free, *again[last + 1 :]))
    raise AssertionError("nothing to make again")


def reads(graph, step, value):
    return isinstance(step, Compute) and value in graph.ops[graph.op_index[step.op]].inputs


@pytest.mark.parametrize(
    ("model", "call", "said"),
    [
        (mlp(), BATCH[:100], "op 0 ('addmm') makes 32,768 bytes in the plan, makes 25,600"),
        (mlp(), BATCH.double(), "op 0 ('addmm') makes 32,768 bytes in the plan, makes 65,536"),
        (
            mlp(7),
            BATCH,
            "36 ops in the plan, 42 in the model; op 11 ('gelu') runs once in the plan",
        ),
        (mlp(act=nn.Identity), BATCH, "op 1 ('gelu' or 'addmm') reads inputs or parameters of []"),
    ],
)
def test_a_plan_of_another_graph_says_what_differs_first(made, model, call, said):
    with pytest.raises(remat.PlanMismatch) as refused:
        use(made, model.to(call.dtype), call)
    assert said in str(refused.value)


def test_a_plan_is_of_what_memory_sees_alone(made, no_solving):
    assert use(made, mlp(act=nn.SiLU), BATCH).plan.recomputations == made.recomputations


def test_names_of_a_file_reach_no_code(made, tmp_path, no_solving):
    text = encode_names(made, lambda name: f"__import__('os').abort() #{name}\n/../{name}")
    (tmp_path / "evil.json").write_text(text)
    model = use(tmp_path / "evil.json", mlp(), BATCH)
    assert "abort" not in model.plan.source
    assert "abort" not in repr(model.plan)
    trains_as(model, mlp(), BATCH)


def encode_names(plan, renamed):
    """Write a plan with other names for all ops and values."""
    graph, schedule = plan.graph, plan.schedule

    def all_of(names):
        return tuple(map(renamed, names))

    other = replace(
        graph,
        values=tuple(replace(v, name=renamed(v.name)) for v in graph.values),
        ops=tuple(
            replace(
                op,
                name=renamed(op.name),
                inputs=all_of(op.inputs),
                outputs=all_of(op.outputs),
                twin=op.twin and renamed(op.twin),
                order_after=all_of(op.order_after),
                overwrites=tuple(map(all_of, op.overwrites)),
            )
            for op in graph.ops
        ),
        resident=frozenset(all_of(graph.resident)),
        results=frozenset(all_of(graph.results)),
        boundary=renamed(graph.boundary),
    )
    steps = (
        Compute(renamed(s.op)) if isinstance(s, Compute) else Free(renamed(s.value))
        for s in schedule
    )
    return of_one(plan, other, Schedule(tuple(steps))).encode().decode()


def of_one(plan, graph, schedule, **changes):
    """Give a plan of one region another graph and schedule."""
    (kind,) = plan.kinds
    option = replace(plan.options[0], schedule=schedule)
    front = replace(kind.front, graph=graph, options=(option,))
    return replace(plan, kinds=(replace(kind, front=front, **changes),))


def test_a_damaged_file_is_refused_by_name(made, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(made.encode()[:-20])
    with pytest.raises(DocumentError, match=r"plan\.json"):
        use(path, mlp(), BATCH)


def test_the_budget_is_kept_whatever_the_plan_says(made, no_solving):
    with pytest.raises(remat.BudgetExceeded, match="leave plan= out") as refused:
        use(made, mlp(), BATCH, budget=made.measured_peak_bytes // 2)
    assert refused.value.peak_bytes > refused.value.budget_bytes
    assert use(made, mlp(), BATCH, budget="1GiB").plan.budget_bytes == 2**30


def test_a_bare_schedule_is_taken_in_the_names_of_the_model(made, tmp_path, no_solving):
    save(made.solution, tmp_path / "solution.json")
    for given in (tmp_path / "solution.json", made.schedule):
        model = use(given, mlp(), BATCH, budget="1MiB")
        assert model.plan.schedule == made.schedule
    with pytest.raises(remat.PlanMismatch, match=r"remat\.Plan\.of"):
        use(made.schedule, mlp(7), BATCH, budget="1MiB")
    (tmp_path / "graph.json").write_bytes(encode(made.graph))
    with pytest.raises(remat.RematError, match="no schedule"):
        use(tmp_path / "graph.json", mlp(), BATCH)


def test_a_later_call_of_another_size_is_planned_anew(made):
    model = use(made, mlp(), BATCH)
    trains_as(model, mlp(), BATCH[:100])
    assert model.plan.budget_bytes == made.budget_bytes


def test_what_a_loop_has_shown_is_saved_with_the_plan():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.unused = mlp(4), mlp(1), mlp(1)

        def forward(self, x):
            x = self.body(x)
            return self.head(x), self.unused(x)

    def train(model):
        model.zero_grad()
        model(BATCH)[0].square().sum().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    plain = Two()
    first = remat.rematerialize(
        copy.deepcopy(plain), BATCH, budget="4MiB", costs="estimate", solver="store-all"
    )
    for _ in range(5):
        train(first)
    assert first.plan.kinds[0].missing
    again = use(first.plan, copy.deepcopy(plain), BATCH)
    assert again.plan.kinds[0].missing == first.plan.kinds[0].missing
    for ours, theirs in zip(train(again), train(plain), strict=True):
        assert (ours is theirs is None) or torch.equal(ours, theirs)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2)

    def forward(self, x):
        x = self.net(x)
        torch._dynamo.graph_break()
        return self.net(x)


def test_a_plan_of_one_region_is_none_of_several(made, tmp_path):
    model = remat.rematerialize(Broken(), plan=made, costs="estimate")
    with pytest.raises(remat.PlanMismatch, match="graph_break"):
        model(BATCH)
    model = remat.rematerialize(Broken(), budget="4MiB", costs="estimate")
    with pytest.raises(remat.RematError, match="not made yet"):
        model.plan.save(tmp_path / "plan.json")
    with pytest.raises(remat.RematError, match="leave out regions="):
        remat.rematerialize(Broken(), plan=made, regions="net")


def test_the_back_end_takes_a_plan(made, no_solving):
    torch._dynamo.reset()
    options = {"plan": made, "costs": "estimate"}
    trains_as(torch.compile(mlp(), backend="remat", options=options), mlp(), BATCH)
    other = torch.compile(mlp(7), backend="remat", options={**options})
    with pytest.raises(remat.PlanMismatch):
        other(BATCH)


@pytest.fixture
def layouts(monkeypatch):
    """Choose the ops that run in channels_last, whatever the measured times; other ones later."""

    def choose(share):
        choose_layouts(monkeypatch, share=share, cost=0.01)

    choose(1)
    return choose


@pytest.mark.parametrize("numerics", ["bitwise", pytest.param("rounding", marks=pytest.mark.sweep)])
def test_a_plan_that_chooses_makers_and_layouts_is_used_again(
    numerics, layouts, tmp_path, monkeypatch
):
    with pytest.raises(remat.BudgetTooSmall) as refused:  # by what this CPU's convolutions take
        remat.rematerialize(Images(), IMAGES, budget=1, numerics=numerics, limit_seconds=0.1)
    options = {"budget": int(1.05 * refused.value.smallest_bytes), "numerics": numerics}
    made = remat.rematerialize(Images(), IMAGES, limit_seconds=0.1, **options).plan
    made.save(tmp_path / "plan.json")
    read = remat.Plan.load(tmp_path / "plan.json")
    assert read == replace(made, source="")
    assert bool(read.kinds[0].laid_out) == (numerics != "bitwise")
    layouts(2)  # what would be chosen here differs
    monkeypatch.setattr(solving, "solve", None)
    for asked in dict.fromkeys((numerics, "lossy")):
        again = remat.rematerialize(Images(), IMAGES, plan=read, numerics=asked)
        assert len(again.plan.schedule) == len(made.schedule)
        assert again.plan.kinds[0].laid_out == made.kinds[0].laid_out
        if made.numerics == "bitwise":
            trains_as(again, Images(), IMAGES)
    if made.numerics is None:  # on this CPU, now, no other way is faster
        return
    for asked in (None, *(["bitwise"] if numerics != "bitwise" else [])):
        with pytest.raises(remat.PlanMismatch, match="numerics="):
            remat.rematerialize(Images(), IMAGES, plan=read, numerics=asked)


def test_a_plan_without_other_ways_is_used_whatever_is_asked_for(layouts):
    made = remat.rematerialize(Images(), IMAGES, budget="1MiB", limit_seconds=0.1).plan
    again = remat.rematerialize(Images(), IMAGES, plan=made, numerics="rounding")
    assert again.plan.numerics is None
    trains_as(again, Images(), IMAGES)


def test_layouts_that_a_file_makes_up_are_refused(layouts):
    options = {"budget": 0.8, "numerics": "rounding", "limit_seconds": 0.1}
    made = remat.rematerialize(Images(), IMAGES, **options).plan
    for laid_out in ((), (0, 10**9)):
        bad = of_one(made, made.graph, made.schedule, laid_out=laid_out)
        with pytest.raises(remat.PlanMismatch, match="in the model"):
            remat.rematerialize(Images(), IMAGES, plan=bad, numerics="rounding")

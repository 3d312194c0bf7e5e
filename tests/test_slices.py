"""Steps whose largest values are made in slices: right, within the budget, and told of."""

import copy
import itertools
import json

import pytest
import torch
from integration_cases.language import Language
from torch import nn
from torch.nn import functional

import remat
from remat_exec import Executable, MemoryChanged, measure_peak
from remat_graph import DocumentError, Numerics, simulate
from remat_graph.torch import CaptureError, capture
from remat_graph.torch.cost import costs
from remat_graph.torch.ways.slice_by_slice import SlicedBody
from remat_graph.torch.ways.slicing import run_in_slices
from remat_solvers import store_all

WORDS, WIDTH, BATCH, TOKENS = 96, 8, 2, 6


class Model(nn.Module):
    """A module with the given forward and parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


def words(count=WORDS):
    return torch.randint(count, (BATCH, TOKENS))


def sliced_ops(captured):
    calls = captured.program.calls.items()
    return [op for op, call in calls if call.target is run_in_slices]


def hidden():
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)


def head(loss=functional.cross_entropy, bias=False, **options):
    def forward(m, x, y):
        scores = m.out(m.norm(x))
        return loss(scores.view(-1, WORDS), y.view(-1), **options)

    parts = {"norm": nn.LayerNorm(WIDTH), "out": nn.Linear(WIDTH, WORDS, bias=bias)}
    return Model(forward, **parts), (hidden(), words())


def ignoring():
    model, (x, y) = head(ignore_index=3)
    y[:, ::2] = 3
    return model, (x, y)


def weighted():
    def forward(m, x, y, weight):
        scores = m.out(x).flatten(0, 1)
        return functional.cross_entropy(scores, y.flatten(), weight)

    args = hidden(), words(), torch.rand(WORDS, dtype=torch.float64) + 0.1
    return Model(forward, out=nn.Linear(WIDTH, WORDS)), args


def soft_capped():
    def forward(m, x, y):
        scores = 5 * torch.tanh(m.out(x) / 5)
        return functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum")

    return Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)), (hidden(), words())


def shifted():
    def forward(m, x, y):
        scores = m.out(x)[:, :-1].contiguous().view(-1, WORDS)
        return functional.cross_entropy(scores, y[:, 1:].reshape(-1))

    return Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)), (hidden(), words())


def tied():
    def forward(m, ids, y):
        x = torch.tanh(m.words(ids))
        scores = functional.linear(x, m.words.weight)
        return functional.cross_entropy(scores.view(-1, WORDS), y.view(-1))

    return Model(forward, words=nn.Embedding(WORDS, WIDTH)), (words(), words())


def gated():
    def forward(m, x):
        x = m.first(x)
        for layer in m.layers:
            x = x + layer["down"](functional.silu(layer["gate"](x)) * layer["up"](x))
        return x.square().mean()

    def layer():
        wide = 16 * WIDTH
        return nn.ModuleDict(
            {
                "gate": nn.Linear(WIDTH, wide, bias=False),
                "up": nn.Linear(WIDTH, wide, bias=False),
                "down": nn.Linear(wide, WIDTH, bias=False),
            }
        )

    layers = nn.ModuleList([layer() for _ in range(3)])
    return Model(forward, first=nn.Linear(WIDTH, WIDTH), layers=layers), (hidden(),)


def images():
    def forward(m, x):
        return m.body(x).square().mean()

    body = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 2, 3, padding=1)
    )
    return Model(forward, body=body), (torch.randn(4, 2, 6, 6, dtype=torch.float64),)


def attention():
    def forward(m, x):
        q, k, v = m.qkv(x).view(BATCH, TOKENS, 3, 2, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return m.out((weights @ v).transpose(1, 2).flatten(2)).square().sum()

    parts = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}
    return Model(forward, **parts), (hidden(),)


MODELS = {
    "head": head,
    "head with a bias": lambda: head(bias=True),
    "smoothed labels": lambda: head(label_smoothing=0.1),
    "ignored labels": ignoring,
    "weighted classes": weighted,
    "soft-capped scores": soft_capped,
    "shifted labels": shifted,
    "tied head": tied,
    "gated MLPs": gated,
    "images": images,
    "attention": attention,
}


def built(name):
    torch.manual_seed(0)
    model, args = MODELS[name]()
    return model.double(), args


def trained(run, model, args):
    model.zero_grad(set_to_none=True)
    run(*args).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_slices_give_the_gradients_of_the_whole(name):
    model, args = built(name)
    expected = trained(model, model, args)
    able = capture(model, args, {}).with_alternatives(Numerics.ROUNDING, laid_out=())
    assert able.cuts
    for count in (2, 3, 5):
        sliced = able.in_slices([(kind, count) for kind in range(len(able.cuts))])
        assert sliced_ops(sliced)
        executable = Executable(sliced, store_all(sliced.graph))
        with measure_peak() as peak:
            found = trained(lambda *given: executable(model, list(given))[0], model, args)  # noqa: B023
        assert peak.peak_bytes <= simulate(sliced.graph, executable.schedule).peak_bytes + 4096
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_what_many_slices_add_is_not_lost_in_16_bits():
    """Not a gradient of a weight, nor the count of targets that a mean is divided by."""
    torch.manual_seed(0)
    tokens = 600  # more than bfloat16 counts in ones

    def forward(m, x, y):
        return functional.cross_entropy(m.out(x), y)

    model = Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)).bfloat16()
    args = torch.randn(tokens, WIDTH).bfloat16(), torch.randint(WORDS, (tokens,)) // 9
    exact = copy.deepcopy(model).float()
    (expected,) = trained(exact, exact, (args[0].float(), args[1]))
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    sliced = able.in_slices([(0, tokens)])
    assert sliced_ops(sliced)
    executable = Executable(sliced, store_all(sliced.graph))
    loss = executable(model, list(args))[0].detach()
    assert float(loss) == pytest.approx(float(exact(args[0].float(), args[1]).detach()), rel=0.01)
    with measure_peak() as peak:
        (found,) = trained(lambda *given: executable(model, list(given))[0], model, args)
    assert (found.float() - expected).norm() < 0.01 * expected.norm()
    assert peak.peak_bytes <= simulate(sliced.graph, executable.schedule).peak_bytes + 4096


def test_equal_layers_have_equal_cuts():
    model, args = built("gated MLPs")
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    assert len(able.cuts[0]) == 3
    sliced = able.in_slices([(0, 4)])
    kinds = {sliced.program.equivalence[op] for op in sliced_ops(sliced)}
    assert len(sliced_ops(sliced)) == 6
    assert len(kinds) == 2


@pytest.mark.parametrize("name", ["head", "gated MLPs"])
def test_what_slices_take_is_what_was_predicted(name):
    model, args = built(name)
    able = capture(model, args, {}).with_alternatives(Numerics.ROUNDING, laid_out=())
    sliced = able.in_slices([(0, 2)])
    workspace = {op.name: op.workspace_bytes for op in sliced.graph.ops}
    for op in sliced_ops(sliced):
        predicted = sliced.program.calls[op].workspace_bytes
        assert predicted == pytest.approx(workspace[op], rel=0.35, abs=2048)


def test_two_slices_are_measured_for_all(monkeypatch):
    model, args = built("head")
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    program = able.in_slices([(0, 5)]).program  # of 12 rows: 2, 2, 3, 2 and 3
    ticks = itertools.count()
    monkeypatch.setattr(costs.time, "perf_counter", lambda: float(next(ticks)))
    counted = {}

    def run(body, given, bounds, *after):
        counted[tuple(body.body.outputs)] = bounds
        return run_whole(body, given, bounds, *after)

    run_whole = SlicedBody.run
    monkeypatch.setattr(SlicedBody, "run", run)
    measured = costs.measure_costs(program)
    assert list(counted.values()) == [[0, 3, 6]] * 2
    for op, call in program.calls.items():
        if call.body is not None:
            assert measured[op].time == 3 + (12 - 6) / 3
            assert measured[op].workspace_bytes == pytest.approx(call.workspace_bytes, abs=1024)


def test_what_the_user_is_handed_is_not_cut():
    def forward(m, x, y):
        scores = m.out(x)
        return functional.cross_entropy(scores.view(-1, WORDS), y.view(-1)), scores

    torch.manual_seed(0)
    model = Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)).double()
    args = hidden(), words()
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    sliced = able.in_slices([(kind, 2) for kind in range(len(able.cuts))])
    executable = Executable(sliced, store_all(sliced.graph))
    for one, other in zip(executable(model, list(args)), model(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_what_draws_is_not_cut():
    def forward(m, x):
        return m.down(functional.dropout(functional.gelu(m.up(x)), 0.5)).square().mean()

    torch.manual_seed(0)
    wide = 16 * WIDTH
    model = Model(forward, up=nn.Linear(WIDTH, wide), down=nn.Linear(wide, WIDTH)).double()
    able = capture(model, (hidden(),), {}, costs="estimate")
    random = {op for op, call in able.program.calls.items() if call.random is not None}
    assert random
    assert not any(random & cut.ops for kind in able.cuts for cut in kind)


def test_slices_are_refused_where_rounding_may_not_differ():
    model, args = built("head")
    captured = capture(model, args, {}, costs="estimate")
    for refused in (captured, captured.with_alternatives(Numerics.BITWISE)):
        with pytest.raises(CaptureError, match="another order"):
            refused.in_slices([(0, 2)])
    with pytest.raises(CaptureError, match="kinds of cuts"):
        captured.with_alternatives(Numerics.ROUNDING).in_slices([(9, 2)])


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    model = Language()
    expected = trained(model, model, (model.ids,))
    with measure_peak() as peak:
        trained(model, model, (model.ids,))
    model.zero_grad(set_to_none=True)
    return model, [each.clone() for each in expected], peak.peak_bytes


@pytest.mark.sweep
def test_a_budget_below_the_floor_of_whole_values(plain, tmp_path):
    model, expected, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    with pytest.raises(remat.BudgetTooSmall) as refused:
        remat.rematerialize(copy.deepcopy(model), (model.ids,), budget=budget)
    assert "numerics='rounding'" in refused.value.__notes__[0]

    sliced = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), budget=budget, numerics="rounding"
    )
    trained(sliced, sliced, (model.ids,))
    with measure_peak() as peak:
        found = trained(sliced, sliced, (model.ids,))
    assert peak.peak_bytes <= budget
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert "stretches in slices" in str(sliced.plan)
    assert sliced.plan.numerics is Numerics.ROUNDING

    sliced.plan.save(tmp_path / "plan.json")
    again = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), plan=tmp_path / "plan.json", numerics="rounding"
    )
    for one, other in zip(trained(again, again, (model.ids,)), found, strict=True):
        assert torch.equal(one, other)
    assert again.plan.kinds[0].sliced == sliced.plan.kinds[0].sliced
    with pytest.raises(remat.PlanMismatch, match="numerics="):
        remat.rematerialize(copy.deepcopy(model), (model.ids,), plan=tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["body"]["kinds"][0]["sliced"] = [[0, 0]]
    (tmp_path / "damaged.json").write_text(json.dumps(document))
    with pytest.raises(DocumentError, match="damaged"):
        remat.rematerialize(
            copy.deepcopy(model), (model.ids,), plan=tmp_path / "damaged.json", numerics="rounding"
        )


def test_a_dry_plan_in_slices_is_followed(plain):
    model, _, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    with torch.device("meta"):
        meta = Language()
    planned = remat.plan(
        meta, (torch.empty(2, 64, dtype=torch.long, device="meta"),),
        budget=budget, numerics="rounding", costs="estimate",
    )  # fmt: skip
    assert planned.kinds[0].sliced
    real = copy.deepcopy(model)
    followed = remat.rematerialize(real, (model.ids,), plan=planned, numerics="rounding")
    with measure_peak() as peak:
        trained(followed, followed, (model.ids,))
    assert peak.peak_bytes <= budget


def test_time_in_slices_is_told_beside_that_of_the_whole(plain, tmp_path):
    model, _, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    sliced = remat.plan(model, (model.ids,), budget=budget, costs="estimate", numerics="rounding")
    whole = remat.plan(model, (model.ids,), budget=1.0, costs="estimate")
    once = sum(op.time for op in whole.graph.ops)
    assert sliced.kinds[0].sliced
    assert sliced.predicted_overhead == pytest.approx(sliced.time / once - 1)
    assert sliced.predicted_overhead > 0.05  # the logits are made again
    sliced.save(tmp_path / "plan.json")
    assert type(sliced).load(tmp_path / "plan.json").predicted_overhead == sliced.predicted_overhead


def test_a_curve_has_what_slices_reach(plain):
    model, *_ = plain
    budgets = [0.4, 1.0]
    whole, sliced = (
        remat.tradeoff(model, (model.ids,), costs="estimate", budgets=budgets, numerics=numerics)
        for numerics in (None, "rounding")
    )
    assert [point.solution is None for point in whole.points] == [True, False]
    assert all(point.solution is not None for point in sliced.points)
    assert sliced.points[1].solution.time == whole.points[1].solution.time
    assert sliced.points[0].lower_bound <= sliced.points[0].solution.time
    assert sliced.overhead(sliced.points[0].solution.time) > 0.05
    spread = remat.tradeoff(model, (model.ids,), costs="estimate", points=3, numerics="rounding")
    assert spread.points[0].budget_bytes < whole.points[0].budget_bytes
    with pytest.raises(remat.RematError, match="numerics"):
        remat.tradeoff(remat.plan(model, (model.ids,), budget=1.0).graph, numerics="rounding")


def test_what_a_slice_is_made_of_again_may_not_change_uncounted(plain):
    model, _, peak_bytes = plain
    sliced = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), budget=int(0.4 * peak_bytes), numerics="rounding"
    )
    loss = sliced(model.ids)
    sliced.head.weight.data.mul_(1.5)  # the logits are made of it again
    with pytest.raises(MemoryChanged):
        loss.backward()


def test_what_has_no_elements_is_not_cut():
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    captured = capture(model, (torch.randn(2, 0, 4),), {}, costs="estimate")
    assert captured.cuts == ()

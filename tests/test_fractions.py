"""What a fraction is of: plain autograd's peak of a step, measured, where there are regions too."""

import copy
import warnings

import pytest
import torch
from torch import nn

import remat
from remat_exec import measure_peak

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


class Codes(nn.Module):
    """A layer of codes that are moved in place, between regions, as a VQ-VAE has them.

    It makes a table when it first runs, which later steps have.
    """

    def __init__(self, blocks=4):
        super().__init__()
        self.enter, self.leave = (
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(blocks)))
            for _ in range(2)
        )
        self.register_buffer("codes", torch.randn(16, 32))
        self.table = None
        self.repeats = 1

    def forward(self, x):
        x = self.enter(x)
        nearest = self.move(x.detach())
        x = x + (self.codes[nearest] - x).detach()
        for _ in range(self.repeats):
            x = self.leave(x)
            torch._dynamo.graph_break()
        return x.square().mean()

    @torch.compiler.disable
    def move(self, x):
        if self.table is None:
            self.table = torch.zeros(64, 256)
        nearest = torch.cdist(x, self.codes).argmin(1)
        self.codes.index_add_(0, nearest, x, alpha=1e-3)
        return nearest


def made(budget, door="rematerialize", **options):
    """Make a model and the same within a budget."""
    torch.manual_seed(0)
    plain = Codes()
    model = copy.deepcopy(plain)
    if door == "rematerialize":
        return plain, remat.rematerialize(model, budget=budget, limit_seconds=0.1, **options)
    asked = {"budget": budget, "limit_seconds": 0.1, "on_plan": lambda p: setattr(model, "plan", p)}
    torch.compiler.reset()
    return plain, torch.compile(model, backend="remat", options=asked)


def step(model, x=X, *, to_none=True):
    model.zero_grad(set_to_none=to_none)
    with measure_peak() as peak:
        model(x).backward()
    return peak.peak_bytes


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "door", ["rematerialize", pytest.param("compile", marks=pytest.mark.sweep)]
)
def test_several_regions_have_a_fraction_of_plains_measured_peak(door):
    plain, model = made(0.7, door)
    for count in range(6):
        expected, peak = step(plain), step(model)
        for got, grad in zip(gradients(model), gradients(plain), strict=True):
            assert torch.equal(got, grad)  # the plain step's, too
        if count >= 3:
            assert peak <= model.plan.budget_bytes
    plan = model.plan
    assert plan.plain_peak_bytes == pytest.approx(expected, rel=0.05)
    assert plan.budget_bytes == int(0.7 * plan.plain_peak_bytes)
    assert plan.plain_basis == "measured"
    assert f"plain autograd       {plan.plain_peak_bytes / 2**20:.1f} MiB\n" in str(plan)
    assert remat.Plan.decode(plan.encode()) == plan
    torch.compiler.reset()  # which ends what is recorded of the last step


@pytest.mark.sweep
def test_gradients_that_were_there_count_in_it_as_new():
    peaks = []
    for to_none in (True, False):
        _, model = made(0.7)
        for _ in range(4):
            step(model, to_none=to_none)
        peaks.append(model.plan.plain_peak_bytes)
    assert peaks[0] == peaks[1]


class Halves(nn.Module):
    """Layers whose parameters are larger than what they keep of a small batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)))
            for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


def grown(model):
    """Take two steps of small batches, then larger ones; give the peak of the last."""
    small, large = (torch.randn(rows, 128) for rows in (2, 512))
    return [step(model, x) for x in (small, small, large, large, large)][-1]


def unfrozen(model):
    """Take two steps that train the last layer alone, then some that train all; likewise."""
    x = torch.randn(512, 128)
    model.requires_grad_(False)
    model.second[-1].requires_grad_(True)
    for _ in range(2):
        step(model, x)
    model.requires_grad_(True)
    return [step(model, x) for _ in range(3)][-1]


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")  # until a step of these is recorded
@pytest.mark.parametrize("steps", [grown, pytest.param(unfrozen, marks=pytest.mark.sweep)])
def test_small_steps_at_first_make_it_no_larger_than_plain_takes(steps):
    torch.manual_seed(0)
    plain = Halves()
    model = remat.rematerialize(copy.deepcopy(plain), budget=0.8, limit_seconds=0.5)
    expected, peak = steps(plain), steps(model)
    assert model.plan.plain_peak_bytes <= 1.02 * expected
    assert peak <= model.plan.budget_bytes == int(0.8 * model.plan.plain_peak_bytes)


@pytest.mark.sweep
def test_a_larger_step_raises_it_in_proportion():
    _, model = made(0.7)
    for _ in range(4):
        step(model)
    before = model.plan
    model.repeats = 4
    for _ in range(4):
        step(model)
    plan = model.plan
    assert plan.plain_peak_bytes > before.plain_peak_bytes
    assert plan.budget_bytes == int(0.7 * plan.plain_peak_bytes)
    assert "in proportion" in str(plan)
    model.repeats = 1
    for _ in range(2):
        assert step(model) <= plan.budget_bytes


class Words(nn.Module):
    """A language model whose loss is a region apart, so that its logits are an output of one."""

    def __init__(self, words=3000, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(words, width)
        self.within = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(2)
            )
        )
        self.head = nn.Linear(width, words)

    def forward(self, words):
        logits = self.head(self.within(self.table(words)))
        torch._dynamo.graph_break()
        return nn.functional.cross_entropy(logits, words)


@pytest.mark.filterwarnings("ignore::remat.BudgetWarning")  # until a step of these is recorded
def test_a_larger_step_raises_it_where_a_region_is_in_slices():
    plain = Words()
    model = remat.rematerialize(
        copy.deepcopy(plain), budget=0.62, numerics="rounding", limit_seconds=0.1
    )
    for rows in (192, 192, 192, 160, 240, 240):
        words = torch.arange(rows)
        model.zero_grad()
        with measure_peak(collect=False) as peak:
            model(words).backward()
    assert any(kind.sliced for kind in model.plan.kinds)
    with measure_peak(collect=False) as of_plain:
        plain(words).backward()
    assert model.plan.budget_bytes == pytest.approx(0.62 * of_plain.peak_bytes, rel=0.02)
    assert peak.peak_bytes <= model.plan.budget_bytes


class Heads(nn.Module):
    """Two outputs of one region, behind a graph break."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.trunk, self.left, self.right = layers

    def forward(self, x):
        x = self.trunk(x)
        torch._dynamo.graph_break()
        return self.left(x), self.right(x)


@pytest.mark.sweep
def test_outputs_that_are_used_in_turn_do_not_raise_it():
    """Plain autograd keeps the same, whichever gradients come."""
    model = remat.rematerialize(Heads(), budget=0.9, limit_seconds=0.1)
    for count in range(6):
        model.zero_grad()
        left, right = model(X)
        (left.square().mean() + (right.mean() if count % 2 else 0)).backward()
    assert model.plan.plain_basis == "measured"


@pytest.mark.sweep
def test_where_no_plain_step_can_be_measured_it_is_predicted(monkeypatch):
    monkeypatch.setattr("remat.session.judge.has_room_for_plain", lambda *_: False)
    _, model = made(0.8)
    for _ in range(4):
        step(model)
    plan = model.plan
    assert plan.budget_bytes == int(0.8 * plan.plain_peak_bytes)
    assert plan.plain_peak_bytes == plan.store_all_peak_bytes
    assert "a plain step could not be measured" in str(plan)


@pytest.mark.sweep
def test_an_example_outside_of_autocast_says_nothing_of_steps_within_it():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)))
    model.append(nn.Linear(128, 1))

    def steps(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randn(256, 128)).mean().backward()
        return model.plan

    later = remat.rematerialize(model, budget=0.7, limit_seconds=0.1)
    example = remat.rematerialize(model, (torch.randn(256, 128),), budget=0.7, limit_seconds=0.1)
    assert steps(example).plain_peak_bytes == steps(later).plain_peak_bytes
    assert example.plan.budget_bytes == later.plan.budget_bytes


class Many(nn.Module):
    """Hands out all that it computes, most of which is in no loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        made = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            made.append(2 * x)
        return made


@pytest.mark.sweep
def test_a_plan_made_again_is_of_the_fraction_that_it_shows():
    torch.manual_seed(0)
    plain = Many()
    model = remat.rematerialize(copy.deepcopy(plain), budget=1.0, limit_seconds=0.1)

    def trained(model, rows=256):
        with measure_peak() as peak, warnings.catch_warnings():
            warnings.simplefilter("ignore", remat.BudgetWarning)
            model(torch.randn(rows, 32))[-1].square().mean().backward()
        return peak.peak_bytes

    shown = []
    for rows in (256, 256, 256, 256, 128):
        trained(model, rows)
        plan = model.plan
        assert plan.budget_bytes == plan.plain_peak_bytes
        shown.append(plan.budget_bytes)
    assert shown[0] > shown[-2] == shown[-1]  # which gradients come is known; the largest counts
    assert shown[-1] == pytest.approx(trained(plain), rel=0.3)


def test_all_of_plain_is_enough_where_outputs_take_the_most():
    """What a loss outside may take, and its gradient, are there at once in plain as in a plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4000, bias=False))
    eager = copy.deepcopy(model)
    planned = remat.rematerialize(model, X, budget=1.0, limit_seconds=0.1)
    for each in (planned, eager):
        each(X).logsumexp(-1).mean().backward()
    assert all(map(torch.equal, gradients(planned), gradients(eager)))
    assert planned.plan.budget_bytes == planned.plan.plain_peak_bytes

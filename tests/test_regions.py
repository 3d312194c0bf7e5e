"""Models with graph breaks: several regions of one step, exact and within one budget."""

import copy
import warnings

import pytest
import torch
from integration_cases.searches import repeat_searches
from integration_cases.sweeps import swept
from torch import nn

import remat
from remat_exec import measure_peak


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Broken(nn.Module):
    """Blocks, some of which are left out by chance, as LayerDrop does."""

    def __init__(self, blocks=6, width=32, left_out=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)
        self.left_out = left_out

    def forward(self, x):
        for block in self.blocks:
            if torch.rand([]) >= self.left_out:
                x = block(x)
        return self.head(x)


def step(model, x, y):
    nn.functional.cross_entropy(model(x), y).backward()


def peak_of_a_step(model, x, y):
    model.zero_grad()
    with measure_peak() as peak:
        step(model, x, y)
    return peak.peak_bytes


def assert_same(model, plain):
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert (got.grad is None) == (expected.grad is None)
        assert got.grad is None or torch.equal(got.grad, expected.grad)


def pair(**options):
    torch.manual_seed(0)
    plain = Broken(**options)
    return copy.deepcopy(plain), plain, torch.randn(256, 32), torch.randint(0, 5, (256,))


@pytest.mark.parametrize("share", swept([0.7, 0.5, 0.35], [0.5]))
def test_a_model_with_breaks_trains_exactly_and_within_the_budget(share):
    original, plain, x, y = pair()
    budget = int(share * peak_of_a_step(plain, x, y))
    model = remat.rematerialize(original, budget=budget)
    for seed in range(5):
        model.zero_grad(), plain.zero_grad()
        torch.manual_seed(seed)
        step(model, x, y)
        torch.manual_seed(seed)
        step(plain, x, y)
        assert_same(model, plain)
    assert model.plan.measured_peak_bytes <= budget
    assert model.plan.recomputations > 0
    assert 0 <= model.plan.bound_overhead <= model.plan.predicted_overhead + 1e-9
    assert peak_of_a_step(model, x, y) <= budget
    assert "break" in str(model.plan)


@pytest.mark.sweep
def test_a_pattern_that_changes_stays_within_the_budget_at_every_step():
    original, plain, x, y = pair(blocks=8, left_out=0.3)
    plain.left_out = 0.0
    budget = int(0.6 * peak_of_a_step(plain, x, y))
    plain.left_out = 0.3
    model = remat.rematerialize(original, budget=budget)
    peaks = []
    for seed in range(50):
        model.zero_grad(), plain.zero_grad()
        torch.manual_seed(seed)
        if seed < 6:
            step(model, x, y)
        else:
            peaks.append(peak_of_a_step(model, x, y))
        torch.manual_seed(seed)
        step(plain, x, y)
        assert_same(model, plain)
    assert max(peaks) <= budget


def test_a_budget_that_the_regions_cannot_reach_is_refused_with_one_that_they_can(monkeypatch):
    repeat_searches(monkeypatch)
    original, plain, x, y = pair()
    too_little = int(0.1 * peak_of_a_step(plain, x, y))
    model = remat.rematerialize(original, budget=too_little, costs="estimate")
    step(model, x, y)
    with pytest.warns(remat.BudgetWarning, match="step 1 took .* is made but once"):
        step(model, x, y)  # recorded, with what keeps the least
    with pytest.raises(remat.BudgetTooSmall) as error:
        step(model, x, y)
    assert "Broken.forward at " in error.value.__notes__[0]  # why there are several regions
    enough = int(1.25 * error.value.smallest_bytes)  # what is held beside varies as much, so small
    model = remat.rematerialize(original, budget=enough, costs="estimate")
    for _ in range(4):
        step(model, x, y)
    assert peak_of_a_step(model, x, y) <= enough


def test_two_forwards_before_their_backwards_are_one_step():
    original, plain, x, _ = pair()
    model = remat.rematerialize(original, budget=0.7)
    for seed in range(5):
        for each in (model, plain):
            each.zero_grad()
            torch.manual_seed(seed)
            (each(x).square().mean() + each(x + 1).square().mean()).backward()
        assert_same(model, plain)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


class Aside(nn.Module):
    """Two outputs, each of regions of its own."""

    def __init__(self):
        super().__init__()
        self.enter, self.aside = nn.Linear(64, 64), nn.Linear(64, 64)
        self.fails = False

    def forward(self, x):
        y = self.enter(x)
        torch._dynamo.graph_break()
        other = torch.sin(self.aside(y))
        torch._dynamo.graph_break()
        if self.fails:
            raise KeyboardInterrupt
        for _ in range(6):
            y = torch.sin(y) + x
        return y, other


@pytest.mark.parametrize("held", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_an_output_outside_the_loss_does_not_keep_a_step_from_ending(held):
    torch.manual_seed(0)
    plain, x = Aside(), torch.randn(64, 64)
    model = copy.deepcopy(plain)

    def trained(model):
        model.zero_grad()
        y, other = model(x)
        y.square().mean().backward()
        return other if held else None

    with measure_peak() as peak:
        trained(plain)
    budget = int(0.7 * peak.peak_bytes)
    model = remat.rematerialize(model, budget=budget)
    _other = None
    for _ in range(6):  # what was returned last is let go of while the next step runs, if at all
        _other = trained(model)
    assert model.plan.measured_peak_bytes <= budget
    with measure_peak() as peak:
        _other = trained(model)
    assert peak.peak_bytes <= budget
    assert_same(model, plain)


class UsedAtTimes(nn.Module):
    """A second output that reads what is changed in place later, and is not always in the loss."""

    def __init__(self):
        super().__init__()
        self.enter, self.aside, self.leave = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        y = self.enter(x)
        torch._dynamo.graph_break()
        other = self.aside(torch.tanh(2 * y) + 1)
        torch._dynamo.graph_break()
        y.mul_(3)
        return self.leave(torch.tanh(y)), other


def test_a_region_without_a_backward_is_planned_for_and_right_once_it_has_one():
    """What it reads is held twice until it is known whether later code changes it."""
    torch.manual_seed(0)
    plain, x = UsedAtTimes(), torch.randn(256, 64)
    original = copy.deepcopy(plain)

    def trained(model, outputs):
        model.zero_grad()
        sum(output.square().mean() for output in model(x)[:outputs]).backward()

    with measure_peak() as peak:
        trained(plain, 2)
    budget = int(1.2 * peak.peak_bytes)
    model = remat.rematerialize(original, budget=budget)
    for outputs in (1, 1, 1, 1, 2, 2, 2, 1, 2):
        trained(plain, outputs)
        trained(model, outputs)
        assert_same(model, plain)
    for outputs in (1, 2):
        with measure_peak() as peak:
            trained(model, outputs)
        assert peak.peak_bytes <= budget
    model = remat.rematerialize(original, budget=budget)
    for _ in range(6):
        trained(model, 1)
    assert not model.plan.is_one_region
    assert model.plan.measured_peak_bytes <= budget


def raises(gradient):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "step"), [pytest.param("backward", 1, marks=pytest.mark.sweep), ("forward", 4)]
)
def test_a_step_after_one_that_was_interrupted_is_right_and_within_the_budget(where, step):
    torch.manual_seed(0)
    plain, x = Aside(), torch.randn(64, 64)
    model = copy.deepcopy(plain)

    def trained(model):
        model.zero_grad()
        (y, other) = model(x)
        (y.square().mean() + other.square().mean()).backward()

    with measure_peak() as peak:
        trained(plain)
    budget = int(0.9 * peak.peak_bytes)
    model = remat.rematerialize(model, budget=budget, limit_seconds=0.001)
    kept = []
    for number in range(9):
        if number == step:
            model.fails = where == "forward"
            hook = model.enter.weight.register_hook(raises) if where == "backward" else None
            with pytest.raises(KeyboardInterrupt) as error:
                trained(model)
            kept.append(error)  # and with it the frames, and what they hold
            model.fails = False
            if hook is not None:
                hook.remove()
        trained(model)
        assert_same(model, plain)
    assert model.plan.measured_peak_bytes <= budget
    model.zero_grad()
    with measure_peak() as peak:
        trained(model)
    assert peak.peak_bytes <= budget


class Sized(nn.Module):
    """After a break, a size depends on data: that part runs as it is, in each shape."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x):
        hidden, size = torch.relu(self.up(x)), (x > 0).sum() % 5 + 2
        torch._dynamo.graph_break()
        return self.down(hidden * (hidden.new_zeros(size).sum() + 1))


def test_what_runs_as_it_is_is_warned_of_once(caplog):
    model = remat.rematerialize(Sized(), budget="1MiB")
    for size in (64, 96, 64):
        step(model, torch.randn(size, 32), torch.randint(0, 5, (size,)))
    assert [record.levelname for record in caplog.records if "as it is" in record.message] == [
        "WARNING"
    ]


class TrainsBesideItsPlan(nn.Module):
    """The region that is planned has no part in the backward; the other runs as it is."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        y = self.norm(x)
        torch._dynamo.graph_break()
        self.seen.add_(y.mean(0))  # differentiable, and the module holds it: not planned
        for _ in range(4):
            x = self.linear(x).tanh()
        return x


def test_a_step_whose_backward_no_region_takes_part_in_is_within_the_budget_or_refused():
    x = torch.randn(256, 16)
    plain = TrainsBesideItsPlan()
    with remat.measure_peak() as taken:
        plain(x).square().mean().backward()
    model = remat.rematerialize(TrainsBesideItsPlan(), budget=taken.peak_bytes // 2)
    model(x).square().mean().backward()
    with pytest.warns(remat.BudgetWarning, match="step 1 took"):
        output = model(x)
    output.square().mean().backward()
    with pytest.raises(remat.BudgetTooSmall) as error:
        model(x)
    assert error.value.smallest_bytes > taken.peak_bytes // 2


class Layers(nn.Module):
    """A class of ours: what TorchDynamo finds of `nn.Sequential.compile` runs in eager."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layers(count=4):
    torch.manual_seed(0)
    return Layers(*(Layers(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(count)))


def called_twice(model):
    model.zero_grad()
    (model(ROWS).square().mean() + model(2 * ROWS).mean()).backward()


def called_once(model):
    model.zero_grad()
    model(ROWS).square().mean().backward()


ROWS = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "how",
    [
        "rematerialized",
        pytest.param("compiled", marks=pytest.mark.sweep),
        pytest.param("compiled by blocks", marks=pytest.mark.sweep),
    ],
)
def test_several_calls_before_a_backward_have_one_budget(how):
    """Of a model that is one graph, or of blocks that are compiled each by itself."""
    torch.compiler.reset()
    step = called_once if how == "compiled by blocks" else called_twice
    plain, model = layers(), layers()
    step(plain)
    plain.zero_grad()
    with remat.measure_peak() as taken:
        step(plain)
    budget = int(0.7 * taken.peak_bytes)
    options = {"budget": budget, "limit_seconds": 0.1}
    if how == "rematerialized":
        model = remat.rematerialize(model, **options)
    parts = {"compiled": [model], "compiled by blocks": model.layers}
    for part in parts.get(how, ()):
        part.compile(backend="remat", options=options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", remat.BudgetWarning)
        for _ in range(4):
            step(model)
    if how == "rematerialized":
        assert [str(w.message)[:37] for w in told] == ["2 calls were made before a backward: "]
    model.zero_grad()
    with remat.measure_peak() as taken:
        step(model)
    assert taken.peak_bytes <= budget
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "how", ["backend", pytest.param("rematerialized", marks=pytest.mark.sweep)]
)
def test_a_compiled_function_may_hold_the_backward(how):
    torch.compiler.reset()
    plain, model = layers(2), layers(2)
    if how == "rematerialized":
        model = remat.rematerialize(model, budget="1MiB", limit_seconds=0.1)
        step = torch.compile(lambda: called_once(model), backend="eager")
    else:
        options = {"budget": "1MiB", "limit_seconds": 0.1}
        step = torch.compile(lambda: called_once(model), backend="remat", options=options)
    called_once(plain)
    for _ in range(3):
        step()
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


class Coder(nn.Module):
    """Is trained by its methods; nobody calls its forward."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (nn.Sequential(*map(Block, (32, 32))) for _ in range(2))

    def encode(self, x):
        return torch.tanh(self.encoder(x))

    def decode(self, code):
        return self.decoder(code)


@pytest.mark.sweep
def test_regions_that_methods_beside_the_forward_call_are_planned_together():
    torch.manual_seed(0)
    original = Coder()
    plain, x = copy.deepcopy(original), torch.randn(256, 32)

    def coded(model):
        model.zero_grad()
        torch.manual_seed(1)
        (model.decode(model.encode(x)) - x).square().mean().backward()

    with measure_peak() as peak:
        coded(plain)
    budget = int(0.8 * peak.peak_bytes)
    model = remat.rematerialize(original, budget=budget, regions=["encoder", "decoder"])
    for _ in range(5):
        with measure_peak() as peak:
            coded(model)
        assert_same(model, plain)
        assert peak.peak_bytes <= budget
    assert len(model.plan.calls) == 2
    assert model.plan.recomputations

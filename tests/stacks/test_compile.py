"""Our way in through torch.compile, and the user's own torch.compile beside it."""

import copy

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, assert_close
from integration_cases.sweeps import swept
from stack_cases.models import assert_planned, record, rematerialized
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import remat
from loop_cases.models import Blocks, batch, made, square
from remat_exec import ExecutionError
from remat_graph.torch import CaptureError

pytestmark = pytest.mark.usefixtures("_fresh_compiler")


@pytest.fixture
def _fresh_compiler():
    """What one test has compiled is not there for the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def peak_of_a_step(model):
    model.zero_grad()
    inputs = batch()
    with remat.measure_peak() as peak:
        square(model(inputs)).backward()
    return peak.peak_bytes


def settings():
    """All that is set for the compiler in this process."""
    return {
        name: copy.deepcopy(module.get_config_copy())
        for name, module in {
            "dynamo": torch._dynamo.config,
            "functorch": torch._functorch.config,
        }.items()
    }


def test_the_backend_is_listed():
    assert "remat" in torch.compiler.list_backends()


def test_the_backend_compiles_in_place_and_trains_within_the_budget():
    plain = peak_of_a_step(made(Blocks))
    options = {"budget": int(0.7 * plain), "limit_seconds": 0.1}
    model = made(Blocks)
    model.compile(backend="remat", options=options)
    assert_bitwise_equal(record(model), record(made(Blocks)))
    assert peak_of_a_step(model) <= options["budget"]


def test_guards_look_at_each_tensor_where_torch_is_older(monkeypatch):
    """Those of torch 2.11 pass by parameters, and miss one that is thawed."""
    monkeypatch.setattr("remat.dynamo.graphs.APART", {})

    def gradients(model):
        for frozen in (True, False):
            model.layers[0].requires_grad_(not frozen)
            model.zero_grad()
            torch.manual_seed(0)
            square(model(batch())).backward()
            yield [p.grad for p in model.parameters()]

    model = made(Blocks)
    model.compile(backend="remat", options={"budget": "1MiB", "limit_seconds": 0.1})
    with torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=True):
        for got, expected in zip(gradients(model), gradients(made(Blocks)), strict=True):
            assert not torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
            assert all(a is b or torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_backend_takes_a_budget_with_a_unit():
    model = torch.compile(made(Blocks), backend="remat", options={"budget": "8GiB"})
    assert_bitwise_equal(record(model), record(made(Blocks)))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"budget": "8 loaves"}, remat.BudgetError),
        ({"bugdet": 0.5}, remat.RematError),
        ({"capture": "none such"}, CaptureError),
        ({"executor": "none such"}, ExecutionError),
    ],
)
def test_options_that_cannot_be_read_are_refused(options, kind):
    with pytest.raises(kind, match=r"^[^\n]*(8 loaves|bugdet|installed are)"):
        torch.compile(made(Blocks), backend="remat", options=options)(batch())


def test_the_compilation_before_the_last_is_refused_each_time():
    class Repeated(nn.Linear):
        times = 1

        def forward(self, x):
            return super().forward(x).repeat(1, self.times)

    plain = made(Repeated, 16, 4)
    model = torch.compile(plain, backend="remat", options={"budget": "8GiB"}, dynamic=False)
    inputs = torch.ones(2, 16)
    with torch._dynamo.config.patch(recompile_limit=3):
        for plain.times in (1, 2):
            assert model(inputs).shape == (2, 4 * plain.times)
        for plain.times in (3, 4):
            with pytest.raises(remat.RematError, match=r"recompile limit.*recompile_limit"):
                model(inputs)


class Before(nn.Module):
    """Runs a layer of which Dynamo makes no graph before the others."""

    def __init__(self):
        super().__init__()
        self.enter, self.blocks = nn.Linear(16, 16), Blocks()

    @torch.compiler.disable
    def start(self, x):
        return self.enter(x)

    def forward(self, x):
        return self.blocks(self.start(x))


def test_code_before_the_first_graph_is_told_and_the_graph_not_taken_for_the_whole_step():
    plans = []
    options = {"budget": "8GiB", "limit_seconds": 0.1, "on_plan": plans.append}
    model = torch.compile(made(Before), backend="remat", options=options)
    with pytest.warns(remat.BudgetWarning, match=r"made no graph of what leads to .*test_compile"):
        got = record(model)
    assert_bitwise_equal(got, record(made(Before)))
    assert not plans[-1].is_one_region
    assert any("no graph of what leads to" in reason for reason in plans[-1].breaks)


@pytest.mark.parametrize("way", swept(["compile", "method", "function"], ["method"]))
def test_a_model_without_breaks_is_one_region_however_it_is_compiled(way, recwarn):
    plans, model = [], made(Blocks)
    settings = {"backend": "remat", "options": {"budget": "8GiB", "on_plan": plans.append}}
    if way == "method":
        model.compile(**settings)
    else:
        model = torch.compile(model.forward if way == "function" else model, **settings)
    model(batch()).sum().backward()
    assert plans[-1].is_one_region
    assert not [warning for warning in recwarn if issubclass(warning.category, remat.BudgetWarning)]


class Loop(nn.Module):
    """Of whose forward Dynamo makes no graph, for a loop that holds a break."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x):
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x).tanh()
        return x


def test_a_model_of_which_there_is_no_graph_is_told_once():
    model = torch.compile(made(Loop), backend="remat", options={"budget": "1GiB"})
    with torch.no_grad():
        model(batch())
    with pytest.warns(
        remat.BudgetWarning, match="without a plan or a budget: .*graph_break"
    ) as told:
        got = record(model)
    assert len(told) == 1
    assert_bitwise_equal(got, record(made(Loop)))
    frozen = torch.compile(made(Loop).requires_grad_(False), backend="remat")
    frozen(batch())


class Recurrent(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 16), nn.Linear(16, 4)
        self.rnn = nn.LSTM(16, 16, batch_first=True, **options)

    def forward(self, x):
        return self.leave(self.rnn(self.enter(x[:6]).tanh()[None])[0].tanh())


@pytest.mark.parametrize(
    "rnn", [{}, pytest.param({"num_layers": 2, "dropout": 0.5}, marks=pytest.mark.sweep)]
)
def test_an_lstm_within_a_larger_forward_is_planned(rnn):
    plans = []
    options = {"budget": 0.7, "limit_seconds": 0.1, "on_plan": plans.append}
    model = torch.compile(made(Recurrent, **rnn), backend="remat", options=options)
    assert_close(record(model), record(made(Recurrent, **rnn)))
    plain = peak_of_a_step(made(Recurrent, **rnn))
    assert peak_of_a_step(model) <= plans[-1].budget_bytes < plain
    assert not torch._dynamo.config.allow_rnn


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo does
def test_a_float_that_changes_and_that_an_autograd_function_reads_is_a_number():
    class Net(nn.Linear):
        def forward(self, x, scale):
            return Scaled.apply(super().forward(x).tanh(), scale)

    plain = made(Net, 16, 16)
    model = torch.compile(plain, backend="remat", options={"budget": "1MiB", "limit_seconds": 0.1})
    for scale in (0.5, 0.25, 0.75):
        got, expected = (
            torch.autograd.grad(square(net(batch(), scale)), list(plain.parameters()))
            for net in (model, plain)
        )
        assert all(map(torch.equal, got, expected))


class Wide(Blocks):
    """Another model than `Blocks`, whose code TorchDynamo compiles anew."""

    def forward(self, x):
        return super().forward(torch.cat([x, x]))


@pytest.mark.parametrize("second", [pytest.param(Blocks, marks=pytest.mark.sweep), Wide])
@pytest.mark.parametrize(
    "options", [pytest.param({"budget": 0.9, "limit_seconds": 0.1}, marks=pytest.mark.sweep), None]
)
def test_each_model_that_is_compiled_has_a_step_of_its_own(second, options, caplog):
    """Also those with one dict of options, or none, and those whose code is the same."""
    with caplog.at_level("INFO", logger="remat.front.backend"):
        for kind in (Blocks, second):
            model = torch.compile(made(kind), backend="remat", options=options)
            for _ in range(3):
                square(model(batch())).backward()
    plans = [plan for record in caplog.records for plan in record.args]
    assert [plan.is_one_region for plan in plans] == [True, True]
    if options is not None:
        assert [plan.budget_bytes / plan.plain_peak_bytes for plan in plans] == pytest.approx(
            [0.9, 0.9], rel=1e-3
        )


def test_a_model_that_fits_no_budget_is_no_error_of_another():
    options = {"budget": "3KiB", "limit_seconds": 0.1}
    small, large = (
        torch.compile(model, backend="remat", options=options)
        for model in (made(nn.Linear, 16, 4), made(Blocks))
    )
    for _ in range(3):
        with pytest.raises(remat.BudgetTooSmall):
            large(batch())
        square(small(batch())).backward()


def test_models_whose_calls_wait_for_a_backward_at_a_time_are_planned_together_from_then_on():
    plans, second = [], nn.Linear(16, 16)
    options = {"budget": "1MiB", "limit_seconds": 0.1, "on_plan": plans.append}
    first, plain = made(nn.Linear, 16, 16), [made(nn.Linear, 16, 16), copy.deepcopy(second)]
    models = [torch.compile(m, backend="remat", options=options) for m in (first, second)]

    def steps(models):
        for _ in range(4):
            for model in models:
                model.zero_grad()
            square(models[1](models[0](batch()).tanh())).backward()
            yield [p.grad for model in models for p in model.parameters()]

    with pytest.warns(remat.BudgetWarning, match="2 calls were made before a backward") as told:
        got = list(steps(models))
    for found, expected in zip(got, steps(plain), strict=True):
        assert all(map(torch.equal, found, expected))
    assert len(told) == 1
    assert [plan.is_one_region for plan in plans[:2]] == [True, True]
    assert not plans[-1].is_one_region
    assert len(plans[-1].calls) == 2


def test_the_users_own_compiled_model_is_left_alone():
    before = settings()
    counter = CompileCounterWithBackend("aot_eager")
    other = torch.compile(made(nn.Linear, 16, 4), backend=counter)
    start = copy.deepcopy(other.state_dict())
    expected = record(other, steps=1)
    assert counter.frame_count == 1
    model = rematerialized(made(Blocks))
    record(model)
    assert_planned(model)
    assert settings() == before
    other.load_state_dict(start)
    assert_bitwise_equal(record(other, steps=1), expected)
    assert counter.frame_count == 1
    later = torch.compile(made(Blocks), backend="aot_eager")
    assert_bitwise_equal(record(later), record(made(Blocks)))
    assert settings() == before


def test_settings_of_the_user_are_kept():
    with torch._dynamo.config.patch(recompile_limit=3, automatic_dynamic_shapes=False):
        before = settings()
        model = rematerialized(made(Blocks))
        got = record(model)
        assert settings() == before
    assert_bitwise_equal(got, record(made(Blocks)))
    assert_planned(model)


def test_a_rematerialized_model_within_a_compiled_one():
    outer = nn.Sequential(rematerialized(made(Blocks)), made(nn.Linear, 4, 4))
    eager = nn.Sequential(made(Blocks), made(nn.Linear, 4, 4))
    assert_bitwise_equal(record(torch.compile(outer, backend="aot_eager")), record(eager))
    assert_planned(outer[0])


def test_a_rematerialized_model_that_the_user_compiles_in_place():
    model = rematerialized(made(Blocks))
    model.compile(backend="aot_eager")
    assert_bitwise_equal(record(model), record(made(Blocks)))
    assert_planned(model)

"""RNNs with dropout between their layers train with the masks of eager, and are planned."""

import copy
from contextlib import nullcontext

import pytest
import torch
from exec_cases.training import assert_close, train
from integration_cases.odd_models import Made, linear
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat_exec import measure_peak
from remat_graph.torch import CaptureError, capture
from remat_graph.torch.tracing.rnns import RnnInSteps

TINY = {"input_size": 3, "hidden_size": 4, "num_layers": 2, "dropout": 0.5}
KINDS = {
    "lstm": (nn.LSTM, {}),
    "lstm that projects": (nn.LSTM, {"proj_size": 2, "batch_first": True}),
    "lstm of three layers, both ways": (nn.LSTM, {"num_layers": 3, "bidirectional": True}),
    "gru": (nn.GRU, {"bidirectional": True, "batch_first": True}),
    "tanh": (nn.RNN, {"bias": False}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 3}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_a_trace_draws_as_eager_does(kind, options, training):
    torch.manual_seed(0)
    rnn, x = kind(**TINY | options).train(training), torch.randn(2, 3, 3)

    def traced(x):
        with RnnInSteps():
            return rnn(x)

    steps, found = make_fx(traced)(x), []
    for each in (steps, rnn):
        torch.manual_seed(1)
        found.append((each(x), torch.get_rng_state()))
    torch.testing.assert_close(*(results for results, _ in found), rtol=1e-5, atol=1e-6)
    assert torch.equal(*(state for _, state in found))


def test_torch_is_left_as_it_was():
    helper = torch._decomp.decompositions._rnn_helper
    with RnnInSteps(), pytest.raises(RuntimeError):
        nn.LSTM(**TINY)(torch.ones(2, 3, 5))
    assert torch._decomp.decompositions._rnn_helper is helper
    assert torch.backends.mkldnn.enabled


def model_of(kind, options):
    torch.manual_seed(0)
    rnn = kind(16, 24, 2, dropout=0.3, **options)
    ways = 2 if rnn.bidirectional else 1
    leave = nn.Sequential(linear(ways * (rnn.proj_size or 24), 96), nn.Tanh(), linear(96, 16))
    return Made(
        lambda m, x: (m.leave(m.rnn(m.enter(x).tanh())[0]) - x).square().mean(),
        enter=linear(),
        rnn=rnn,
        leave=leave,
    ).train()


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"batch_first": True}),
        (nn.LSTM, {"proj_size": 8}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {}),
    ],
)
def test_it_trains_within_the_budget(kind, options):
    """Also where lengths and batches change, and after an evaluation."""
    model = model_of(kind, options)
    plain = copy.deepcopy(model)
    batches = [torch.randn(6 + step % 3, 8 - step % 2, 16) for step in range(6)]
    with measure_peak() as peak:
        copy.deepcopy(model)(batches[2]).backward()
    model = remat.rematerialize(model, budget=int(0.7 * peak.peak_bytes), limit_seconds=0.1)
    records = []
    for each in (model, plain):

        def call(each, step):
            assert each.train(step != 3).training == (step != 3)
            return each(batches[step])

        records.append(train(each, call, lambda loss: loss, steps=6))
    assert_close(*records)
    with measure_peak() as peak:
        model(batches[2]).backward()
    assert peak.peak_bytes <= model.plan.budget_bytes
    assert "runs as it is" not in str(model.plan)


def test_a_plan_without_data_has_the_dropout():
    rnn = nn.RNN(**TINY | {"num_layers": 3}, device="meta")
    found = capture(rnn, (torch.empty(2, 3, 3, device="meta"),), costs="estimate")
    names = [call.name for call in found.program.calls.values()]
    assert sum("native_dropout.default" in name for name in names) == 2


@pytest.mark.parametrize("training", [True, False])
def test_an_rnn_that_no_module_names_is_refused_on_cuda(training):
    """No kernel runs: the tensors are fake."""
    with FakeTensorMode(), enable_python_dispatcher(), RnnInSteps():
        x, hidden, weight = (torch.empty(n, 4, 4, device="cuda") for n in (3, 2, 4))
        refused = pytest.raises(CaptureError, match=r"an RNN has dropout=0\.5")
        with refused if training else nullcontext():
            torch.rnn_tanh(x, hidden, weight.unbind(), False, 2, 0.5, training, False, False)


def test_on_cuda_its_draws_are_no_traces():
    x = torch.empty(2, 3, 16, device="meta")
    model = model_of(nn.GRU, {}).to("meta")
    with pytest.raises(remat.CaptureError, match=r"rnn has dropout=0\.3 .* cuDNN draws on CUDA"):
        remat.plan(model, x, budget=1.0, costs=remat.DEVICES["h100"])

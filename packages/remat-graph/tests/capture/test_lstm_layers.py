"""LSTMs on the CPU are traced as the layers that eager runs: the same bits, where it runs them."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from remat_graph.torch import DEVICES, capture
from remat_graph.torch.kernels import lstm
from remat_graph.torch.kernels.lstm import lstm_layer, lstm_layer_backward, workspace_bytes
from remat_graph.torch.recomputing import may_run_again
from remat_graph.torch.tracing.lstm_in_layers import LstmInLayers

has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
FLOAT, HALF = torch.float32, torch.bfloat16
in_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="oneDNN has no bfloat16 here")

OPTIONS = {
    "one layer": {},
    "three layers, both ways": {"num_layers": 3, "bidirectional": True},
    "batch first": {"num_layers": 2, "batch_first": True},
    "no bias": {"num_layers": 2, "bias": False, "bidirectional": True},
    "dropout": {"num_layers": 3, "dropout": 0.5},
}


def step_of(model, of_outputs=(True, True, True)):
    """Give a function of inputs that runs a step: what the model gives, and gradients."""

    def step(x, *states):
        rows, (hn, cn) = model(x, states or None)
        terms = [each.float().square().sum() for each in (rows, hn, cn)]
        loss = sum(term for term, is_there in zip(terms, of_outputs, strict=True) if is_there)
        wanted = [each for each in (x, *states, *model.parameters()) if each.requires_grad]
        return [rows, hn, cn, *torch.autograd.grad(loss, wanted)]

    return step


def traced(step, *inputs):
    def run(*inputs):
        with LstmInLayers():
            return step(*inputs)

    return make_fx(run)(*inputs)


def targets(graph_module):
    return [node.target for node in graph_module.graph.nodes]


def assert_eagers_bits(step, *inputs):
    found = []
    graph = traced(step, *inputs)
    for run in (graph, step):
        torch.manual_seed(1)
        found.append([*run(*inputs), torch.get_rng_state()])
    assert all(map(torch.equal, *found))
    assert [each.dtype for each in found[0]] == [each.dtype for each in found[1]]
    return targets(graph)


def made(**options):
    torch.manual_seed(0)
    return nn.LSTM(5, 6, **options), torch.randn(4, 3, 5, requires_grad=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_traced_step_has_the_bits_of_eager(options):
    model, x = made(**options)
    found = assert_eagers_bits(step_of(model), x)
    count = model.num_layers * (2 if model.bidirectional else 1)
    assert found.count(lstm_layer) == found.count(lstm_layer_backward) == count


@pytest.mark.parametrize(
    "which", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_gradients_that_do_not_come_are_left_out(which):
    model, x = made(num_layers=2)
    found = assert_eagers_bits(step_of(model, which), x)
    assert found.count(lstm_layer_backward) == 2


def test_states_frozen_weights_and_inputs_without_a_batch():
    model, x = made(num_layers=2)
    states = [torch.randn(2, 3, 6, requires_grad=True) for _ in range(2)]
    assert_eagers_bits(step_of(model), x, *states)
    assert_eagers_bits(step_of(model), x, states[0], torch.randn(2, 1, 6).expand(2, 3, 6))
    assert_eagers_bits(step_of(model), x[:, 0].detach().requires_grad_())
    model.weight_hh_l0.requires_grad_(False)
    assert_eagers_bits(step_of(model), x.detach())


@in_bfloat16
def test_in_16_bits():
    model, x = made(num_layers=2, bidirectional=True)
    assert lstm_layer in assert_eagers_bits(
        step_of(model.bfloat16()), x.detach().bfloat16().requires_grad_()
    )


@in_bfloat16
@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast(bias):
    model, x = made(num_layers=2, bias=bias)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        found = assert_eagers_bits(step_of(model), x)
    assert lstm_layer in found


def test_no_workspace_without_gradients():
    model, x = made()
    with torch.no_grad():
        graph = traced(lambda x: model(x)[0], x)
        assert torch.equal(graph(x), model(x)[0])
    (layer,) = graph.graph.find_nodes(op="call_function", target=lstm_layer)
    assert layer.args[-1] is False


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


def double(model, x):
    return model.double(), x.double()


CASES = {
    "plain": ({}, None, False),
    "projections": ({"proj_size": 2}, None, False),
    "double": ({}, double, False),
    "oneDNN is off": ({}, None, True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("options", "change", "off"), CASES.values(), ids=CASES)
def test_layers_are_traced_where_eager_runs_them(options, change, off):
    model, x = made(**options)
    model, x = (model, x) if change is None else change(model, x)
    torch.backends.mkldnn.enabled = not off
    try:
        with Seen() as seen:
            model(x)
        found = targets(traced(lambda x: model(x)[0], x))
    finally:
        torch.backends.mkldnn.enabled = True
    eager = torch.ops.aten.mkldnn_rnn_layer.default in seen.operators
    assert (lstm_layer in found) == eager == (options == {} and change is None and not off)


def test_other_rnns_packed_sequences_and_transforms_have_no_layers():
    model, x = made()
    packed = nn.utils.rnn.pack_padded_sequence(x.detach(), torch.tensor([4, 2, 1]))
    with Seen() as seen, LstmInLayers():
        model(packed)
    assert lstm_layer not in seen.operators
    assert lstm_layer not in targets(traced(lambda x: nn.GRU(5, 6)(x)[0], x))
    slope = torch.func.grad(lambda x: model(x)[0].sum())
    assert lstm_layer not in targets(traced(slope, x.detach()))


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_a_gradient_of_a_gradient(bias):
    """Eager has formulas for it that are not those of the layer either."""
    model, x = made(bidirectional=True, bias=bias)

    def step(x):
        (slope,) = torch.autograd.grad(model(x)[0].square().sum(), x, create_graph=True)
        return [slope, *torch.autograd.grad(slope.square().sum(), [x, *model.parameters()])]

    graph = traced(step, x)
    assert lstm_layer in targets(graph)
    torch.testing.assert_close(graph(x), step(x), rtol=1e-4, atol=1e-5)


def test_one_tensor_in_several_places_gets_each_gradient_once():
    model, x = made()
    model = nn.LSTM(6, 6, bias=False)
    model.weight_hh_l0 = model.weight_ih_l0
    x = torch.randn(1, 3, 6, requires_grad=True)

    def step(x):
        rows, _ = model(x, (x, x))
        (slope,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
        return [slope, *torch.autograd.grad(slope.square().sum(), [x, model.weight_ih_l0])]

    torch.testing.assert_close(traced(step, x)(x), step(x), rtol=1e-4, atol=1e-5)


SIZES = [(1, 1, 1, 1), (3, 2, 5, 7), (20, 4, 65, 64), (7, 33, 256, 64), (50, 3, 64, 256)]


def zeros(steps, batch, width, hidden, dtype=FLOAT):
    shapes = (
        (steps, batch, width), (4 * hidden, width), (4 * hidden, hidden), (4 * hidden,),
        (4 * hidden,), (batch, hidden), (batch, hidden),
    )  # fmt: skip
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [FLOAT, pytest.param(HALF, marks=in_bfloat16)])
def test_the_size_of_the_workspace_is_known(dtype):
    assert lstm.keeps_what_is_known(dtype)
    for sizes in SIZES:
        *_, workspace = lstm_layer(*zeros(*sizes, dtype), False, True)
        assert workspace.numel() == workspace_bytes(*sizes, dtype)


@pytest.fixture
def other_processor(monkeypatch):
    """Have oneDNN keep more than is expected."""
    original = lstm.workspace_bytes
    monkeypatch.setattr(lstm, "workspace_bytes", lambda *sizes: original(*sizes) // 2)
    lstm.keeps_what_is_known.cache_clear()
    yield
    lstm.keeps_what_is_known.cache_clear()


def test_where_the_workspace_has_another_size_there_are_steps(other_processor):
    assert not lstm.keeps_what_is_known(FLOAT)
    with pytest.raises(RuntimeError, match=r"oneDNN keeps .* were expected: set torch"):
        lstm_layer(*zeros(3, 2, 5, 7), False, True)
    assert not capture(nn.LSTM(5, 6), (torch.randn(4, 3, 5),), costs="estimate").has_lstm_layers


def test_layers_may_run_again_and_write_to_nothing():
    model, x = made()
    inputs = [x, *model._flat_weights, torch.randn(3, 6), torch.randn(3, 6)]
    inputs = [each.detach() for each in inputs]
    first, second = (lstm_layer(*inputs, True, True) for _ in range(2))
    assert all(map(torch.equal, first[:3], second[:3]))
    read = [*inputs, *first[:3], torch.randn(4, 3, 6), None, torch.randn(3, 6), first[3]]
    before = [None if each is None else each.clone() for each in read]
    one, other = (lstm_layer_backward(*read, True) for _ in range(2))
    again = lstm_layer_backward(*read[:-1], second[3], True)
    assert all(map(torch.equal, one, other))
    assert all(map(torch.equal, one, again))
    there = [pair for pair in zip(read, before, strict=True) if pair[0] is not None]
    assert all(torch.equal(now, then) for now, then in there[:-1])  # it has scratch memory
    memory = {each.untyped_storage().data_ptr() for each in (*one, *(now for now, _ in there))}
    assert len(memory) == len(one) + len(there)
    assert may_run_again(lstm_layer)
    assert may_run_again(lstm_layer_backward)


def test_a_plan_without_data_has_layers_on_the_cpu_and_steps_on_cuda():
    x = torch.empty(4, 3, 5, device="meta")
    model = nn.LSTM(5, 6, device="meta")

    def names(**options):
        return {call.name for call in capture(model, (x,), **options).program.calls.values()}

    assert "remat.lstm_layer.default" in names(costs="estimate")
    for options in ({"costs": DEVICES["h100"]}, {"costs": "estimate", "lstms_in_steps": True}):
        found = names(**options)
        assert not any("lstm_layer" in name for name in found)
        assert "aten.tanh.default" in found


def test_costs_are_measured_and_estimated():
    model, x = made(num_layers=2)
    for costs in ("measure", "estimate"):
        graph = capture(model, (x,), costs=costs).graph
        ops = [op for op in graph.ops if op.name.startswith("lstm_layer")]
        assert len(ops) == 4
        assert all(op.time > 0 for op in ops)
        sizes = {value.name: value.size_bytes for value in graph.values}
        assert workspace_bytes(4, 3, 5, 6, FLOAT) in [sizes[name] for name in ops[0].outputs]

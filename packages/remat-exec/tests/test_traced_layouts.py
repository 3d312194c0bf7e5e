"""Kernels that are chosen, or fed, by how tensors lie while they are traced: gradients are eager's.

Of inputs that are not contiguous torch's fake tensors say of some operators that their results lie
otherwise than they do; what then reads memory without a look at strides gives other numbers.
"""

import pytest
import torch
from exec_cases.models import Case
from torch import nn
from torch.nn import functional

from remat_exec import Executable
from remat_graph import Numerics
from remat_graph.torch import capture
from remat_solvers import store_all

ROWS, LENGTH, WIDTH = 4, 6, 8


class Behind(nn.Module):
    """A group norm whose gradient comes from a function of it, transposed."""

    def __init__(self, function):
        super().__init__()
        self.first, self.norm = nn.Conv1d(WIDTH, WIDTH, 1), nn.GroupNorm(4, WIDTH)
        self.function, self.last = function, nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.last(self.function(self.norm(self.first(x))).transpose(1, 2))


class Crossed(nn.Module):
    """Makes matrices by a batch norm that reads them transposed, for a function of them."""

    def __init__(self, function):
        super().__init__()
        self.first, self.norm = nn.Linear(LENGTH, LENGTH), nn.BatchNorm1d(LENGTH)
        self.function = function

    def forward(self, x):
        x = self.norm(self.first(x[:, :LENGTH]).transpose(1, 2)).transpose(1, 2)
        return self.function(x)


FUNCTIONS = {
    "batch norm": nn.BatchNorm1d(WIDTH),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout of all": lambda x: functional.dropout(x + functional.dropout(x, 1.0), 0.3),
    "elu": functional.elu,
    "gelu": functional.gelu,
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "layer norm": nn.LayerNorm(LENGTH),
    "leaky relu": functional.leaky_relu,
    "log softmax": lambda x: functional.log_softmax(x, 1),
    "logit": lambda x: torch.logit(x, 0.1),
    "logsigmoid": functional.logsigmoid,
    "mish": functional.mish,
    "relu6": functional.relu6,
    "silu": functional.silu,
    "softplus": functional.softplus,
    "softshrink": functional.softshrink,
    "two": lambda x: functional.dropout(functional.hardswish(x), 0.2).exp(),
}
ONE_OF_A_KIND = (
    "batch norm", "dropout", "dropout of all", "gelu", "layer norm", "softplus", "two",
)  # fmt: skip
MATRICES = {
    "determinant": torch.linalg.det,
    "logarithm of it": lambda x: torch.linalg.slogdet(x)[1],
    "inverse": lambda x: torch.linalg.inv_ex(x)[0],
    "products": lambda x: x @ x.transpose(1, 2) @ x,
    "bag": lambda x: functional.embedding_bag(torch.arange(12).view(3, 4), x.flatten(0, 1)),
    "rows": lambda x: x.view(ROWS, -1).cumsum(1) if x.is_contiguous() else x.sin(),
}


def assert_as_eager(model, x, executable=None):
    found = []
    case = Case("layouts", lambda: model, lambda: (x,), None)
    for call in (case.remat(), model):
        if call is not model and executable is not None:
            call.executable = executable
        torch.manual_seed(3)
        output = call(x)
        (output * torch.linspace(-1, 1, output.shape[-1])).square().sum().backward()
        found.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
        model.zero_grad(set_to_none=True)
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ONE_OF_A_KIND else pytest.mark.sweep) for n in FUNCTIONS],
)
def test_a_group_norm_before_what_is_transposed(name):
    torch.manual_seed(0)
    assert_as_eager(Behind(FUNCTIONS[name]).double(), torch.randn(ROWS, WIDTH, LENGTH).double())


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_a_batch_norm(name):
    torch.manual_seed(0)
    assert_as_eager(Crossed(MATRICES[name]).double(), torch.randn(ROWS, WIDTH, LENGTH).double())


class Attending(nn.Module):
    """Attends to what a batch norm makes of a transposed input, and what comes behind it."""

    def __init__(self, between, **options):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between, self.options = between, options

    def forward(self, x):
        keys = self.between(self.norm(x.transpose(1, 2)).transpose(1, 2))[:, None]
        query = self.layer(x)[:, None]
        return functional.scaled_dot_product_attention(query, keys, keys * 2, **self.options)


BETWEEN = {
    "nothing": lambda x: x,
    "dropout": lambda x: functional.dropout(x, 0.2),
    "activations": lambda x: functional.hardswish(x).tanh() + x,
    "a slice": lambda x: x[:, 1:],
    "layer norm": lambda x: functional.layer_norm(x, (WIDTH,)),
}


OPTIONS = {}, {"is_causal": True}, {"dropout_p": 0.3}


@pytest.mark.parametrize(
    ("name", "options"),
    [  # each with one of the options, in turn; with the others in a sweep
        pytest.param(name, options, marks=() if (number - at) % 3 == 0 else pytest.mark.sweep)
        for at, name in enumerate(BETWEEN)
        for number, options in enumerate(OPTIONS)
    ],
    ids=str,
)
def test_attention(name, options):
    torch.manual_seed(0)
    assert_as_eager(Attending(BETWEEN[name], **options), torch.randn(ROWS, LENGTH, WIDTH))


@pytest.mark.parametrize("between", ["nothing", "activations"])
@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_attention_in_slices(between, transposed):
    torch.manual_seed(0)
    attend = Attending(BETWEEN[between])
    model = nn.Sequential(attend, nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, 5))
    x = torch.randn(ROWS, WIDTH, 32).transpose(1, 2) if transposed else torch.randn(ROWS, 32, WIDTH)
    captured = capture(model, (x,), costs="estimate")
    captured = captured.with_alternatives(Numerics.ROUNDING, laid_out=())
    attention = {op for op in captured.program.calls if "bmm" in op or "attention" in op}
    kinds = [at for at, cuts in enumerate(captured.cuts) if attention & cuts[0].ops]
    assert kinds
    for kind in kinds:
        sliced = captured.in_slices([(kind, 3)])
        assert_as_eager(model, x, Executable(sliced, store_all(sliced.graph)))

"""The smallest models that show what libraries do, by what failed: each with its arguments."""

import torch
from torch import nn
from torch.ao import quantization
from torch.nn import functional as F  # noqa: N812

from integration_cases.made import Made, linear, rows, tokens


class Sparsemax(torch.autograd.Function):
    """As in TabNet: the backward makes constants, and reads them."""

    @staticmethod
    def forward(ctx, x):
        ordered = x.sort(1, descending=True)[0]
        sums = ordered.cumsum(1) - 1
        count = (torch.arange(1, 17) * ordered > sums).sum(1, keepdim=True)
        ctx.save_for_backward(count, made := (x - sums.gather(1, count - 1) / count).clamp(min=0))
        return made

    @staticmethod
    def backward(ctx, gradient):
        count, made = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[made == 0] = 0
        mean = gradient.sum(1, keepdim=True) / count
        return torch.where(made != 0, gradient - mean, gradient)


class Noisy(torch.autograd.Function):
    """A function whose backward draws, and reads a constant of several numbers."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(16) * torch.tensor([1.0, 3.0] * 8)


def applied(function):
    return Made(lambda m, x: m.leave(function.apply(m.layer(x))), layer=linear(), leave=linear())


def alike_but_for_results(m, x):
    """Two regions whose operators may not run again anyway; the second returns one more."""
    x = m.layer(x)
    torch._dynamo.graph_break()
    x = m.layer(x).sort(1)[0].sin()
    torch._dynamo.graph_break()
    x, order = m.leave(x).sort(1)
    x = x.sin()
    torch._dynamo.graph_break()
    return m.leave(x) + order


def repeated_by_counts(m, x):
    counted = m.layer(x[:4]).tanh().repeat_interleave(m.counts, 0, output_size=8)
    return m.leave(counted)[:, None].repeat_interleave(torch.tensor(1), dim=1)


class Normalised(nn.Module):
    """A layer that normalises its weight in each forward, as in EDM2."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        with torch.no_grad():
            for row in self.weight.unbind(0):
                row.div_(row.norm())
        return F.linear(x, self.weight)


class ActNorm(nn.Module):
    """A layer that is initialised by its first batch."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1, 16)), nn.Parameter(torch.zeros(1, 16))
        self.initialised = False

    def forward(self, x):
        if not self.initialised:
            self.scale.data = (1 / x.std(0, keepdim=True)).data
            self.shift.data = -(x * self.scale).mean(0, keepdim=True).data
            self.initialised = True
        return x * self.scale + self.shift


def moved_to_where_it_is(model, x):
    """What is given its own memory is as it was; experts that are fetched when needed are so."""
    return model.last(model.first.to(x.device)(x).tanh())


def of_momentum(m, x):
    """As MoCo's: the keys' encoder follows that of the queries."""
    with torch.no_grad():
        for slow, fast in zip(m.keys.parameters(), m.queries.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
        keys = m.keys(x)
    return m.queries(x).tanh() * keys


def decayed(m, x):
    m.layer.weight.data.mul_(0.99)
    return m.leave(m.layer(x).tanh())


def given_the_memory_of_another(m, x):
    m.leave.weight.data = m.layer.weight.data
    return m.leave(m.layer(x).tanh())


def given_memory_that_is_changed(m, x):
    new = 2 * m.leave.weight.data
    m.leave.weight.data = new
    new.mul_(0.5)
    return m.leave(m.layer(x).tanh())


def observed():
    """Layers with the observers of quantisation-aware training, which resize their buffers."""
    model = nn.Sequential(quantization.QuantStub(), linear(), nn.ReLU(), linear())
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model.train())


def changed_before_any_graph(m, x):
    """Resizes, writes and replaces what is stored, in code that is in no graph."""
    torch._dynamo.graph_break()
    m.history.resize_(8, 16).fill_(0.5)
    m.numbers.data = 0.9 * m.numbers
    m.graph._values().mul_(0.5)
    with torch.no_grad():
        for parameter, other in zip(m.slow.parameters(), m.layer.parameters(), strict=True):
            parameter.data = 0.9 * parameter + 0.1 * other
            parameter.mul_(0.99)
    torch._dynamo.graph_break()
    return m.layer(x).tanh() * m.slow(x) + m.history * m.numbers


def of_neighbours(m, x):
    return m.leave(m.graph @ m.layer(x).tanh())


def neighbours():
    places = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    return torch.sparse_coo_tensor(places, torch.ones(4), (8, 8), check_invariants=True).coalesce()


def nested(m, x):
    made = torch.nested.nested_tensor_from_jagged(m.layer(x), torch.tensor([0, 3, 8]))
    return m.leave(made.tanh()).values()


def of_nested(m, x):
    return m.leave(m.layer(x).tanh()).values()


def with_values(lengths):
    return torch.nested.nested_tensor([rows(n, 16) for n in lengths], layout=torch.jagged)


class MixedVolume(nn.Module):
    """As in the attention of an autoencoder: channels are mixed in rows, and seen as a volume."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv3d(1, 16, 3, padding=1), nn.Conv3d(16, 4, 3, padding=1)
        self.mix, self.norm = linear(), nn.GroupNorm(4, 16)

    def forward(self, x):
        x = self.enter(x).relu()
        mixed = self.mix(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return self.leave(self.norm(mixed + x).relu())


# name: (model, args)
ONE_REGION = {
    "sparsemax": (lambda: applied(Sparsemax), (rows(),)),
    "a backward that draws": (lambda: applied(Noisy), (rows(),)),
    "repeated by counts": (
        lambda: Made(
            repeated_by_counts, layer=linear(), leave=linear(), counts=torch.tensor([1, 2, 3, 2])
        ),
        (rows(),),
    ),
    "lengths of segments": (
        lambda: Made(
            lambda m, x: m.leave(torch.segment_reduce(m.layer(x), "sum", lengths=m.lengths)),
            layer=linear(),
            leave=linear(),
            lengths=torch.tensor([3, 5]),
        ),
        (rows(),),
    ),
}
ONE_REGION |= {
    "weights normalised in the forward": (
        lambda: nn.Sequential(*(nn.Sequential(Normalised(), nn.Tanh()) for _ in range(2))),
        (rows(),),
    ),
    "moved to where it is": (
        lambda: Made(moved_to_where_it_is, first=linear(), last=linear()),
        (rows(),),
    ),
    "a momentum encoder": (
        lambda: Made(of_momentum, queries=linear(), keys=linear().requires_grad_(False)),
        (rows(),),
    ),
    "initialised by data": (
        lambda: nn.Sequential(linear(), ActNorm(), nn.Tanh(), linear()),
        (rows(),),
    ),
    "weights that decay": (lambda: Made(decayed, layer=linear(), leave=linear()), (rows(),)),
    "an embedding that renormalises": (
        lambda: Made(
            lambda m, x, words: m.layer(x).tanh() * m.words(words),
            layer=linear(),
            words=nn.Embedding(20, 16, max_norm=0.5),
        ),
        (rows(), tokens(8)),
    ),
}
ONE_REGION |= {
    f"a check of {name}": (
        lambda function=function: Made(
            lambda m, x: m.leave(x) * function(m.layer.weight).square().mean(),
            layer=linear(),
            leave=linear(),
        ),
        (rows(),),
    )
    for name, function in {
        "an inverse": torch.linalg.inv,
        "a solution": lambda matrix: torch.linalg.solve(matrix, matrix[:2].T),
        "a Cholesky factor": lambda matrix: torch.linalg.cholesky(matrix @ matrix.T),
        "an LU factor": lambda matrix: torch.linalg.lu_factor(matrix)[0],
        "an inverse by a tensor": lambda matrix: torch.linalg.tensorinv(matrix[None], 2),
        "what a backward solves": lambda matrix: torch.linalg.eig(matrix)[0].abs(),
    }.items()
}
SEVERAL_REGIONS = {
    "observers": (observed, (rows(),)),
    "changed before any graph": (
        lambda: Made(
            changed_before_any_graph,
            layer=linear(),
            slow=linear().requires_grad_(False),
            history=torch.zeros(0),
            numbers=torch.ones(1, 16).expand(8, 16),
            graph=neighbours(),
        ),
        (rows(),),
    ),
    "a sparse buffer": (
        lambda: Made(of_neighbours, layer=linear(), leave=linear(), graph=neighbours()),
        (rows(),),
    ),
    "a sparse buffer by rows": (
        lambda: Made(
            of_neighbours, layer=linear(), leave=linear(), graph=neighbours().to_sparse_csr()
        ),
        (rows(),),
    ),
    "a scripted part": (
        lambda: nn.Sequential(linear(), torch.jit.script(nn.Sigmoid()), linear()),
        (rows(),),
    ),
    "a traced part": (
        lambda: nn.Sequential(linear(), torch.jit.trace(linear(), rows()), linear()),
        (rows(),),
    ),
    "alike but for results": (
        lambda: Made(alike_but_for_results, layer=linear(), leave=linear()),
        (rows(),),
    ),
}
_DATA = r"other memory by `.data =` at .*met_in_the_wild.py:\d+, which.*\.data\.copy_"
NOT_PLANNED = {  # and what the error says
    "a check of a number": (
        lambda: Made(
            lambda m, x: torch.ops.aten._linalg_check_errors(
                (x.sum() > 1e9).int(), "mine", is_matrix=True
            )
            or m.layer(x),
            layer=linear(),
        ),
        (rows(),),
        r"_linalg_check_errors\S* at .*met_in_the_wild.py:\d+ has an effect.*on_infeasible='plain'",
    ),
    "the memory of another parameter": (
        lambda: Made(given_the_memory_of_another, layer=linear(), leave=linear()),
        (rows(),),
        _DATA,
    ),
    "memory that is changed": (
        lambda: Made(given_memory_that_is_changed, layer=linear(), leave=linear()),
        (rows(),),
        _DATA,
    ),
    "a nested tensor given": (
        lambda: Made(of_nested, layer=linear(), leave=linear()),
        (with_values([3, 5]),),
        r"nested tensor of torch.nested, whose.*padded one.*on_infeasible",
    ),
    "a nested tensor inside": (
        lambda: Made(nested, layer=linear(), leave=linear()),
        (rows(),),
        r"nested tensor of torch.nested at .*met_in_the_wild.py:\d+, whose.*padded one",
    ),
}

"""A language model of two regions that returns its scores beside its loss."""

import torch
from torch import nn
from torch.nn import functional

import remat
from remat_exec import measure_peak

WORDS, WIDTH, TOKENS = 3000, 16, 64
IDS = torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(0))
LOGITS = 2 * TOKENS * WORDS * 4


class Head(nn.Module):
    """The last layer with its loss, which returns the scores as well."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, ids):
        logits = self.out(functional.dropout(x, 0.1))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten()), logits


class Language(nn.Module):
    """A language model of two regions; what is `between` them runs in eager autograd."""

    def __init__(self, *, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = Head()
        self.whole = whole

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down(functional.gelu(self.up(x)))
        if self.whole != 1:
            torch._dynamo.graph_break()
        if self.whole == 2:
            x = x.sin()
        loss, logits = self.head(x, ids)
        return {"loss": loss, "logits": logits}


def trained(model, ids=IDS, read=lambda output: None):
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    output = model(ids)
    read(output)
    output["loss"].backward()
    return output


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def plain_step():
    """Take a step in eager; give its gradients, scores and the bytes of its peak."""
    model = Language()
    output = trained(model)
    expected = gradients(model)
    with measure_peak() as peak:
        trained(model)
    return expected, output["logits"].detach(), peak.peak_bytes


def deferred(model):
    return [each for kind in model.plan.kinds for each in kind.deferred]


def steps(model, count, expected, read=lambda output: None, ids=IDS):
    """Train on the same, without a warning; give the last output and peak."""
    for _ in range(count):
        with measure_peak() as peak:
            output = trained(model, ids, read)
        assert all(map(torch.equal, gradients(model), expected))
    return output, peak.peak_bytes


def roomy(plain, **options):
    """Plan for a budget that leaves room for the scores."""
    options = {"numerics": "rounding", "limit_seconds": 0.1, **options}
    model = Language(whole="regions" in options)
    return remat.rematerialize(model, budget=2 * plain[2], **options)

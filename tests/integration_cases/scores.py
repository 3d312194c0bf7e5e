"""A language model of one graph that returns its scores beside its loss."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from remat_exec import measure_peak

WORDS, WIDTH, TOKENS = 3000, 16, 64


@dataclass
class Returned:
    """What a model of transformers returns, in short."""

    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Language(nn.Module):
    """A language model with many more words than width, that returns its scores as well."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        x = x + functional.dropout(self.down(functional.gelu(self.up(x))), 0.1)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return Returned(loss, logits, (x,))


def trained(model, ids, read=lambda output: None):
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    output = model(ids)
    read(output)
    output.loss.backward()
    return output


def plain_step():
    """Take a step in eager; give model, inputs, scores, gradients and the bytes of its peak."""
    torch.manual_seed(0)
    model, ids = Language(), torch.randint(WORDS, (2, TOKENS))
    output = trained(model, ids)
    gradients = [parameter.grad for parameter in model.parameters()]
    with measure_peak() as peak:
        trained(model, ids)
    model.zero_grad(set_to_none=True)
    return model, ids, output.logits.detach(), gradients, peak.peak_bytes


def check(model, gradients):
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        error = (parameter.grad - expected).abs().max()
        assert error <= 1e-6 * expected.abs().max()


def steps_within(model, ids, budget, count, read=lambda output: None):
    for _ in range(count):
        with measure_peak() as peak:
            output = trained(model, ids, read)
        assert peak.peak_bytes <= budget
    return output


def messages(caplog):
    return [each for each in caplog.records if each.name.startswith("remat.")]


LOW = 0.2  # of plain: below what any plan takes that makes the logits

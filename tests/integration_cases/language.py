"""A language model that tests of slices share."""

import torch
from torch import nn
from torch.nn import functional

__all__ = ["WIDTH", "WORDS", "Headed", "Language"]

WORDS, WIDTH, TOKENS = 2000, 16, 64


class Language(nn.Module):
    """A language model with many more words than width, which returns its loss alone."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.ids = torch.randint(WORDS, (2, TOKENS))

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Head(nn.Module):
    """The last layer with its loss."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, ids):
        return functional.cross_entropy(self.out(x).flatten(0, 1), ids.flatten())


class Headed(nn.Module):
    """One whose head is a module; TorchDynamo finds it in two parts, unless it is `whole`."""

    def __init__(self, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.whole = whole
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = Head()

    def forward(self, ids):
        x = self.words(ids)
        x = x + self.down(functional.gelu(self.up(x)))
        if not self.whole:
            torch._dynamo.graph_break()
        return self.head(x, ids)

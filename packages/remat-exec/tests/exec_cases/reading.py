"""A model that returns a hidden layer beside what it makes of that."""

import torch
from torch import nn


class Reading(nn.Module):
    """Returns a hidden layer, and what `read` makes of it."""

    def __init__(self, read):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 8)
        self.read = read

    def forward(self, x):
        hidden = torch.tanh(self.hidden(x))
        return hidden, self.read(self, hidden)

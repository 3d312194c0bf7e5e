"""A captured model that several files ask about."""

import pytest
import torch
from graph_cases.captured import Block
from torch import nn

from remat_graph.torch import capture


@pytest.fixture(scope="session")
def blocks():
    return capture(nn.Sequential(*(Block() for _ in range(4))), (torch.rand(5, 8),))

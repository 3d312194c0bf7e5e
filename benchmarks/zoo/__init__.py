"""Models that tests and benchmarks share, each with a batch and a loss; the weights are random.

`tiny` is for tests: a step takes well under 0.3 s on one core. `medium` is for benchmarks: a plain
step takes 0.15 to 1 s on two cores. `peers` is the size at which remat is compared side by side
with other tools, for five of the models. `published` has the twelve of HiRemate's table 3, and
some more on which solvers are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zoo import fno, gpt2, inplace, llama, resnet, t5, transformer, unet, vit
from zoo.example import Example, Size
from zoo.published import PUBLISHED, published

__all__ = ["NAMES", "PEERS", "PUBLISHED", "Example", "Size", "build", "published"]

_FAMILIES: dict[str, Callable[[Size], Example]] = {
    "gpt2": gpt2.build,
    "gpt2-no-dropout": gpt2.build_without_dropout,
    "resnet": resnet.build,
    "unet": unet.build,
    "transformer": transformer.build,
    "transformer-no-dropout": transformer.build_without_dropout,
    "t5": t5.build,
    "fno": fno.build,
    "inplace": inplace.build,
    "llama": llama.build,
    "vit": vit.build,
}

NAMES = tuple(_FAMILIES)
PEERS = ("gpt2-no-dropout", "unet", "transformer-no-dropout", "llama", "vit")


def build(name: str, size: Size = "tiny", *, seed: int = 0) -> Example:
    """Build a model in training mode with a batch and a loss; equal seeds give equal numbers.

    The global random state is left as it was.

    Raises:
        ValueError: if there is no such model, or it does not come in this size.
    """
    if name not in _FAMILIES:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(NAMES)}")
    if size == "peers" and name not in PEERS:
        raise ValueError(f"{name!r} has no size 'peers'; those with one are {', '.join(PEERS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        example = _FAMILIES[name](size)
    example.model.train()
    return example

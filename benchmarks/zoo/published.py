"""The twelve models of HiRemate's table 3 by the names of its rows.

Depths and structure are the published ones; widths and batches are small, so that each is captured
in little memory and a step takes at most some seconds. `tiny` ones are shallow as well, for tests.
A few more are there to compare solvers on: shallower ones, and some with larger images, in which
activations outweigh the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zoo import fno, gpt2, mixer, regnet, resnet, transformer, ufno, unet, uno
from zoo.example import Example

__all__ = ["PUBLISHED", "published"]


@dataclass(frozen=True, slots=True)
class _Model:
    """What makes a model, of which settings in full and in tiny."""

    make: Callable[..., Example]
    full: tuple[Any, ...]
    tiny: tuple[Any, ...]
    options: Mapping[str, Any]


_TINY_GPT = (2, 16, 2, 32, 2, 8)
_TINY_TRANSFORMER = (1, 16, 2, 2, 8)
_REGNET_X_32GF = ((2, 7, 13, 1), (48, 96, 192, 360), 24)  # a seventh of its widths

_MODELS: dict[str, _Model] = {
    "gpt-24": _Model(gpt2.make, (24, 128, 4, 2000, 4, 128), _TINY_GPT, {}),
    "gpt-96": _Model(gpt2.make, (96, 128, 4, 2000, 4, 128), _TINY_GPT, {}),
    "unet": _Model(unet.make, (4, 16, 4, 64), (2, 4, 2, 16), {}),
    "mlp-mixer": _Model(mixer.make, (12, 128, 8, 64, 8), (1, 8, 2, 8, 4), {}),
    "regnet-32": _Model(
        regnet.make, (*_REGNET_X_32GF, 8, 64), ((1, 2, 1, 1), (8, 16, 16, 16), 8, 2, 32), {}
    ),
    "resnet-101": _Model(resnet.make, ((3, 4, 23, 3), 16, 8, 64), ((1, 2), 4, 2, 16), {}),
    "transformer-6-6": _Model(transformer.make, (6, 128, 4, 4, 64), _TINY_TRANSFORMER, {}),
    "transformer-36-36": _Model(transformer.make, (36, 128, 4, 4, 64), _TINY_TRANSFORMER, {}),
    "fno-1d": _Model(
        fno.make, (4, 32, 16, 16, 256), (1, 4, 2, 2, 8), {"dimensions": 1, "hidden": 64}
    ),
    "fno-3d": _Model(fno.make, (4, 16, 4, 4, 16), (1, 4, 2, 2, 8), {"dimensions": 3, "hidden": 32}),
    "u-fno": _Model(ufno.make, (3, 16, 4, 4, 16), (1, 4, 2, 2, 8), {}),
    "uno": _Model(uno.make, (3, 16, 6, 8, 48), (1, 4, 2, 2, 16), {}),
}

_OTHERS: dict[str, _Model] = {
    "gpt-12": _Model(gpt2.make, (12, 128, 4, 2000, 4, 128), _TINY_GPT, {}),
    "unet-128": _Model(unet.make, (4, 16, 6, 128), (2, 4, 2, 16), {}),
    "resnet-50-128": _Model(resnet.make, ((3, 4, 6, 3), 24, 12, 128), ((1, 2), 4, 2, 16), {}),
    "resnet-101-128": _Model(resnet.make, ((3, 4, 23, 3), 24, 12, 128), ((1, 2), 4, 2, 16), {}),
    "transformer-2-2": _Model(transformer.make, (2, 128, 4, 4, 64), _TINY_TRANSFORMER, {}),
}

PUBLISHED = tuple(_MODELS)


def published(name: str, *, tiny: bool = False, seed: int = 0) -> Example:
    """Build a model in training mode with a batch and a loss, as `zoo.build` does.

    Raises:
        ValueError: if there is no such row, nor one of the others.
    """
    models = _MODELS | _OTHERS
    if name not in models:
        raise ValueError(f"no row is called {name!r}; there are {', '.join(models)}")
    model = models[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        example = model.make(name, model.tiny if tiny else model.full, **model.options)
    example.model.train()
    return example

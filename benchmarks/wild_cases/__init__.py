"""Models of packages that remat was not made with: each is named `package/model`."""

from __future__ import annotations

from collections.abc import Callable

from matrix_cases.case import Built, Case
from wild_cases import densities, diffusion, images, science, sequences

__all__ = ["KINDS", "PACKAGES", "find", "names"]

_MODELS: dict[str, Callable[[], Built]] = (
    densities.MODELS | diffusion.MODELS | images.MODELS | sequences.MODELS | science.MODELS
)
KINDS = tuple(sorted({name.partition("/")[0] for name in _MODELS}, key=str.lower))
PACKAGES = ()  # `benchmarks/wild_requirements.txt` names the version of each


def names(kind: str) -> list[str]:
    """List the models of a package."""
    return [name for name in _MODELS if name.startswith(f"{kind}/")]


def find(name: str) -> Case:
    """Find a case by its name, such as `diffusers/UNet2DModel`.

    Raises:
        KeyError: if there is none.
    """
    build = _MODELS[name]
    return Case(name, lambda: [("", build)])

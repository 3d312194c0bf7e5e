"""Architectures that remat is held against eager on: transformers, torch's modules, timm."""

from __future__ import annotations

from collections.abc import Callable

from matrix_cases import timm_models, torch_modules, transformers_models
from matrix_cases.case import Built, Case, NotRunnable
from matrix_cases.judging import CATEGORIES, Outcome, judge, judge_eager

__all__ = [
    "CATEGORIES",
    "KINDS",
    "PACKAGES",
    "Built",
    "Case",
    "NotRunnable",
    "Outcome",
    "find",
    "judge",
    "judge_eager",
    "names",
    "run_case",
]

_SOURCES: dict[str, tuple[Callable[[], list[str]], Callable[[str], Case]]] = {
    "transformers": (transformers_models.names, transformers_models.case),
    "modules": (torch_modules.names, torch_modules.case),
    "timm": (timm_models.names, timm_models.case),
}
KINDS = tuple(_SOURCES)
PACKAGES = ("transformers", "timm")
"""The distributions whose versions say what was run."""


def names(kind: str) -> list[str]:
    """List the cases of a kind."""
    return _SOURCES[kind][0]()


def find(name: str) -> Case:
    """Find a case by its name, such as `transformers/llama`.

    Raises:
        KeyError: if there is none.
    """
    kind, _, rest = name.partition("/")
    return _SOURCES[kind][1](rest)


def run_case(name: str) -> Outcome:
    """Run a case by its name in this process.

    Raises:
        KeyError: if there is none.
    """
    return judge(find(name))

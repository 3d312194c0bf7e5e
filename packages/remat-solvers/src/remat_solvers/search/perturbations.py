"""Perturbations of the prices by which values are evicted, and the settings that are tried in turn.

Several perturbations give several schedules: of two graphs, each has another that does best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat_solvers.core.wiring import Floats

__all__ = [
    "EVICTION_PERTURBATIONS",
    "LOW_PEAK_PERTURBATIONS",
    "ONE_PASS_PERTURBATIONS",
    "EvictionPerturbation",
    "OnePassPerturbation",
    "random_factors",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noisy:
    """Prices with random factors: `noise` is their spread."""

    noise: float = 0.0
    seed: int = 0

    def weights(self, values: int) -> list[float]:
        """Draw the factor of each value."""
        drawn: list[float] = random_factors(self.noise, self.seed, values).tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPerturbation(_Noisy):
    """Perturbs the prices of `evict`.

    `cover` is the power of the share of over-budget time steps that a life covers, `crowding` the
    weight of a recomputation that is over budget itself, `hold` the share of the bytes evicted up
    to which a value is held rather than made again with it.
    """

    cover: float = 0.5
    crowding: float = 2.0
    hold: float = 0.2

    def dearer(self, crowd: int, over: int) -> float:
        """Weigh a recomputation that itself is over budget, by `crowd` bytes, where `over` are."""
        return 1 + self.crowding * crowd / over if crowd > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OnePassPerturbation(_Noisy):
    """Perturbs the prices of `evict_in_one_pass`.

    `span` is the power of the share of the ops until the next read; `deep` counts the ancestors
    that are gone, else an op costs its own time; with `hold` what cannot be made again is held for
    what is made of it.
    """

    span: float = 0.5
    deep: bool = True
    hold: bool = True


def random_factors(noise: float, seed: int, count: int) -> Floats:
    """Draw factors around 1, their logarithms with a standard deviation of `noise`."""
    factors: Floats = np.exp(noise * np.random.default_rng(seed).standard_normal(count))
    return factors


EVICTION_PERTURBATIONS = (
    EvictionPerturbation(),
    EvictionPerturbation(hold=0.5, noise=0.2, seed=1),
    EvictionPerturbation(cover=0.0, crowding=0.5),
    EvictionPerturbation(cover=1.0, crowding=8.0),
)
LOW_PEAK_PERTURBATIONS = (  # where time does not count
    EvictionPerturbation(hold=0.0),
    EvictionPerturbation(crowding=8.0, hold=0.0),
    EvictionPerturbation(cover=0.0, crowding=0.5),
)
ONE_PASS_PERTURBATIONS = (
    OnePassPerturbation(),
    OnePassPerturbation(span=0.0),
    OnePassPerturbation(span=1.0, hold=False),
)

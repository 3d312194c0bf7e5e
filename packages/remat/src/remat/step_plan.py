"""What was planned for a step of several regions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from remat_graph import Compute
from remat_solvers.step import RegionOption

__all__ = ["StepPlan"]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What was planned for a step of several regions; sizes in bytes, times in seconds.

    `regions` are pairs of a name and the option that it runs by, one for each call, in order.
    `breaks` say why the forward is not one region. `measured_peak_bytes` is that of the first step
    that ran by this plan, `None` before. No plan of the regions within the budget takes less time
    than `lower_bound`.
    """

    regions: tuple[tuple[str, RegionOption], ...]
    breaks: tuple[str, ...]
    budget_bytes: int
    predicted_peak_bytes: int
    store_all_peak_bytes: int
    time: float
    least_time: float
    lower_bound: float
    measured_peak_bytes: int | None = None

    @property
    def predicted_overhead(self) -> float:
        """Time of recomputation as a fraction of computing everything once."""
        return self.time / self.least_time - 1 if self.least_time else 0.0

    @property
    def bound_overhead(self) -> float:
        """The least overhead of any schedules of these regions, within the budget."""
        return max(0.0, self.lower_bound / self.least_time - 1) if self.least_time else 0.0

    @property
    def recomputations(self) -> int:
        """Number of operations run a second time or more."""
        ops = [
            [step.op for step in option.schedule.steps if isinstance(step, Compute)]
            for _, option in self.regions
        ]
        return sum(len(computed) - len(set(computed)) for computed in ops)

    def __str__(self) -> str:
        """Say it readably."""
        measured = self.measured_peak_bytes
        rows = [
            ("budget", _mib(self.budget_bytes)),
            ("peak, predicted", _mib(self.predicted_peak_bytes)),
            ("peak, measured", "not measured" if measured is None else _mib(measured)),
            ("storing everything", _mib(self.store_all_peak_bytes)),
            ("overhead, predicted", f"{100 * self.predicted_overhead:.2f}%"),
            ("overhead, at least", f"{100 * self.bound_overhead:.2f}%"),
            *(
                (name, f"{_times(count)}keeps {_mib(kept)}, peak {_mib(peak)}")
                for (name, kept, peak), count in Counter(
                    (name, option.kept_bytes, option.peak_bytes) for name, option in self.regions
                ).items()
            ),
            *(("break", reason) for reason in self.breaks),
        ]
        title = f"remat plan of {len(self.regions)} calls of regions"
        return "\n".join([title, *(f"  {name:<20} {text}" for name, text in rows)])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _times(count: int) -> str:
    return f"{count} times " if count > 1 else ""

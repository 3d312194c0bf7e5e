"""Options that commands over models share, and what they are read as."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from remat.budgets.budget import Budget as ParsedBudget
from remat.budgets.budget import parse_budget
from remat.command.targets import Device, Example, Precision, Target, read_settings
from remat.command.terminal import (
    KernelsOption,
    LeavingOption,
    LimitOption,
    NumericsOption,
    OutputsOption,
    SolverOption,
    err,
    waiting,
)
from remat.errors import BudgetError, RematError
from remat.planning.kernels import Kernels
from remat_graph import Numerics

if TYPE_CHECKING:
    from remat.report.readable_plan import ReadablePlan
    from remat_graph.torch import Costs

__all__ = [
    "Budget",
    "MakingOptions",
    "Model",
    "ModelOptions",
    "ModelOrGraph",
    "PlanOptions",
    "check_solver",
    "dry_plan",
    "most_seconds",
    "names_of_outputs",
    "read_budget",
    "refuse_auto",
    "taking",
]

_REFINE_SECONDS = 30.0  # of `refine` without a limit, in any case (decision 0026)
_POINT_SECONDS = 15.0  # of each point of a curve without a limit

Model = Annotated[str, typer.Argument(help="FILE.py:factory, or a model type of transformers.")]
ModelOrGraph = Annotated[
    str, typer.Argument(help="FILE.py:factory, a model type of transformers, or a GRAPH.json.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        help="Bytes with a unit ('8GiB'), or a share of plain autograd's peak ('50%'). With "
        "--device it may be left out: nine tenths of its memory, less the model and what AdamW "
        "keeps."
    ),
]


@dataclass(frozen=True, slots=True)
class MakingOptions:
    """How a model is made, and where its costs are from."""

    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens; of a model type at most 1024, else.")
    ] = None
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="key=value of the configuration, or for the factory; repeatable."
        ),
    ] = None
    dtype: Annotated[Precision, typer.Option(help="Of a model type.")] = Precision.FLOAT32
    device: Annotated[
        Device | None,
        typer.Option(
            case_sensitive=False,
            help="Plan for this one, without data: with its operators, by rates fitted to steps "
            "on it (h100) or of the vendor's data sheet.",
        ),
    ] = None
    measure: Annotated[
        bool, typer.Option("--measure", help="Make the model with its data and measure it here.")
    ] = False

    @property
    def costs(self) -> Costs:
        """Measured here, those of a named device, or estimates for this machine."""
        if self.device is None:
            return "measure" if self.measure else "estimate"
        from remat_graph.torch import DEVICES

        return DEVICES[self.device.value]

    def target(self, name: str, batch: int | None = None) -> Target:
        """Read what names a model, and its sizes; torch is not needed for it.

        Raises:
            RematError: if that can name none, a setting cannot be read, or costs are wanted both
                measured and of a device.
            OSError: if its file does not exist.
        """
        if self.measure and self.device is not None:
            raise RematError("--measure is for this machine; leave out --device or --measure")
        target = Target(name, batch, self.seq, read_settings(self.set_), self.dtype.value)
        target.check()
        return target


@dataclass(frozen=True, slots=True)
class ModelOptions(MakingOptions):
    """How a model of one batch size is made."""

    batch: Annotated[
        int | None, typer.Option(min=1, help="Batch size; of a model type 8, else.")
    ] = None

    def target(self, name: str, batch: int | None = None) -> Target:
        """Read what names a model, and its sizes; raises as that of `MakingOptions`."""
        return MakingOptions.target(self, name, self.batch if batch is None else batch)


@dataclass(frozen=True, slots=True)
class PlanOptions(ModelOptions):
    """How a model is made and planned for."""

    solver: SolverOption = "auto"
    partitioner: Annotated[
        str | None,
        typer.Option(help="What cuts the graph, by name, for a solver that needs it, as h-ilp."),
    ] = None
    numerics: NumericsOption = None
    kernels: KernelsOption = "eager"
    outputs: OutputsOption = None
    optimizer_in_backward: LeavingOption = False
    limit_seconds: LimitOption = None

    def plan(self, model: str, budget: str | None) -> tuple[ReadablePlan, str]:
        """Plan without running the plan, for what the device has if no budget is given.

        Ctrl-C keeps the best so far. The text says for which class, sizes and costs it is.

        Raises:
            RematError: if an option cannot be read; as `Target.build` and `remat.plan`.
        """
        target = self.target(model)
        wanted = read_budget(budget, self)
        check_solver(self.solver, self.partitioner)
        with waiting("making the model", None):
            example = target.build(self.costs)
        subject = f"{example}, {self._costs_in_words}"
        err.print(f"planning for {subject}", markup=False, highlight=False, soft_wrap=True)
        with waiting(
            "capturing and solving", most_seconds(self.solver, self.limit_seconds)
        ) as report:
            plan = dry_plan(
                example, self.costs, wanted, self.solver, self.limit_seconds, report,
                numerics=self.numerics, kernels=self.kernels, partitioner=self.partitioner,
                outputs=names_of_outputs(self.outputs), keep_best=True,
                optimizer_in_backward=self.optimizer_in_backward,
            )  # fmt: skip
        return plan, subject

    @property
    def _costs_in_words(self) -> str:
        if self.device is not None:
            return f"estimated for {self.device.value}"
        return "measured here" if self.measure else "estimated for this machine"


def taking(options: type[MakingOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command that takes `options` by that name have their fields as its options.

    typer reads the signature of a command: that of what is returned has the fields instead.
    """
    hints = get_type_hints(options, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            read = options(**{field.name: values.pop(field.name) for field in fields})
            command(**values, options=read)

        of_command = inspect.signature(command, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in of_command.parameters.items()
            if name != "options"
        ]
        run.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*own, *fields)}
        del run.__wrapped__
        return run

    return decorate


def read_budget(budget: str | None, options: MakingOptions) -> str:
    """Refuse, before a model is made, what is no budget; none is what the device has.

    Raises:
        BudgetError: if it cannot be read, or is `"auto"`, or none, where that is not known.
    """
    if budget is None and options.device is None:
        raise BudgetError(
            "--budget is needed: bytes with a unit ('8GiB') or a share of plain autograd's peak "
            "('50%'); with --device it may be left out, and is what that device has"
        )
    is_dry = options.device is None and not options.measure
    if budget is not None and parse_budget(budget).is_auto and is_dry:
        raise BudgetError(
            "budget='auto' is of what is free here, and nothing is measured; give bytes, a share, "
            "--measure or --device"
        )
    return budget or "auto"


def refuse_auto(budget: str) -> ParsedBudget:
    """Read a budget of bytes or a share.

    Raises:
        BudgetError: if it cannot be read, or is `"auto"`.
    """
    read = parse_budget(budget)
    if read.is_auto:
        raise BudgetError("budget='auto' is for a plan; give bytes or a share here")
    return read


def check_solver(name: str, partitioner: str | None = None) -> None:
    """Load a solver, and what cuts the graph for it, before there is a graph.

    Raises:
        SolverError: if the solver does not exist or cannot be loaded.
        PartitionError: if the partitioner does not.
        RematError: if there is a partitioner, and the solver takes the graph as it is.
    """
    from remat.planning.cutting import check_method

    check_method(name, partitioner)


def most_seconds(
    solver: str, limit_seconds: float | None, points: int | None = None
) -> float | None:
    """Say how long a search may take, also one for the points of a curve; `None` if not known."""
    if limit_seconds is not None:
        return limit_seconds
    if points is not None:
        return _POINT_SECONDS * points
    return _REFINE_SECONDS if solver in ("auto", "refine") else None


def names_of_outputs(outputs: str | None) -> list[str | int] | None:
    """Read names and positions that commas stand between."""
    if outputs is None:
        return None
    names = (name.strip() for name in outputs.split(","))
    return [int(name) if name.lstrip("-").isdigit() else name for name in names]


def dry_plan(
    example: Example,
    costs: Costs,
    budget: str | int,
    solver: str,
    limit_seconds: float | None,
    progress: Any,
    *,
    numerics: Numerics | None = None,
    kernels: Kernels = "eager",
    partitioner: str | None = None,
    outputs: list[str | int] | None = None,
    optimizer_in_backward: bool = False,
    keep_best: bool = False,
) -> ReadablePlan:
    """Plan without running the plan; with `keep_best`, Ctrl-C ends with the best so far.

    Raises:
        RematError: as `remat.plan`.
    """
    from remat.planning.settings import Settings
    from remat.planning.whole_module import plan_module

    settings = Settings.read(
        budget, solver, costs, limit_seconds, progress, None,
        numerics=numerics, partitioner=partitioner, outputs=outputs,
        optimizer_in_backward=optimizer_in_backward, kernels=kernels,
    )  # fmt: skip
    settings = dataclasses.replace(settings, keep_best=keep_best)
    return plan_module(example.model, example.args, example.kwargs, settings).plan

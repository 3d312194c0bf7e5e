"""Training by two processes: DDP, FSDP2, and a forward that communicates."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from loop_cases.models import Blocks, Heads, made, square
from loop_cases.run import Kept, Run, state

__all__ = ["LOOPS", "RANKS", "collectives", "ddp", "fsdp_regions", "fsdp_units", "run_ranks"]

RANKS = 2


def run_ranks(folder: Path, work: Callable[..., Any], cases: Mapping[str, Any]) -> dict[str, Any]:
    """Run `work(rank, case)` for each case in two processes.

    Returns for each case what each rank found, or the traceback of what it raised.
    """
    spawn(_work, (folder, work, dict(cases)), nprocs=RANKS)  # type: ignore[no-untyped-call]
    ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {name: [found[name] for found in ranks] for name in cases}


def _work(rank: int, folder: Path, work: Callable[..., Any], cases: dict[str, Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    found = {}
    for position, (name, case) in enumerate(cases.items()):
        distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store-{position}", rank=rank, world_size=RANKS
        )
        try:
            found[name] = work(rank, case)
        except Exception:
            found[name] = traceback.format_exc()
        finally:
            distributed.destroy_process_group()
    torch.save(found, folder / f"rank-{rank}.pt")


def _train(run: Run, model: Any, optimizer: torch.optim.Optimizer) -> Kept:
    rank = distributed.get_rank()
    kept: Kept = {}
    torch.manual_seed(rank)
    for step in range(run.steps):
        x = run.batch(10 * step + rank, rows=run.rows(step))
        optimizer.zero_grad()
        with run.step():
            square(model(x)).backward()  # type: ignore[no-untyped-call]
        kept |= _gradients(model, step)
        optimizer.step()
    return kept | state(model)


def _gradients(model: nn.Module, step: int) -> Kept:
    return {
        f"gradient {name} of step {step}": torch.clone(
            grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        )
        for name, parameter in model.named_parameters()
        for grad in [parameter.grad]
        if grad is not None
    }


def ddp(run: Run, *, heads: bool = False, accumulate: bool = False, **options: Any) -> Kept:
    """Train under DDP; with `heads` one head is used at a time."""
    rank = distributed.get_rank()
    model = DistributedDataParallel(run.model(Heads if heads else Blocks), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: Kept = {}
    torch.manual_seed(rank)
    for step in range(run.steps):
        x = run.batch(10 * step + rank, rows=run.rows(step + rank))
        first = not accumulate or step % 2 == 0
        if first:
            optimizer.zero_grad()
        with model.no_sync() if accumulate and first else nullcontext(), run.step():
            output = model(x)
            square(output[step % 2] if heads else output).backward()  # type: ignore[no-untyped-call]
        kept |= _gradients(model, step)
        if not accumulate or not first:
            optimizer.step()
    return kept | state(model)


class Unit(nn.Module):
    """Holds a block, so that what is sharded and what is rematerialized are two modules."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        return self.block(x)  # type: ignore[no-any-return]


def fsdp_regions(run: Run) -> Kept:
    """Rematerialize by blocks, then shard each block and the root."""
    budget = torch.get_default_dtype().itemsize * 2**20
    model = run.model(budget=budget, regions="layers.*")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return _train(run, model, torch.optim.AdamW(model.parameters(), lr=0.01))


def fsdp_units(run: Run) -> Kept:
    """Rematerialize within each unit that is sharded."""
    model: Any = made(Blocks, run.size.width, run.size.depth)
    for position, layer in enumerate(model.layers):
        model.layers[position] = fully_shard(Unit(run.wrap(layer, budget=0.9)))
    fully_shard(model)
    return _train(run, model, torch.optim.AdamW(model.parameters(), lr=0.01))


class Gathered(nn.Module):
    """Layers that read what the other ranks made, as sequence-parallel ones do."""

    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(RANKS * width, 4 * width), nn.GELU(), nn.Tanh(),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Map features of each row, (rows, width), to the same."""
        group: Any = distributed.group.WORLD
        for layer in self.layers:
            everywhere = all_gather_tensor_autograd(x, 1, group)
            x = x + layer(everywhere)
        return x


def collectives(run: Run) -> Kept:
    """Communicate within the forward; ranks that were given budgets of their own."""
    model = run.model(Gathered, budget=0.85 if distributed.get_rank() else 0.9)
    return _train(run, model, torch.optim.SGD(model.parameters(), lr=0.01))


LOOPS = {
    "DDP, two processes": ddp,
    "FSDP2, rematerialized by blocks": fsdp_regions,
    "FSDP2, rematerialized within the units": fsdp_units,
    "collectives within the forward": collectives,
}

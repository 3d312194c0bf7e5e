"""Cases of two processes: each trains a rematerialized and a plain model and records both."""

import os
import traceback
from contextlib import nullcontext

import torch
from torch import distributed, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from stack_cases.models import LIMIT_SECONDS, Blocks, Heads, batch, made, rematerialized, square

RANKS = 2
STEPS = 3


def run_cases(path, cases):
    """Run cases, functions of whether the model is rematerialized, in two processes.

    Returns for each case what each rank found, a pair of records, or the traceback of what it
    raised.
    """
    torch.multiprocessing.spawn(_run_rank, (path, cases), nprocs=RANKS)
    ranks = [torch.load(path / f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return {name: [found[name] for found in ranks] for name in cases}


def _run_rank(rank, path, cases):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    found = {}
    for position, (name, (case, options)) in enumerate(cases.items()):
        distributed.init_process_group(
            "gloo", init_method=f"file://{path}/store-{position}", rank=rank, world_size=RANKS
        )
        try:
            found[name] = (case(True, rank, **options), case(False, rank, **options))
        except Exception:
            found[name] = traceback.format_exc()
        finally:
            distributed.destroy_process_group()
    torch.save(found, path / f"rank-{rank}.pt")


def assert_same_records(found):
    """Compare what the ranks have kept, bit by bit."""
    raised = [rank for rank in found if isinstance(rank, str)]
    assert not raised, "\n".join(raised)
    for rank in found:
        got, expected = rank
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            if tensor is None or got[name] is None:
                assert tensor is got[name], name
            else:
                assert torch.equal(got[name], tensor), name


def _full(tensor):
    """Make one tensor of a sharded one."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _record(record, model, step):
    for position, parameter in enumerate(model.parameters()):
        record[f"gradient {position} of step {step}"] = _full(parameter.grad)


def _finish(record, model):
    for position, parameter in enumerate(model.parameters()):
        record[f"parameter {position}"] = _full(parameter)
    return record


def ddp(rematerialize, rank, heads=False, accumulate=False, **options):
    """Train under DDP; with `heads` one head is used at a time."""
    model = made(Heads if heads else Blocks)
    planned = model = rematerialized(model) if rematerialize else model
    model = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = {}
    torch.manual_seed(rank)
    for step in range(STEPS):
        first = not accumulate or step % 2 == 0
        if first:
            optimizer.zero_grad()
        with model.no_sync() if accumulate and first else nullcontext():
            output = model(batch(10 * step + rank))
            square(output[step % 2] if heads else output).backward()
        _record(record, model, step)
        if not accumulate or not first:
            optimizer.step()
    if rematerialize:
        assert "not made yet" not in str(planned.plan)
    return _finish(record, model)


class Unit(nn.Module):
    """Holds a block, so that what is sharded and what is rematerialized are two modules."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x)


def _train_sharded(model, rank):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    record = {}
    torch.manual_seed(rank)
    for step in range(STEPS):
        optimizer.zero_grad()
        square(model(batch(10 * step + rank))).backward()
        _record(record, model, step)
        optimizer.step()
    return _finish(record, model)


def fsdp_regions(rematerialize, rank):
    """Rematerialize by blocks, then shard each block and the root."""
    model = made(Blocks)
    if rematerialize:
        model = remat.rematerialize(
            model, budget="1MiB", regions="layers.*", limit_seconds=LIMIT_SECONDS
        )
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    record = _train_sharded(model, rank)
    if rematerialize:
        assert "not made yet" not in str(model.plan)
    return record


def fsdp_units(rematerialize, rank):
    """Rematerialize within each unit that is sharded."""
    model = made(Blocks)
    for position, layer in enumerate(model.layers):
        block = rematerialized(layer, budget=0.9) if rematerialize else layer
        model.layers[position] = fully_shard(Unit(block))
    fully_shard(model)
    record = _train_sharded(model, rank)
    if rematerialize:
        assert all("not made yet" not in str(layer.block.plan) for layer in model.layers)
    return record


class Gathered(nn.Module):
    """Layers that read what the other ranks made, as sequence-parallel ones do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Tanh(), nn.Linear(64, 16))
            for _ in range(4)
        )

    def forward(self, x):
        group = distributed.group.WORLD
        for layer in self.layers:
            everywhere = all_gather_tensor_autograd(x, 1, group)
            x = x + layer(everywhere)
        return x


def collectives(rematerialize, rank):
    """Communicate within the forward; ranks that were given budgets of their own."""
    model = made(Gathered)
    if rematerialize:
        budget = 0.75 if rank else 0.85
        model = remat.rematerialize(model, budget=budget, limit_seconds=LIMIT_SECONDS)
    record = _train_sharded(model, rank)
    if rematerialize:
        assert model.plan.predicted_overhead > 0
    return record

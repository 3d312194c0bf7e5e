"""A language model whose logits take most of a step, and what training it in slices gives."""

import copy
from unittest import mock

import torch
from integration_cases.language import WORDS, Headed
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
from remat_exec import measure_peak

SHAPE = (2, 64)
BUDGET = 3 * (2 * 64 * WORDS * 4) // 2  # one and a half times the logits, of which two are needed
IN_SLICES = {"budget": BUDGET, "numerics": "rounding", "limit_seconds": 0.1}


def words(seed, shape=SHAPE):
    """Draw the ids of a batch."""
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


def step(model, *args):
    """Run a step of a model that returns its loss; give that with all gradients, and the peak."""
    model.zero_grad()
    with measure_peak() as peak:
        loss = model(*args)
        loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients]
    return [each.detach().clone() for each in (loss, *whole)], peak.peak_bytes


def assert_close(found, expected):
    """Compare what two models gave, within rounding."""
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6 * other.abs().max().item())


def beside_plain(rank, kind):
    """Train two models of a rank side by side: one in slices, within DDP or FSDP2, one plain.

    Returns for each step what both gave, the peak in slices, and how often each gathered weights.
    """
    plain, options = Headed(whole=True), {"regions": "head"} if kind == "FSDP2" else {}
    sliced = remat.rematerialize(copy.deepcopy(plain), **IN_SLICES, **options)
    models = [_over_ranks(each, kind) for each in (sliced, plain)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    steps = []
    for number in range(3):
        results, peaks, gathered = [], [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            with mock.patch.object(
                distributed, "all_gather_single", wraps=distributed.all_gather_single
            ) as gather:
                result, peak = step(model, words(10 * number + rank))
                gathered.append(gather.call_count)
            optimizer.step()
            results.append(result)
            peaks.append(peak)
        steps.append((*results, peaks[0], gathered))
    return steps, [kind.sliced for kind in sliced.plan.kinds]


def _over_ranks(model, kind):
    if kind == "DDP":
        return DistributedDataParallel(model)
    fully_shard(model.head)
    return fully_shard(model)

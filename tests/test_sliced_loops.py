"""Loops whose largest values are made in slices: autocast, scaled losses, low-rank adapters."""

import copy
from contextlib import nullcontext

import pytest
import torch
from integration_cases.language import WORDS, Language
from torch import nn

import remat
from remat.planning import task
from remat_exec import measure_peak


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def language(adapted):
    torch.manual_seed(0)
    model = Language()
    if adapted:
        model.requires_grad_(False)
        model.down, model.head = Adapted(model.down), Adapted(model.head)
    return model


def trained(model, autocast, scale, peak=nullcontext, steps=4):
    """Train; give the trained weights, the losses and the peak of the last step."""
    ids = torch.randint(WORDS, (2, 128), generator=torch.Generator().manual_seed(0))
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with peak() if step == steps - 1 else nullcontext() as measured:
            with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
                loss = model(ids)
            scaler.scale(loss).backward()
        losses.append(loss.item())
        scaler.step(optimizer)
        scaler.update()
    return weights, losses, measured, scaler.get_scale()


@pytest.mark.parametrize(
    ("adapted", "autocast", "scale", "share"),
    [
        pytest.param(False, torch.bfloat16, None, 0.5, id="autocast"),
        pytest.param(
            False,
            torch.float16,
            2.0**30,
            0.5,
            id="scaled, too much at first",
            marks=pytest.mark.sweep,
        ),
        pytest.param(True, None, None, 0.3, id="low-rank adapters", marks=pytest.mark.sweep),
        pytest.param(
            True,
            torch.bfloat16,
            None,
            0.3,
            id="low-rank adapters within autocast",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_a_loop_in_slices_trains_as_the_plain_model(adapted, autocast, scale, share):
    plain = language(adapted)
    start = copy.deepcopy(plain)
    expected, losses, taken, last_scale = trained(plain, autocast, scale, measure_peak)
    budget = int(share * taken.peak_bytes)
    whole, sliced = (
        remat.rematerialize(
            copy.deepcopy(start), budget=budget, limit_seconds=0.1, numerics=numerics
        )
        for numerics in (None, "rounding")
    )
    with pytest.raises(remat.BudgetTooSmall):
        trained(whole, autocast, scale)
    found, found_losses, peak, found_scale = trained(sliced, autocast, scale, measure_peak)
    assert sliced.plan.kinds[0].sliced
    assert peak.peak_bytes <= budget
    assert found_scale == last_scale
    assert scale is None or found_scale < scale, "no step was left out"
    tolerance = 1e-5 if autocast is None else 2e-2
    torch.testing.assert_close(found_losses, losses, rtol=tolerance, atol=tolerance)
    for one, other, begun in zip(
        found, expected, (each for each in start.parameters() if each.requires_grad), strict=True
    ):
        moved = (other - begun).abs().max()
        assert (one - other).abs().max() <= tolerance * moved + 1e-7


@pytest.mark.sweep
def test_what_is_traced_anew_runs_by_the_plan_that_is_known(monkeypatch):
    """TorchDynamo guards the length of a list that a hook appends to."""
    solved, best = [], task.best_within

    def counted(*args, **options):
        solved.append(args)
        return best(*args, **options)

    monkeypatch.setattr(task, "best_within", counted)
    model = language(adapted=False)
    eager, seen, ids = copy.deepcopy(model), [], torch.randint(WORDS, (2, 128))
    with measure_peak() as plain:
        eager(ids).backward()
    model.down.register_forward_hook(lambda *_: seen.append(len(seen)))
    run = remat.rematerialize(
        model, budget=plain.peak_bytes // 2, numerics="rounding", limit_seconds=0.1
    )
    for _ in range(6):
        run.zero_grad()
        run(ids).backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            assert (one.grad - other.grad).abs().max() <= 1e-5 * other.grad.abs().max()
    assert len(seen) == 6
    assert run.plan.kinds[0].sliced
    assert len(solved) <= 3

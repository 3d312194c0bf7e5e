"""Training loops as people write them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import remat
from loop_cases.models import Blocks, Counting, Heads, gpt2, made, square, tokens
from loop_cases.run import Kept, Run, state
from remat_exec import measure_peak
from remat_graph import canonical_hash

__all__ = ["LENGTHS", "LOOPS"]

LENGTHS = 10
SMALLER_AFTER = 4


def sgd(
    run: Run, model: Any, around: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Train with plain SGD, each forward and backward within a context."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(run.steps):
        x = run.batch(step)
        optimizer.zero_grad()
        with run.step(), around():
            square(model(x).float()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def adamw(run: Run) -> Kept:
    """AdamW, a schedule of learning rates, clipped gradients."""
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=run.steps)
    torch.manual_seed(1)
    kept = {}
    for step in range(run.steps):
        x = run.batch(step)
        optimizer.zero_grad()
        with run.step():
            square(model(x)).backward()  # type: ignore[no-untyped-call]
        kept[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
    return kept | state(model)


def accumulation(run: Run) -> Kept:
    """Two batches to a step of the optimizer."""
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(run.steps):
        x = run.batch(step)
        with run.step():
            (square(model(x)) / 2).backward()  # type: ignore[no-untyped-call]
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


def two_optimizers(run: Run) -> Kept:
    """One optimizer for the trunk, one for the heads."""
    model = run.model(Heads)
    heads = [*model.left.parameters(), *model.right.parameters()]
    optimizers = [
        torch.optim.AdamW(model.trunk.parameters(), lr=0.01),
        torch.optim.SGD(heads, lr=0.1, momentum=0.9),
    ]
    for step in range(run.steps):
        x = run.batch(step)
        model.zero_grad()
        with run.step():
            left, right = model(x)
            (square(left) + square(right)).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
    return state(model)


def averaged(run: Run) -> Kept:
    """Average the weights in a deep copy, and by torch's own average."""
    model = run.model()
    average = copy.deepcopy(model)
    other = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(run.steps):
        x = run.batch(step)
        optimizer.zero_grad()
        with run.step():
            square(model(x)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        other.update_parameters(model)
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
    parts = {"trained": model, "average": average, "other": other.module}
    kept = {f"{part} {name}": t for part, m in parts.items() for name, t in state(m).items()}
    return kept | {"output of the average": average.eval()(run.batch(99)).detach()}


def scaled(run: Run) -> Kept:
    """Scale losses, once by too much, so that the step is left out."""
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    torch.manual_seed(1)
    for step in range(run.steps):
        x = run.batch(step)
        optimizer.zero_grad()
        with run.step():
            scaler.scale(square(model(x)) * 8).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    return state(model) | {"scale": torch.tensor(scaler.get_scale())}


def smaller_last_batch(run: Run) -> Kept:
    """Epochs whose last batch is smaller; the loss outside reads the batch."""

    def loss(output: Tensor, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, x[:, :4])

    model = run.model(loss=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(run.steps):
        last = step % SMALLER_AFTER == SMALLER_AFTER - 1
        x = run.batch(step, rows=run.rows(step) // 3 if last else None)
        optimizer.zero_grad()
        with run.step():
            loss(model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return state(model)


def ten_lengths(run: Run) -> Kept:
    """Sentences of ten lengths in turn."""
    model = run.wrap(gpt2(run.size.width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for step in range(run.steps):
        ids = tokens(step, length=run.words(step) - step % LENGTHS)
        optimizer.zero_grad()
        with run.step():
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return state(model)


def step_counter(run: Run) -> Kept:
    """Train a model that counts its calls."""
    model = run.model(Counting)
    torch.manual_seed(1)
    sgd(run, model)
    return state(model) | {"steps": torch.tensor([model.steps, model.inner.steps])}


def backward_within_autocast(run: Run) -> Kept:
    """Forward and backward both within autocast."""
    model = run.model()
    torch.manual_seed(1)
    sgd(run, model, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    return state(model) | {"autocast": torch.tensor(torch.is_autocast_enabled("cpu"))}


def hooks(run: Run) -> Kept:
    """Keep what an inner module gives, and change what another gives, by hooks."""
    model: Any = made(Blocks, run.size.width, run.size.depth)
    seen: dict[str, Tensor] = {}
    model.layers[1].register_forward_hook(
        lambda module, args, output: seen.__setitem__("output", output.detach().clone())
    )
    model.layers[2].enter.register_forward_hook(lambda module, args, output: output * 2)
    model = run.wrap(model)
    torch.manual_seed(1)
    sgd(run, model)
    return state(model) | seen


def hooks_that_append(run: Run) -> Kept:
    """Append to a list at each call of inner modules, by hooks."""
    model: Any = made(Blocks, run.size.width, run.size.depth)
    calls: list[int] = []
    model.layers[0].register_forward_pre_hook(lambda module, args: calls.append(0))
    model.layers[1].register_forward_hook(lambda module, args, output: calls.append(1))
    model = run.wrap(model)
    torch.manual_seed(1)
    sgd(run, model)
    return state(model) | {"calls": torch.tensor(calls)}


def two_threads(run: Run) -> Kept:
    """Two threads that plan and train at once.

    Without dropout: its mask would depend on what the other thread draws.
    """

    def train(thread: int) -> Kept:
        sgd(run, models[thread])
        return {f"{name} of {thread}": tensor for name, tensor in state(models[thread]).items()}

    sizes = [(run.size.width, run.size.depth + thread) for thread in range(2)]
    models = [run.wrap(made(Blocks, *size, dropout=0.0)) for size in sizes]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, range(2))
    return first | second | {"seeded": torch.tensor(torch.manual_seed(0).initial_seed())}


def compiled(run: Run) -> Kept:
    """Go in by `torch.compile`, with seven tenths of a plain step's peak."""
    model: Any = made(Blocks, run.size.width, run.size.depth)
    if not run.plain:
        rows = max(map(run.rows, range(run.steps)))
        x, plain = run.batch(0, rows=rows), copy.deepcopy(model)
        with measure_peak() as peak:
            square(plain(x)).backward()  # type: ignore[no-untyped-call]
        model = run.wrap(model, backend=True, budget=int(0.7 * peak.peak_bytes))
    torch.manual_seed(1)
    sgd(run, model)
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in state(model).items()}


def meta(run: Run) -> Kept:
    """Plan on the meta device, and in the plain run with data; nothing is trained."""
    with torch.device("cpu" if run.plain else "meta"):  # moved there, tied weights come apart
        model = gpt2(run.size.width, run.size.depth)
        ids = torch.zeros(4, run.size.words, dtype=torch.long)
    plan = remat.plan(
        model, kwargs={"input_ids": ids, "labels": ids}, budget=0.9, costs="estimate",
        limit_seconds=1.0,
    )  # fmt: skip
    digest = int(canonical_hash(plan.graph)[:12], 16)
    return {"graph": torch.tensor(digest), "peak": torch.tensor(plan.predicted_peak_bytes)}


LOOPS = {
    "AdamW, schedule, clipping": adamw,
    "gradient accumulation": accumulation,
    "two optimizers": two_optimizers,
    "averages of the weights": averaged,
    "GradScaler": scaled,
    "a smaller last batch, its loss handed over": smaller_last_batch,
    "ten sequence lengths": ten_lengths,
    "a step counter on the module": step_counter,
    "backward within autocast": backward_within_autocast,
    "hooks of inner modules": hooks,
    "hooks that append to a list": hooks_that_append,
    "two threads at once": two_threads,
    "torch.compile, back end remat": compiled,
    "a dry plan on meta, with a loss": meta,
}

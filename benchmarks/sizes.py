"""Training with other sizes, or other numbers, in each step: how often it is traced, solved, slow.

Each loop trains one model beside the same model in eager, on the same batches. Told are what was
traced as it comes and with symbols, what was rehearsed and solved, seconds of a step from the 20th
on beside plain's, and of sizes that are new then, steps over the budget, and whether all gradients
have eager's bits; where rounding may differ, how far they are from these. The ratio of processor
time is that of a machine with no other work. `pyg` needs torch_geometric.

With `--kernels inductor` plans have compiled groups, which are waited for, and a model by
`torch.compile` with Inductor is trained beside: told are how its time stands to plain's, and how
many steps ran groups.

    python benchmarks/sizes.py [--loops NAME ...] [--steps N] [--budget F] [--kernels inductor]
        [--json FILE] [--shared]
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import remat
from counting import counted
from provenance import write_results
from sized_models import (
    Annealed,
    Boxes,
    Decoder,
    GraphNet,
    Images,
    Language,
    Molecules,
    PyG,
    Speech,
)

RESULTS = Path(__file__).parent / "results" / "sizes.json"
_WARM = 20  # steps that are not timed


@dataclass(frozen=True, slots=True)
class Loop:
    """A model, and the inputs of one of its steps; a budget of its own, and what may differ."""

    model: Callable[[], nn.Module]
    batch: Callable[[random.Random, int], tuple[Any, ...]]
    budget: float | int | None = None
    numerics: str | None = None


def _tokens(draw: random.Random, step: int) -> tuple[Any, ...]:
    """Draw lengths from a distribution with a long tail."""
    ids = torch.randint(0, 2000, (4, min(512, int(draw.lognormvariate(4.5, 0.5)) + 8)))
    return ids, ids.roll(1, 1)


def _many_words(draw: random.Random, step: int) -> tuple[Any, ...]:
    """Draw lengths, with labels of the next word, some of which are ignored."""
    ids = torch.randint(0, 8000, (4, draw.randint(40, 256)))
    labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    return ids, labels.masked_fill(torch.rand(ids.shape) < 0.1, -100)


def _masked(draw: random.Random, step: int) -> tuple[Any, ...]:
    ids = torch.randint(0, 2000, (4, 128))
    return ids, ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)


def _graph(draw: random.Random, step: int) -> tuple[Any, ...]:
    nodes = draw.randint(200, 1200)
    return torch.randn(nodes, 128), torch.randint(0, nodes, (2, draw.randint(3, 5) * nodes))


def _image(draw: random.Random, step: int) -> tuple[Any, ...]:
    return (torch.randn(2, 3, draw.randint(40, 96), draw.randint(40, 96)),)


def _molecules(draw: random.Random, step: int) -> tuple[Any, ...]:
    sizes = [draw.randint(8, 40) for _ in range(draw.randint(24, 32))]
    atoms, edges = sum(sizes), 2 * sum(size + draw.randint(0, 4) for size in sizes)
    graph = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    joined = torch.randint(0, atoms, (2, edges))
    numbers = torch.randint(0, 40, (atoms,))
    return numbers, joined, torch.randn(edges, 8), graph, torch.randn(len(sizes))


def _boxes(draw: random.Random, step: int) -> tuple[Any, ...]:
    count = draw.randint(10, 200)
    boxes = torch.rand(count, 4) * torch.tensor([1.0, 1.0, 0.4, 0.4])
    return torch.randn(1, 3, 192, 256), boxes, torch.randint(0, 21, (count,))


def _speech(draw: random.Random, step: int) -> tuple[Any, ...]:
    length, text = draw.randint(120, 300), draw.randint(10, 40)
    lengths = torch.tensor([[length] * 4, [text] * 4])
    return torch.randn(4, 80, length), torch.randint(1, 32, (4, text)), lengths


def _text(draw: random.Random, step: int) -> tuple[Any, ...]:
    return torch.randint(0, 500, (32, 12)), 0.9 * math.exp(-step / 100)


LOOPS = {
    "lengths": Loop(lambda: Language(masked=False), _tokens),
    "lengths in slices": Loop(
        lambda: Language(masked=False, width=128, layers=6, words=8000),
        _many_words,
        45 * 2**20,
        "rounding",
    ),
    "masked tokens": Loop(lambda: Language(masked=True), _masked),
    "graphs": Loop(GraphNet, _graph),
    "images": Loop(Images, _image),
    "temperature": Loop(
        Annealed, lambda _, step: (torch.randn(512, 256), 0.5 + math.exp(-step / 50))
    ),
    "molecules": Loop(Molecules, _molecules),
    "pyg": Loop(PyG, _molecules),
    "boxes": Loop(Boxes, _boxes),
    "speech": Loop(Speech, _speech),
    "teacher forcing": Loop(Decoder, _text),
}


def _same_gradients(one: nn.Parameter, other: nn.Parameter) -> bool:
    if one.grad is None or other.grad is None:
        return one.grad is other.grad
    return torch.equal(one.grad, other.grad)


def _largest_difference(model: nn.Module, eager: nn.Module) -> float:
    """Give by how much of the largest number of a gradient any of its numbers differs."""
    differences = [0.0]
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        if one.grad is not None and other.grad is not None:
            most = float(other.grad.abs().max())
            differences.append(float((one.grad - other.grad).abs().max()) / max(most, 1e-30))
    return max(differences)


def _timed(model: Any, step: int, inputs: tuple[Any, ...]) -> tuple[float, float]:
    """Give the seconds of a step, and those that the processor worked on it."""
    model.zero_grad()
    torch.manual_seed(step)
    random.seed(step)
    start, worked = time.perf_counter(), time.process_time()
    model(*inputs).backward()
    return time.perf_counter() - start, time.process_time() - worked


def train(loop: Loop, steps: int, budget: float, kernels: Any) -> dict[str, Any]:
    """Train by plans and in eager, on the same batches; with compiled groups, by Inductor, too."""
    torch.manual_seed(0)
    draw, eager = random.Random(0), loop.model()
    groups, by_inductor = 0, list[tuple[float, float]]()
    compiled = torch.compile(copy.deepcopy(eager)) if kernels == "inductor" else None
    with counted() as counts:
        model = remat.rematerialize(
            copy.deepcopy(eager), budget=loop.budget or budget, numerics=loop.numerics,
            kernels=kernels, wait=kernels == "inductor",
        )  # fmt: skip
        ours, plain = list[tuple[float, float]](), list[tuple[float, float]]()
        over = same = 0
        beyond, sizes, difference, overhead = list[float](), set[Any](), 0.0, list[float]()
        for step in range(steps):
            inputs = loop.batch(draw, step)
            shapes = tuple(each.shape for each in inputs if isinstance(each, torch.Tensor))
            plain.append(_timed(eager, step, inputs))
            if compiled is not None:
                by_inductor.append(_timed(compiled, step, inputs))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ours.append(_timed(model, step, inputs))
            over += any(issubclass(each.category, remat.BudgetWarning) for each in caught)
            same += all(map(_same_gradients, model.parameters(), eager.parameters()))
            difference = max(difference, _largest_difference(model, eager))
            if shapes not in sizes and step >= _WARM:
                beyond.append(ours[-1][1] - plain[-1][1])
            sizes.add(shapes)
            groups += "compiled groups" in str(model.plan) if compiled is not None else 0
            overhead.append(getattr(model.plan, "predicted_overhead", None) or 0.0)
    (late, worked), (late_plain, worked_plain) = (
        tuple(zip(*steps[_WARM:], strict=True)) for steps in (ours, plain)
    )
    inductor: dict[str, Any] = {}
    if compiled is not None:
        seconds, processor = zip(*by_inductor[_WARM:], strict=True)
        inductor = {
            "inductor ratio": round(sum(seconds) / sum(late_plain), 2),
            "inductor processor ratio": round(sum(processor) / sum(worked_plain), 3),
            "inductor step s": round(median(seconds), 4),
            "steps by groups": groups,
        }
    return {
        "steps": steps, **counts,
        "first steps s": round(sum(seconds for seconds, _ in ours[:_WARM]), 2),
        "step s": round(median(late), 4), "plain step s": round(median(late_plain), 4),
        "ratio": round(sum(late) / sum(late_plain), 2), "slowest s": round(max(late), 3),
        "processor ratio": round(sum(worked) / sum(worked_plain), 3),
        "predicted overhead": round(sum(overhead[_WARM:]) / len(late), 4),
        "new sizes": len(beyond), "new size beyond plain s": round(median(beyond or [0.0]), 4),
        "steps told over budget": over, "steps with eager's bits": same,
        "largest difference": difference, **inductor,
    }  # fmt: skip


def main() -> int:
    """Run the loops, and tell of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    there = [name for name in LOOPS if name != "pyg" or find_spec("torch_geometric")]
    parser.add_argument("--loops", nargs="*", choices=LOOPS, default=there)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", type=float, default=0.7)
    parser.add_argument("--kernels", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULTS)
    parser.add_argument("--shared", action="store_true", help="other work runs on the machine")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in arguments.loops:
        results[name] = train(LOOPS[name], arguments.steps, arguments.budget, arguments.kernels)
        print(name, *(f"{key}: {value}" for key, value in results[name].items()), sep="\n  ")
        if arguments.json:
            found = {
                "budget": arguments.budget, "kernels": arguments.kernels,
                "shared": arguments.shared, "loops": results,
            }  # fmt: skip
            write_results(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""remat beside what a user would pick instead, on three models without dropout.

Peak and time relative to plain autograd: `torch.utils.checkpoint` around every block,
torch.compile's `activation_memory_budget` (backend aot_eager, so that both sides run the same
kernels), and `remat.rematerialize` at fractions of the plain peak.

    python benchmarks/peers.py [--json FILE] [--quick] [--models NAME ...]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import remat
import zoo
from comparison import Variant, compare, print_table, write_json
from zoo import Example

BUDGETS_COMPILE = (1.0, 0.8, 0.5, 0.3, 0.1, 0.0)
BUDGETS_REMAT = (0.8, 0.65, 0.5, 0.4, 0.3)
BLOCKS = ("GPT2Block", "Convolutions", "TransformerEncoderLayer", "TransformerDecoderLayer")


def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Checkpoint every block of the model, in place, as a user would."""
    blocks = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    assert blocks
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def compiled(budget: float) -> Callable[[nn.Module], nn.Module]:
    """Compile under an `activation_memory_budget`.

    Dynamo keeps compiled code by backend, so that each budget needs a backend object of its own.
    The partitioner, which runs within the backend, reads the budget.
    """

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return aot_eager(graph, inputs)

    def make(model: nn.Module) -> nn.Module:
        compiled_model: nn.Module = torch.compile(model, backend=backend)  # type: ignore[assignment]
        return compiled_model

    return make


def rematerialized(example: Example, budget: float) -> Callable[[nn.Module], nn.Module]:
    """Rematerialize under a fraction of the plain peak."""
    return lambda model: remat.rematerialize(model, example.args, example.kwargs, budget=budget)


def variants(example: Example) -> list[Variant]:
    """List all variants for a model, plain autograd first."""
    found = [Variant("plain", lambda model: model)]
    found.append(Variant("checkpoint per block", checkpoint_blocks))
    found += [Variant(f"memory budget {b}", compiled(b)) for b in BUDGETS_COMPILE]
    found += [Variant(f"remat {b}", rematerialized(example, b)) for b in BUDGETS_REMAT]
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, two rounds: a smoke test"
    )
    parser.add_argument("--models", nargs="+", choices=zoo.PEERS, default=zoo.PEERS, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = 4 * len(BUDGETS_COMPILE)
    results = {}
    for name in options.models:
        example = zoo.build(name, "tiny" if options.quick else "peers")
        results[name] = compare(example, variants(example), 2 if options.quick else options.rounds)
        print_table(name, results[name])
        if options.json:
            write_json(options.json, results, quick=options.quick)


if __name__ == "__main__":
    main()

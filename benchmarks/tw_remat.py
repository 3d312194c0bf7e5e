"""Memory and length of tw-remat, pw-remat and xla-greedy on networks of growing depth, unit costs.

As in Kumar et al. (NeurIPS 2019), figures 2 to 4: feed-forward networks with 10 to 100 layers and
residual networks, every op of one unit of time and memory, gradients of weights applied at once.
A schedule's length is relative to computing every op once. Published: storing everything and the
greedy heuristic grow linearly with depth; tw-remat grows far less, up to 10 times smaller, at 3 to
4 times the length; k trades one for the other. The order of growth is the exponent b of the best
fit of depth^b to the peaks. Exit code 1 if the shape is not the published one.

    python benchmarks/tw_remat.py [--json FILE] [--plot FILE] [--quick]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import write_results
from remat_graph import Graph, Op, Stage, Value, simulate
from remat_solvers import store_all
from remat_solvers.core.wiring import Wiring, expand
from remat_solvers.published.baselines.xla_greedy import greedy_sequence
from remat_solvers.published.decompositions.decomposition import Precedence
from remat_solvers.published.decompositions.pw_remat import PathRecursion
from remat_solvers.published.decompositions.recursion import Recursion, playable
from remat_solvers.published.decompositions.tw_remat import TreeRecursion

DEPTHS = {"feed-forward": (10, 20, 30, 40, 50, 60, 70, 80, 90, 100), "residual": (8, 16, 33, 50)}
RECURSIONS: dict[str, Callable[[Precedence], Recursion]] = {
    "tw-remat": TreeRecursion,
    "pw-remat": PathRecursion,
}
SOLVERS = ("store-all", "xla-greedy", *RECURSIONS)
GREEDY_LIMITS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LINEAR_FROM, SUBLINEAR_TO = 0.85, 0.5
MOST_LENGTHS = {"feed-forward": 6.0, "residual": 10.0}


def main() -> int:
    """Measure, print, plot and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a PNG here")
    parser.add_argument("--quick", action="store_true", help="three of the smaller depths alone")
    options = parser.parse_args()
    started = time.perf_counter()
    points: list[dict[str, Any]] = []
    print(f"{'network':14}{'depth':>6}{'ops':>6}  {'solver':12}{'k':>5}{'width':>7}{'peak':>7}"
          f"{'length':>8}{'seconds':>9}")  # fmt: skip
    for network, all_depths in DEPTHS.items():
        depths = all_depths[1:4] if options.quick else all_depths
        for depth in depths:
            for point in measure(network, depth, sweep=depth == depths[-1]):
                points.append(point)
                if point["k"] in (None, 1):
                    show(point)
    print("\nmemory against length")
    for point in points:
        if point["depth"] == DEPTHS[point["network"]][-1] and point["k"] is not None:
            show(point)
    growths = list(orders_of_growth(points))
    print()
    for growth in growths:
        print(f"{growth['network']:14}{growth['solver']:12} peak grows as depth^"
              f"{growth['exponent']:.2f}, at last {growth['saving']:.1f} times below store-all, "
              f"length up to {growth['length']:.1f}")  # fmt: skip
    failed = [growth for growth in growths if not as_published(growth)]
    print(f"\n{len(failed)} of {len(growths)} not of the published shape; "
          f"{time.perf_counter() - started:.0f} s")  # fmt: skip
    if options.plot:
        plot(options.plot, points)
    if options.json:
        write_results(options.json, {"points": points, "growth": growths}, ("remat-solvers",))
    return int(bool(failed))


def measure(network: str, depth: int, *, sweep: bool) -> Iterable[dict[str, Any]]:
    """Run every solver for the least memory; with `sweep`, the recursions at many k too."""
    graph = NETWORKS[network](depth)
    wiring = Wiring.of(graph)
    stored = simulate(graph, store_all(graph))
    common = {"network": network, "depth": depth, "ops": len(graph.ops), "k": None, "width": None}
    yield {**common, "solver": "store-all", "peak": stored.peak_bytes, "length": 1.0, "seconds": 0}
    start = time.perf_counter()
    limits = [int(share * stored.peak_bytes) for share in GREEDY_LIMITS]
    tries = [simulate(graph, expand(wiring, greedy_sequence(wiring, limit))) for limit in limits]
    best = min(tries, key=lambda timeline: (timeline.peak_bytes, timeline.time))
    yield {
        **common,
        "solver": "xla-greedy",
        "peak": best.peak_bytes,
        "length": best.time / graph.time,
        "seconds": time.perf_counter() - start,
    }
    for name, make in RECURSIONS.items():
        start = time.perf_counter()
        recursion = make(Precedence.of(wiring))
        cuts = sorted({1, *(recursion.bag_count // 2**i for i in range(8))}) if sweep else [1]
        for k in [*cuts, recursion.bag_count + 1] if sweep else cuts:
            order = recursion.order(k, 100 * len(graph.ops))
            if order is None:
                continue
            timeline = simulate(graph, expand(wiring, playable(wiring, order)))
            yield {
                **common,
                "solver": name,
                "k": k,
                "width": recursion.width,
                "peak": timeline.peak_bytes,
                "length": timeline.time / graph.time,
                "seconds": time.perf_counter() - start,
            }
            start = time.perf_counter()


def show(point: dict[str, Any]) -> None:
    """Print one line of the table."""
    k, width = ("" if point[key] is None else point[key] for key in ("k", "width"))
    print(f"{point['network']:14}{point['depth']:>6}{point['ops']:>6}  {point['solver']:12}{k:>5}"
          f"{width:>7}{point['peak']:>7}{point['length']:>8.2f}{point['seconds']:>9.2f}",
          flush=True)  # fmt: skip


def orders_of_growth(points: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Fit peak = a * depth^b by least squares of the logarithms."""
    for network in DEPTHS:
        for solver in SOLVERS:
            line = [p for p in of(points, network, solver) if p["k"] in (None, 1)]
            x = [math.log(p["depth"]) for p in line]
            y = [math.log(p["peak"]) for p in line]
            mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
            above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
            yield {
                "network": network,
                "solver": solver,
                "exponent": above / sum((a - mean_x) ** 2 for a in x),
                "saving": of(points, network, "store-all")[-1]["peak"] / line[-1]["peak"],
                "length": max(p["length"] for p in line),
            }


def as_published(growth: dict[str, Any]) -> bool:
    """Say whether a line of the figures has the published shape."""
    if growth["solver"] in RECURSIONS:
        short = growth["length"] <= MOST_LENGTHS[growth["network"]]
        return bool(growth["exponent"] <= SUBLINEAR_TO and short)
    return bool(growth["exponent"] >= LINEAR_FROM)


def of(points: list[dict[str, Any]], network: str, solver: str) -> list[dict[str, Any]]:
    """Select the points of a solver on a network, by depth."""
    return [p for p in points if p["network"] == network and p["solver"] == solver]


@dataclass
class Layers:
    """Writes a training graph: forward ops, each with the backward ops to come, all of one unit."""

    values: list[Value] = field(default_factory=lambda: [Value("x", 1)])
    ops: list[Op] = field(default_factory=list)
    rules: list[Callable[[], None]] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    updates: set[str] = field(default_factory=set)

    def op(self, name: str, inputs: tuple[str, ...], twin: str | None = None, size: int = 1) -> str:
        """Add an op that makes the value of its name."""
        self.values.append(Value(name, size))
        stage = Stage.BACKWARD if self.gradients else Stage.FORWARD
        self.ops.append(Op(name, inputs, (name,), 1.0, stage=stage, twin=twin))
        return name

    def give(self, value: str, gradient: str, twin: str) -> None:
        """Add to the gradient of a value, by an op of its own if there is one already."""
        if value in self.gradients:
            both = (self.gradients[value], gradient)
            gradient = self.op(f"{gradient}.sum", both, twin)
        self.gradients[value] = gradient

    def weighted(self, name: str, x: str) -> str:
        """Add a product or convolution: its weight's gradient needs the input."""
        y = self.op(name, (x,))

        def back() -> None:
            g = self.gradients[y]
            self.updates.add(self.op(f"{name}.weight", (g, x), name, size=0))
            if x != "x":
                self.give(x, self.op(f"{name}.back", (g,), name), name)

        self.rules.append(back)
        return y

    def elementwise(self, name: str, x: str) -> str:
        """Add an activation or normalisation: its gradient needs the input."""
        y = self.op(name, (x,))
        self.rules.append(
            lambda: self.give(x, self.op(f"{name}.back", (self.gradients[y], x), name), name)
        )
        return y

    def add(self, name: str, a: str, b: str) -> str:
        """Add two values: their gradients are that of the sum."""
        y = self.op(name, (a, b))

        def back() -> None:
            self.give(a, self.gradients[y], name)
            self.give(b, self.gradients[y], name)

        self.rules.append(back)
        return y

    def finish(self, y: str) -> Graph:
        """Add a loss and all backward ops."""
        self.op("loss", (y,))
        self.values.append(Value("loss.back", 1))
        self.ops.append(
            Op("loss.back", (y,), ("loss.back",), 1.0, stage=Stage.BACKWARD, twin="loss")
        )
        self.gradients[y] = "loss.back"
        for rule in reversed(self.rules):
            rule()
        return Graph(
            tuple(self.values),
            tuple(self.ops),
            frozenset({"x"}),
            frozenset({"loss", *self.updates}),
            "loss.back",
        )


def feed_forward(depth: int) -> Graph:
    """Stack layers of a product and an activation."""
    layers, y = Layers(), "x"
    for i in range(depth):
        y = layers.elementwise(f"relu{i}", layers.weighted(f"product{i}", y))
    return layers.finish(y)


def residual(depth: int) -> Graph:
    """Stack blocks of two convolutions with normalisation, each added to its input."""
    layers = Layers()
    y = layers.weighted("stem", "x")
    for i in range(depth):
        z = y
        for half in "ab":
            z = layers.elementwise(f"norm{i}{half}", layers.weighted(f"conv{i}{half}", z))
            z = layers.elementwise(f"relu{i}{half}", z) if half == "a" else z
        y = layers.elementwise(f"relu{i}", layers.add(f"add{i}", y, z))
    return layers.finish(y)


NETWORKS: dict[str, Callable[[int], Graph]] = {"feed-forward": feed_forward, "residual": residual}


def plot(path: Path, points: list[dict[str, Any]]) -> None:
    """Draw peak and length against depth, and memory against length over k."""
    import matplotlib as mpl  # noqa: PLC0415 - only for the plot

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    colours = dict(zip(SOLVERS, ("0.5", "tab:orange", "tab:blue", "tab:green"), strict=True))
    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.5), layout="constrained")
    for row, network in zip(axes, DEPTHS, strict=True):
        peak, length, trade = row
        for solver in SOLVERS:
            line = [p for p in of(points, network, solver) if p["k"] in (None, 1)]
            depths, style = [p["depth"] for p in line], {"color": colours[solver], "marker": "."}
            peak.plot(depths, [p["peak"] for p in line], label=solver, **style)
            length.plot(depths, [p["length"] for p in line], label=solver, **style)
            last = [p for p in of(points, network, solver) if p["depth"] == DEPTHS[network][-1]]
            last.sort(key=lambda p: p["length"])
            trade.plot([p["length"] for p in last], [p["peak"] for p in last], **style)
        peak.set(
            xlabel="depth", ylabel="peak [units]", title=f"{network}: peak, k = 1", ylim=(0, None)
        )
        length.set(xlabel="depth", ylabel="length [of computing once]", ylim=(0, None),
                   title=f"{network}: length, k = 1")  # fmt: skip
        trade.set(xlabel="length [of computing once]", ylabel="peak [units]", ylim=(0, None),
                  title=f"{network}, depth {DEPTHS[network][-1]}: k varied")  # fmt: skip
        peak.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())

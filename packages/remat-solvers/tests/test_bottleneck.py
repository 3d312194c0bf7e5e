from hypothesis import HealthCheck, given, settings
from solver_cases.random_graphs import graphs, trainings
from solver_cases.smallest_budgets import smallest
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Value
from remat_solvers.bounds.bottleneck import bottleneck
from remat_solvers.bounds.peak import peak_bound
from remat_solvers.core.wiring import Wiring

thorough = settings(max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(graphs())
def test_no_random_graph_goes_below_the_bound(graph):
    assert bottleneck(Wiring.of(graph)).peak_bytes <= smallest(graph)


@thorough
@given(trainings())
def test_no_training_goes_below_the_bound(graph):
    assert bottleneck(Wiring.of(graph)).peak_bytes <= smallest(graph)


@thorough
@given(graphs(most_ops=7, most_values=9))
def test_stopped_early_the_bound_still_holds_and_is_never_below_the_plain_one(graph):
    wiring = Wiring.of(graph)
    stopped = bottleneck(wiring, deadline=0.0).peak_bytes
    assert peak_bound(wiring).peak_bytes <= stopped <= bottleneck(wiring).peak_bytes


def two_heavy_gradients() -> Graph:
    """Two results, each after a large op of its own: the other is there, or its large input."""
    values = [Value("x", 1)]
    ops = []
    for i in range(2):
        values += [Value(f"big{i}", 50), Value(f"mid{i}", 20), Value(f"w{i}", 10)]
        ops += [
            Op(f"make{i}", ("x",), (f"big{i}",), 1.0),
            Op(f"shrink{i}", (f"big{i}",), (f"mid{i}",), 1.0),
            Op(f"result{i}", (f"mid{i}",), (f"w{i}",), 1.0),
        ]
    return Graph(tuple(values), tuple(ops), frozenset({"x"}), frozenset({"w0", "w1"}), None)


def test_results_of_earlier_large_ops_count():
    graph = two_heavy_gradients()
    assert peak_bound(Wiring.of(graph)).peak_bytes == 70
    found = bottleneck(Wiring.of(graph))
    assert found.peak_bytes == 80 == smallest(graph)
    assert found.op in {"shrink0", "shrink1"}


def test_a_last_run_is_of_use_so_what_is_read_beside_its_output_counts():
    values = (Value("x", 1), Value("grad", 30), Value("wide", 60), Value("sum", 1))
    ops = (
        Op("begin", ("x",), ("grad",), 1.0, workspace_bytes=90),
        Op("widen", ("x",), ("wide",), 1.0, workspace_bytes=40),
        Op("add", ("grad", "wide"), ("sum",), 1.0),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"sum"}), None)
    assert bottleneck(Wiring.of(graph)).peak_bytes == 130 == smallest(graph)


def test_what_the_last_run_reads_and_must_not_overwrite_counts_beside_what_it_makes():
    values = (Value("x", 1), Value("small", 1), Value("read", 60), Value("made", 60))
    ops = (
        Op("begin", ("x",), ("small",), 1.0),
        Op("make", ("x",), ("read",), 1.0, workspace_bytes=50),
        Op("follow", ("read",), ("made",), 1.0, workspace_bytes=50, overwrites=(("read", "made"),)),
    )
    graph = Graph(values, ops, frozenset({"x"}), frozenset({"small", "read", "made"}), None)
    assert peak_bound(Wiring.of(graph)).peak_bytes == 121
    assert bottleneck(Wiring.of(graph)).peak_bytes == 170 == smallest(graph)


def test_sizes_beyond_32_bits_are_rounded_down():
    graph = gpt2(layers=2)
    scale = 1 << 24
    large = Graph(
        tuple(Value(v.name, v.size_bytes * scale) for v in graph.values),
        tuple(
            Op(
                op.name, op.inputs, op.outputs, op.time, op.workspace_bytes * scale,
                op.stage, op.twin, op.equivalence, op.replayable, op.order_after,
            )
            for op in graph.ops
        ),
        graph.resident,
        graph.results,
        graph.boundary,
    )  # fmt: skip
    exact = bottleneck(Wiring.of(graph)).peak_bytes * scale
    assert 0.999 * exact <= bottleneck(Wiring.of(large)).peak_bytes <= exact

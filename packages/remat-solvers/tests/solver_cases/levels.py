"""What the tests of blocks and levels share."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from remat_solvers.core.wiring import Wiring
from solver_cases.random_graphs import graphs, trainings
from solver_cases.random_hierarchies import branching, nested

thorough = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
any_graph = st.one_of(branching(), branching(most_ops=9), trainings(), graphs())
hierarchies = any_graph.flatmap(nested)


@st.composite
def runs(draw):
    """A stretch of ops in order, some of them run again in it, and some values at its border."""
    graph = draw(st.one_of(branching(most_ops=8), graphs(most_ops=10, most_values=16)))
    wiring = Wiring.of(graph)
    first = draw(st.integers(0, wiring.op_count - 1))
    ops: list[int] = []
    for op in range(first, draw(st.integers(first + 1, wiring.op_count))):
        ops += [i for i in range(first, op) if wiring.replayable_list[i] and draw(st.booleans())]
        ops.append(op)
    made = sorted({v for op in ops for v in wiring.outputs[op]})
    leaving = draw(st.sets(st.sampled_from(made))) if made else set()
    saved = {v for v in made if v not in leaving and draw(st.booleans())}
    return wiring, ops, leaving, saved

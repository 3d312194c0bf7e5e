"""A block as a training graph of its own: its two halves, and what happens elsewhere in between.

Between the forward and the backward half of a block the rest of the step runs: it reads the outputs
of the block and makes the gradients that enter it. In the closed graph one op stands for all of
that (HiRemate, B.2, calls it the loss node of a subgraph). Any solver can schedule a closed graph;
what it keeps while that op runs is what the block keeps between its halves, and giving the op a
workspace is a budget of its own for that. What does not depend on that op, or it on what, is put
before or after it by order alone, so that in every schedule it parts the two halves.
"""

from __future__ import annotations

import dataclasses

from remat_graph import Graph, Op, Stage, Subgraph

__all__ = ["close"]


def close(subgraph: Subgraph, *, withheld_bytes: int = 0) -> Graph:
    """Put an op for the rest of the step between the halves; position `len(subgraph.forward)`.

    Inputs stay resident: who holds them is decided elsewhere. Outputs need only be there when the
    rest of the step runs, unless the user wants them. `withheld_bytes` are taken from the budget
    then.
    """
    own = subgraph.graph
    name = "elsewhere"
    while name in own.op_index:
        name += "'"
    elsewhere = Op(
        name=name,
        inputs=subgraph.outputs,
        outputs=subgraph.gradients_in,
        time=0.0,
        workspace_bytes=withheld_bytes,
        stage=Stage.BACKWARD,
        replayable=False,
        order_after=_ends(subgraph),
    )
    wanted = zip((*subgraph.outputs, *subgraph.gradients_out), subgraph.readers, strict=True)
    results = {v for v, (_, _, user) in wanted if user} | set(subgraph.gradients_out)
    return Graph(
        values=own.values,
        ops=(*subgraph.forward, elsewhere, *_after(name, subgraph)),
        resident=own.resident.difference(subgraph.gradients_in),
        results=frozenset(results | (own.results & own.resident)),
        boundary=name,
    )


def _ends(subgraph: Subgraph) -> tuple[str, ...]:
    """List the forward ops of which neither a forward op nor the rest of the step reads."""
    read = {v for op in subgraph.forward for v in op.inputs}.union(subgraph.outputs)
    return tuple(op.name for op in subgraph.forward if not read.intersection(op.outputs))


def _after(elsewhere: str, subgraph: Subgraph) -> tuple[Op, ...]:
    """Put the backward ops that read nothing of others, or of gradients, after the rest."""
    later: list[Op] = []
    available = set(subgraph.gradients_in)
    for op in subgraph.backward:
        after = () if available.intersection(op.inputs) else (elsewhere,)
        later.append(dataclasses.replace(op, order_after=(*op.order_after, *after)))
        available.update(op.outputs)
    return tuple(later)

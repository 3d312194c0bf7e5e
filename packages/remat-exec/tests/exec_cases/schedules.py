"""Random legal schedules: values are evicted anywhere and made again when something reads them."""

from remat_graph import Compute, Free, Schedule, simulate


def random_schedule(graph, random):
    """Compute every op in order; evict and recompute at random what can be computed again."""
    steps = []
    alive = set()
    share = random.choice([0.1, 0.4, 0.9])
    uses = {}
    for position, op in enumerate(graph.ops):
        uses.update(dict.fromkeys(op.inputs, position))

    def maker(value):
        return graph.ops[graph.producer[value]]

    def compute(op):
        for value in op.inputs:
            if value not in alive and value not in graph.resident:
                compute(maker(value))
        steps.append(Compute(op.name))
        alive.update(op.outputs)

    def free(value):
        steps.append(Free(value))
        alive.remove(value)

    for position, op in enumerate(graph.ops):
        compute(op)
        for value in sorted(alive):
            again = maker(value).replayable
            finished = value not in graph.results and uses.get(value, -1) <= position
            if (again and random.random() < share) or (finished and again):
                free(value)
    for value in sorted(graph.results - graph.resident - alive):
        compute(maker(value))
    for value in sorted(alive - graph.results):
        free(value)
    schedule = Schedule(tuple(steps))
    simulate(graph, schedule)
    return schedule

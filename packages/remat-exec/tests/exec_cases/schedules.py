"""Random legal schedules: values are evicted anywhere and made again when something reads them.

Where a graph has alternatives, any of them is run instead of an op, or beside it, or to make again
what was evicted; what packs runs or not. Beside them one that keeps all that it can in 16 bits.
"""

from remat_graph import Compute, Free, Schedule, simulate


def random_schedule(graph, random):
    """Compute every op in order; evict and recompute at random what can be computed again."""
    steps = []
    alive = set()
    done = set()
    share = random.choice([0.1, 0.4, 0.9])
    others = random.choice([0.1, 0.5, 0.9])
    uses = {}
    for position, op in enumerate(graph.ops):
        uses.update(dict.fromkeys(op.inputs, position))

    def producer(value):
        return graph.ops[graph.producer[value]]

    def ready(op):
        there = all(value in alive or value in graph.resident for value in op.inputs)
        return op.replayable and there and done.issuperset(op.order_after)

    def maker(value):
        first, *rest = (graph.ops[index] for index in graph.makers[value])
        rest = [op for op in rest if ready(op)]
        return random.choice(rest) if rest and random.random() < others else first

    def compute(op):
        for value in op.inputs:
            if value not in alive and value not in graph.resident:
                compute(maker(value))
        steps.append(Compute(op.name))
        done.add(op.name)
        alive.update(op.outputs)

    def alternatives(op):
        """Draw alternatives that make all that an op makes, if there are any."""
        found = []
        if not op.replayable or not op.outputs or random.random() >= others:
            return found
        for value in op.outputs:
            if not any(value in other.outputs for other in found):
                rest = [graph.ops[index] for index in graph.makers[value][1:]]
                rest = [other for other in rest if done.issuperset(other.order_after)]
                if not rest:
                    return []
                found.append(random.choice(rest))
        return found if op.stage == "backward" else []

    def run(op):
        if op.owed:
            for instead in alternatives(op) or [op]:
                compute(instead)
        elif ready(op) and random.random() < others:
            compute(op)

    def free(value):
        steps.append(Free(value))
        alive.remove(value)

    for position, op in enumerate(graph.ops):
        run(op)
        for value in sorted(alive):
            again = producer(value).replayable
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


def halved_schedule(graph):
    """Keep in 16 bits, for the backward, whatever has such a copy; make nothing else again."""
    single = {op.outputs[0]: op for op in graph.ops if op.name.endswith("__single")}
    order = []
    for op in graph.ops:
        if op.owed and op.stage == "backward":
            order += [single.pop(value) for value in op.inputs if value in single]
        if op.owed or op.name.endswith("__half"):
            order.append(op)
    return _freed_at_once(graph, order)


def again_in_the_backward(graph, values):
    """Make these values a second time, where the backward first reads them; free each at once."""
    order, late = [], set(values)
    for op in graph.ops:
        if op.stage == "backward":
            order += [graph.ops[graph.producer[value]] for value in op.inputs if value in late]
            late -= {*op.inputs}
        order.append(op)
    return _freed_at_once(graph, order)


def _freed_at_once(graph, order):
    """Compute ops in this order, and free each value behind what reads it last."""
    needed, steps = set(graph.results), []
    for op in reversed(order):
        reads = [value for value in op.inputs if value not in graph.resident]
        dead = dict.fromkeys(v for v in (*op.outputs, *reads) if v not in needed)
        steps += [*map(Free, dead), Compute(op.name)]
        needed = (needed - {*op.outputs}) | {*reads}
    schedule = Schedule(tuple(reversed(steps)))
    simulate(graph, schedule)
    return schedule


def replay_of(case, target):
    """Store everything, but compute the ops of this operator a second time before the backward."""
    graph, calls = case.captured.graph, case.captured.program.calls
    again = [op for op in graph.ops if op.name in calls and target in str(calls[op.name].target)]
    again = [op for op in again if op.replayable and op.stage == "forward"]
    assert again
    steps = []
    for step in case.store_all:
        if step == Compute("loss"):
            steps += [Compute(op.name) for op in again]
        steps.append(step)
    return Schedule(_legal(graph, steps, again))


def _legal(graph, steps, again):
    """Keep what the second run reads and makes alive until then."""
    last = max(i for i, step in enumerate(steps) if step == Compute(again[-1].name))
    held = {v for op in again for v in (*op.inputs, *op.outputs)} - graph.resident
    late = [Free(v) for v in held if Free(v) in steps[:last]]
    early = [s for s in steps[: last + 1] if s not in late]
    return (*early, *late, *steps[last + 1 :])

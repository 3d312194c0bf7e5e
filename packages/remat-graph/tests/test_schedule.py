"""The simulator against a naive reference that looks everything up in the history of the steps."""

import copy
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import (
    Compute,
    Free,
    Graph,
    InvalidSchedule,
    Op,
    Schedule,
    Solution,
    Status,
    Value,
    simulate,
)


class Illegal(Exception):
    """The reference refuses a schedule at `step`; `None` is the end."""

    def __init__(self, step):
        super().__init__(step)
        self.step = step


def reference(graph, steps):
    """Peak, time and memory by definition: what is alive is read off the history, at every step."""
    ops = {op.name: op for op in graph.ops}
    sizes = {v.name: v.size_bytes for v in graph.values}

    def alive(history):
        found = set()
        for past in history:
            if isinstance(past, Free):
                found -= {past.value}
            else:
                found |= set(ops[past.op].outputs)
        return found

    def ever_made(history):
        runs = [ops[step.op].outputs for step in history if isinstance(step, Compute)]
        return {v for outputs in runs for v in outputs}

    def is_done(name, history):
        outputs = set(ops[name].outputs)
        return Compute(name) in history or (bool(outputs) and outputs <= ever_made(history))

    def held(names):
        return sum(sizes[v] for v in names)

    def counted_twice(steps, i, past):
        """What is not freed yet, but before the next computation, and has been overwritten."""
        at = max((j for j in range(i + 1) if isinstance(steps[j], Compute)), default=None)
        if at is None:
            return set()
        stop = next((j for j in range(at + 1, len(steps)) if isinstance(steps[j], Compute)), None)
        freed = {step.value for step in steps[at + 1 : stop]}
        gone = {step.value for step in past[at + 1 :]}
        return {read for read, _ in ops[steps[at].op].overwrites if read in freed - gone}

    during, after = [], []
    for i, step in enumerate(steps):
        history = steps[:i]
        before = alive(history)
        if isinstance(step, Free):
            if step.value not in before:
                raise Illegal(i)
            during.append(held(before))
        else:
            if step.op not in ops:
                raise Illegal(i)
            op = ops[step.op]
            first_run = step not in history
            anew = first_run and not set(op.outputs) & ever_made(history)
            legal = (
                set(op.inputs) <= before | graph.resident
                and (op.replayable or anew)
                and (not first_run or all(is_done(o, history) for o in op.order_after))
            )
            if not legal:
                raise Illegal(i)
            during.append(held(before) + held(op.outputs) + op.workspace_bytes)
        during[-1] -= held(counted_twice(steps, i, steps[:i]))
        after.append(held(alive(steps[: i + 1])))
        after[-1] -= held(counted_twice(steps, i, steps[: i + 1]))
    once = [op.name for op in graph.ops if not op.replayable and op.owed]
    done = all(is_done(name, steps) for name in once)
    if not graph.results <= alive(steps) | graph.resident or not done:
        raise Illegal(None)
    time = math.fsum(ops[s.op].time for s in steps if isinstance(s, Compute))
    return time, tuple(during), tuple(after)


def verdict(judge):
    """The answer of a simulator, or the step at which it refuses."""
    try:
        return judge(), None
    except (Illegal, InvalidSchedule) as error:
        return None, ("refused", error.step)


def same_verdict(graph, steps):
    """Assert that both agree on legality, step and figures; return whether it is legal."""
    expected, expected_refusal = verdict(lambda: reference(graph, steps))
    timeline, refusal = verdict(lambda: simulate(graph, Schedule(tuple(steps))))
    assert refusal == expected_refusal
    if expected is None:
        return False
    time, during, after = expected
    assert timeline.time == time
    assert timeline.during_bytes == during
    assert timeline.after_bytes == after
    assert timeline.peak_bytes == max(during, default=0)
    if during:
        assert during[timeline.peak_step] == timeline.peak_bytes
        assert max(during[: timeline.peak_step], default=-1) < timeline.peak_bytes
    else:
        assert timeline.peak_step == -1
    return True


@settings(max_examples=150)
@given(data=st.data())
def test_agrees_with_the_reference_on_any_steps(any_graphs, data):
    graph = data.draw(any_graphs())
    computes = st.sampled_from([*(op.name for op in graph.ops), "unknown"]).map(Compute)
    frees = st.sampled_from([*(v.name for v in graph.values), "unknown"]).map(Free)
    same_verdict(graph, data.draw(st.lists(computes | frees, max_size=8)))


@settings(max_examples=150)
@given(data=st.data())
def test_agrees_with_the_reference_on_mostly_legal_steps(any_graphs, data):
    """Moves that are legal by the reference, so that replays and frees get far; a few are not."""
    graph = data.draw(any_graphs())
    moves = [Compute(op.name) for op in graph.ops]
    moves += [Free(v.name) for v in graph.values]
    ending = [Compute(op.name) for op in graph.ops]
    steps = []
    for _ in range(data.draw(st.integers(0, 25)) if moves else 0):
        step = data.draw(st.sampled_from(moves))
        if legal_prefix(graph, [*steps, step]) or data.draw(st.integers(0, 19)) == 0:
            steps.append(step)
    if data.draw(st.booleans()):
        for step in ending:
            if legal_prefix(graph, [*steps, step]):
                steps.append(step)
    same_verdict(graph, steps)


def legal_prefix(graph, steps):
    try:
        reference(graph, steps)
    except Illegal as error:
        return error.step is None
    return True


@settings(max_examples=200)
@given(data=st.data())
def test_every_op_in_order_is_legal_and_freeing_only_lowers_memory(graphs, data):
    graph = data.draw(graphs())
    keep_all = [Compute(op.name) for op in graph.ops]
    assert same_verdict(graph, keep_all)
    last_use = {v: max(uses) for v, uses in graph.consumers.items() if uses}
    steps = []
    for i, op in enumerate(graph.ops):
        steps.append(Compute(op.name))
        dying = {
            v for v in (*op.inputs, *op.outputs) if last_use.get(v, graph.producer.get(v)) == i
        }
        steps += [Free(v) for v in sorted(dying - graph.results - graph.resident)]
    assert same_verdict(graph, steps)
    timeline, all_kept = (simulate(graph, Schedule(tuple(s))) for s in (steps, keep_all))
    assert timeline.peak_bytes <= all_kept.peak_bytes
    assert timeline.time == all_kept.time == graph.time
    assert timeline.after_bytes[-1:] in [
        (),
        (sum(graph.value_by_name[v].size_bytes for v in graph.results - graph.resident),),
    ]


def test_a_replay_of_several_outputs_holds_both_copies():
    """Checked by hand: x=2 and y=3 alive, y freed, both made again while the old x is held."""
    graph = Graph((Value("x", 2), Value("y", 3)), (Op("make", (), ("x", "y"), 1.0, 10),))
    steps = (Compute("make"), Free("y"), Compute("make"))
    timeline = simulate(graph, Schedule(steps))
    assert timeline.during_bytes == (15, 5, 2 + 5 + 10)
    assert timeline.after_bytes == (5, 2, 5)
    assert (timeline.peak_bytes, timeline.peak_step, timeline.time) == (17, 2, 2.0)


def test_a_step_checked_by_hand(diamond):
    steps = [Compute(op.name) for op in diamond.ops]
    steps.insert(4, Free("loss"))
    steps.insert(5, Compute("L"))
    timeline = simulate(diamond, Schedule(tuple(steps)))
    assert timeline.during_bytes == (9, 8, 17, 11, 11, 11, 16, 117)
    assert timeline.after_bytes == (4, 8, 10, 11, 10, 11, 16, 116)
    assert timeline.peak_step == 7
    assert timeline.time == 9.5


@pytest.mark.parametrize(
    ("steps", "match", "step"),
    [
        ("Z", "step 0: computes 'Z', which is no op of the graph", 0),
        ("A -z", "step 1: frees 'z', which is no value of the graph", 1),
        ("A -w", "step 1: frees 'w', which is resident", 1),
        ("A -b", "step 1: frees 'b', which is not alive", 1),
        ("A -a -a", "step 2: frees 'a', which is not alive", 2),
        ("B", "step 0: computes 'B' while its input 'a' is not alive", 0),
        ("A B -a B", "step 3: computes 'B' while its input 'a' is not alive", 3),
        ("A B C C", "step 3: computes 'C' again, which is not replayable", 3),
        ("A C", "step 1: computes 'C' before 'B', after which it must come", 1),
        ("A B C L dL", "result 'dw' is not alive at the end", None),
        ("A B C L dL dA -loss", "result 'loss' is not alive at the end", None),
    ],
)
def test_refuses(diamond, steps, match, step):
    parsed = tuple(Free(s[1:]) if s[0] == "-" else Compute(s) for s in steps.split())
    with pytest.raises(InvalidSchedule, match=match) as caught:
        simulate(diamond, Schedule(parsed))
    assert caught.value.step == step


def test_an_op_that_is_not_replayable_must_run():
    graph = Graph((), (Op("all_reduce", (), (), 1.0, replayable=False),))
    with pytest.raises(InvalidSchedule, match="'all_reduce' is not replayable and is never"):
        simulate(graph, Schedule(()))
    simulate(graph, Schedule((Compute("all_reduce"),)))


def test_a_result_may_be_resident():
    graph = Graph((Value("w", 5),), (), resident=frozenset("w"), results=frozenset("w"))
    assert simulate(graph, Schedule(())).peak_bytes == 0


def test_soft_order_is_about_the_first_run_only(diamond):
    steps = ["A", "B", "C", "-b", "-stats", "B", "L", "dL", "dA"]
    parsed = tuple(Free(s[1:]) if s[0] == "-" else Compute(s) for s in steps)
    assert simulate(diamond, Schedule(parsed)).time == 11.0


def test_a_schedule_is_a_sequence_of_steps():
    steps = (Compute("a"), Free("b"))
    assert len(Schedule(steps)) == 2
    assert tuple(Schedule(steps)) == steps


@pytest.mark.parametrize(
    ("time", "bound", "gap"),
    [(11.0, 10.0, 0.1), (10.0, 10.0, 0.0), (9.0, 10.0, 0.0), (1.0, 0.0, math.inf),
     (0.0, 0.0, 0.0), (1.0, None, None)],
)  # fmt: skip
def test_gap(time, bound, gap):
    solution = Solution(Status.FEASIBLE, Schedule(()), time, 0, bound, "s", 0.0)
    assert solution.gap == pytest.approx(gap)


def test_no_schedule_has_no_gap():
    assert Solution(Status.LIMIT, None, 0.0, 0, 1.0, "s", 0.0).gap is None


def test_the_example_of_the_readme(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    example = readme.split("```python")[1].split("```")[0]
    exec(example, {})
    assert capsys.readouterr().out.strip() == example.rpartition("#")[2].strip()


def test_the_hash_of_a_schedule_is_kept_in_its_own_process():
    schedule, same = (Schedule((Compute("a"), Free("x"))) for _ in range(2))
    assert {schedule: "code"}[same] == "code"
    assert schedule != Schedule((Compute("a"),))
    for again in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert again == schedule
        assert again._hash is None  # names have other hashes in another process
        assert hash(again) == hash(schedule)

"""Several programs for one budget: which of them are solved fully, and the bound of all."""

from dataclasses import dataclass

import pytest

from remat.planning import solving
from remat.planning.slices import SlicedPrograms
from remat_graph import Graph, Op, Schedule, Solution, Status, Value
from remat_solvers import BudgetTooSmall


@dataclass(frozen=True)
class Program:
    """Stands in for a capture; its one op takes `least` seconds."""

    name: str
    least: float
    laid_out: tuple[int, ...] = ()

    @property
    def graph(self):
        op = Op(self.name, (), ("v",), time=self.least)
        return Graph(values=(Value("v", 1),), ops=(op,), results=frozenset({"v"}))


def solved(time, bound, status=Status.FEASIBLE):
    return Solution(status, Schedule(()), time, 1, bound, "stand-in", 0.0)


def too_small(smallest, status=Status.INFEASIBLE):
    return BudgetTooSmall(1, smallest, 1, "an op", status)


class Answers:
    """Answers by the name of a program, and a note of what was asked."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []
        self.started = {}

    def __call__(self, graph, start=None):
        name = graph.ops[0].name
        self.asked.append(name)
        self.started[name] = start
        answer = self.answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def programs(monkeypatch):
    first, *others = [Program(name, least) for name, least in zip("abcd", range(1, 5), strict=True)]
    groups = [SlicedPrograms((each,), each.graph) for each in others]
    monkeypatch.setattr(solving, "programs_by_cuts", lambda *_: groups)
    monkeypatch.setattr(solving, "whole_programs", lambda program: [program])
    return first


def test_only_what_may_be_faster_is_solved_fully(programs):
    briefly = Answers(
        a=too_small(9), b=solved(8.0, 5.5), c=solved(7.0, 4.5), d=too_small(5, Status.LIMIT)
    )
    fully = Answers(c=solved(5.0, 4.8), b=solved(6.0, 5.9), d=solved(4.9, 4.9, Status.OPTIMAL))
    best, solution = solving.solved_in_best_program(programs, 1, fully, briefly)
    assert briefly.asked == ["a", "b", "c", "d"]
    assert fully.asked == ["d", "c"]  # b takes 5.5 at least
    assert fully.started == {"d": None, "c": Schedule(())}
    assert (best.name, solution.time) == ("d", 4.9)
    assert (solution.lower_bound, solution.status) == (4.8, Status.FEASIBLE)


def test_a_brief_answer_is_kept_where_more_time_gives_a_worse_one(programs):
    briefly = Answers(a=solved(3.0, 1.5), b=solved(9.0, 4.0))
    fully = Answers(a=solved(3.5, 1.2))
    best, solution = solving.solved_in_best_program(programs, 1, fully, briefly)
    assert briefly.asked == ["a", "b"]
    assert fully.asked == ["a"]
    assert (best.name, solution.time, solution.lower_bound) == ("a", 3.0, 1.5)


def test_the_budget_is_too_small_if_it_is_for_all(programs):
    briefly = Answers(a=too_small(9), b=too_small(8), c=too_small(4, Status.LIMIT), d=too_small(7))
    fully = Answers(c=too_small(6))
    with pytest.raises(BudgetTooSmall) as refused:
        solving.solved_in_best_program(programs, 1, fully, briefly)
    assert fully.asked == ["c"]
    assert refused.value.smallest_bytes == 6
    assert refused.value.status is Status.INFEASIBLE


def test_what_gives_way_is_not_looked_for_long(programs):
    briefly = Answers(a=too_small(9), b=too_small(8), c=too_small(4, Status.LIMIT), d=too_small(7))
    fully = Answers()
    with pytest.raises(BudgetTooSmall) as refused:
        solving.solved_in_best_program(programs, 1, fully, briefly, gives_way=True)
    assert (fully.asked, refused.value.smallest_bytes) == ([], 4)
    assert refused.value.status is Status.LIMIT


def test_what_gives_way_is_solved_fully_where_something_fits(programs):
    briefly = Answers(a=solved(3.0, 1.5), b=too_small(9))
    fully = Answers(a=solved(2.0, 1.8))
    best, solution = solving.solved_in_best_program(programs, 1, fully, briefly, gives_way=True)
    assert (best.name, solution.time, solution.lower_bound) == ("a", 2.0, 1.8)


def test_a_single_program_that_gives_way(programs, monkeypatch):
    monkeypatch.setattr(solving, "programs_by_cuts", lambda *_: [])
    briefly, fully = Answers(a=too_small(9, Status.LIMIT)), Answers(a=solved(2.0, 1.8))
    with pytest.raises(BudgetTooSmall):
        solving.solved_in_best_program(programs, 1, fully, briefly, gives_way=True)
    assert solving.solved_in_best_program(programs, 1, fully, briefly)[1].time == 2.0
    by_its_name = Answers(a=solved(2.0, None))  # which proves nothing
    _, solution = solving.solved_in_best_program(programs, 1, by_its_name, gives_way=True)
    assert solution.lower_bound is None


def test_the_bound_is_of_all_numbers_of_slices(programs, monkeypatch):
    others = [Program("b", 2.0), Program("c", 3.0)]
    least = Program("least", 1.5).graph
    groups = [SlicedPrograms(tuple(others), least)]
    monkeypatch.setattr(solving, "programs_by_cuts", lambda *_: groups)
    monkeypatch.setattr(solving, "whole_programs", lambda program: [program])
    exact = Status.OPTIMAL
    fully = Answers(a=too_small(9), b=solved(4.0, 4.0, exact), c=solved(5.0, 5.0, exact))
    briefly = Answers(a=too_small(9), b=solved(6.0, 2.5), c=solved(7.0, 4.2), least=solved(4, 3.5))
    best, solution = solving.solved_in_best_program(programs, 1, fully, briefly)
    assert briefly.asked == ["least", "a", "b", "c"]
    assert fully.asked == ["b"]
    assert (best.name, solution.time, solution.status) == ("b", 4.0, Status.FEASIBLE)
    assert solution.lower_bound == 3.5
    _, solution = solving.solved_in_best_program(programs, 1, fully)
    assert (solution.time, solution.lower_bound) == (4.0, 1.5)

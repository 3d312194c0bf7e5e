"""Distributions that declare solvers, made as folders on the import path."""

import dataclasses
import re
import signal
import sys

import pytest
from solver_cases.synthetic import gpt2

from remat_graph import Graph, Op, Value, simulate
from remat_graph.plugins import with_settings
from remat_graph.testing import unit_chain, with_mask
from remat_solvers import (
    BrokenSolver,
    DuplicateSolver,
    InvalidProblem,
    UnknownSolver,
    UnsuitableSolver,
    cite,
    get_solver,
    list_solvers,
    solve,
    store_all,
)
from remat_solvers.core import milp
from remat_solvers.core.store_all import StoreAll
from remat_solvers.published.checkmate import Checkmate, Form
from remat_solvers.published.hierarchical.h_tw_remat import HTWRemat
from remat_solvers.published.hierarchical.hilp import HILP
from remat_solvers.published.hierarchical.hilp.planner import LevelPlanner
from remat_solvers.published.rotor import Rotor
from remat_solvers.refine import Refine
from remat_solvers.registry import resolve_solver

SOLVERS = """
import dataclasses
from remat_graph import Compute, Schedule, Solution, Status
from remat_solvers.core.store_all import StoreAll

class Good(StoreAll):
    name = "good"

class Failing(StoreAll):
    def solve(self, problem, limit, report):
        raise RuntimeError("boom")

class Typeless(StoreAll):
    def solve(self, problem, limit, report):
        return 42

class Illegal(StoreAll):
    def solve(self, problem, limit, report):
        steps = Schedule((Compute(problem.graph.ops[-1].name),))
        return Solution(Status.OPTIMAL, steps, 1.0, 1, None, self.name, 0.0)

class OverBudget(StoreAll):
    def solve(self, problem, limit, report):
        roomy = dataclasses.replace(problem, budget_bytes=10**9)
        return dataclasses.replace(super().solve(roomy, limit, report), peak_bytes=1)

class Boastful(StoreAll):
    def solve(self, problem, limit, report):
        answer = super().solve(problem, limit, report)
        return dataclasses.replace(answer, lower_bound=2 * answer.time)

class Empty(StoreAll):
    def solve(self, problem, limit, report):
        return dataclasses.replace(super().solve(problem, limit, report), schedule=None)

class Choosy(StoreAll):
    def can_solve(self, problem):
        return "it is Monday"

class Hierarchical(StoreAll):
    needs_hierarchy = True

class Sourceless(StoreAll):
    citation = ""

class NeedsArguments(StoreAll):
    def __init__(self, size):
        pass

class NoSolver:
    name = "no"

class Older:
    name, exact, needs_hierarchy = "older", False, False
    can_solve = solve = print
"""


@pytest.fixture
def chain():
    values = (Value("x", 1), Value("a", 2), Value("b", 3))
    ops = (Op("f", ("x",), ("a",), 1.0), Op("g", ("a",), ("b",), 2.0))
    return Graph(values, ops, frozenset({"x"}), frozenset({"b"}))


def test_own_solvers_are_listed_with_their_distribution():
    found = list_solvers()
    assert found["refine"].distribution == found["store-all"].distribution == "remat-solvers"
    assert list(found) == sorted(found)
    assert get_solver("refine").name == "refine"


def test_what_is_installed_later_in_the_same_place_is_listed(install, tmp_path):
    install("first", "1.0", SOLVERS, mine="Good")
    assert "yours" not in list_solvers()
    info = tmp_path / "first-1.0" / "second-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[remat.solvers]\nyours = first_code:Good\n")
    assert list_solvers()["yours"].distribution == "second"


def test_listing_imports_nothing_and_loading_is_cached(install):
    install("alpha", "1.2", SOLVERS, good="Good", bad="Absent")
    assert list_solvers()["good"].origin == "alpha 1.2 (alpha_code:Good)"
    assert "alpha_code" not in sys.modules
    assert get_solver("good") is get_solver("good")


ONCE = """
import signal, sys
if sys._imported_once:  # as some modules written in C
    raise ImportError("cannot load module more than once per process")
sys._imported_once = True
signal.raise_signal(signal.SIGINT)
from remat_solvers.core.store_all import StoreAll as Good
"""


def test_ctrl_c_during_the_first_import_leaves_a_solver_importable(install, monkeypatch):
    monkeypatch.setattr(sys, "_imported_once", False, raising=False)
    install("slow", "1.0", ONCE, mine="Good")
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        get_solver("mine")
    assert signal.getsignal(signal.SIGINT) is handler
    assert get_solver("mine").name == "store-all"


def test_unknown_lists_close_matches_and_installed():
    with pytest.raises(UnknownSolver, match=r"did you mean 'refine'\? installed are: .*store-all"):
        get_solver("refined")


@pytest.mark.parametrize("name", [None, 3, ["refine"], b"refine"])
@pytest.mark.parametrize("ask", [get_solver, cite])
def test_what_is_no_name_is_refused(ask, name):
    with pytest.raises(InvalidProblem, match=r"solver=.*; give a name, such as 'auto' or 'refine'"):
        ask(name)


@pytest.mark.parametrize("target", ["Absent", "NeedsArguments", "NoSolver"])
def test_what_does_not_load_is_reported_when_asked_for(install, target):
    install("beta", "0.3", SOLVERS, bad=target)
    assert "bad" in list_solvers()
    with pytest.raises(BrokenSolver, match=rf"'bad' of beta 0\.3 \(beta_code:{target}\)"):
        get_solver("bad")
    assert get_solver("store-all").name == "store-all"


def test_a_module_that_raises_is_reported_when_asked_for(install):
    install("gamma", "2.0", "raise OSError('no disk')", bad="Good")
    with pytest.raises(BrokenSolver, match=r"gamma 2\.0.*OSError: no disk"):
        get_solver("bad")


def test_duplicates_name_both_distributions(install):
    install("delta", "1.0", SOLVERS, twice="Good")
    install("epsilon", "2.0", SOLVERS, twice="Good")
    with pytest.raises(DuplicateSolver, match=r"(?s)(delta 1\.0.*epsilon|epsilon 2\.0.*delta)"):
        get_solver("twice")
    with pytest.raises(DuplicateSolver):
        list_solvers()
    assert get_solver("store-all").name == "store-all"


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("Failing", "RuntimeError: boom"),
        ("Typeless", "returned a int"),
        ("Illegal", "illegal"),
        ("Boastful", "claims the bound"),
        ("Empty", "claims 'optimal' with no schedule"),
    ],
)
def test_answers_that_do_not_hold(install, chain, target, cause):
    install("zeta", "3.1", SOLVERS, bad=target)
    with pytest.raises(BrokenSolver, match=rf"zeta 3\.1.*{cause}"):
        solve(chain, 100, solver="bad")


def test_a_schedule_over_budget_is_not_believed(install, chain):
    install("eta", "1.0", SOLVERS, bad="OverBudget")
    with pytest.raises(BrokenSolver, match="peaks at 5 bytes, over the budget of 4"):
        solve(chain, 4, solver="bad")


def test_unsuitable_says_why(install, chain):
    install("theta", "1.0", SOLVERS, choosy="Choosy", tree="Hierarchical")
    with pytest.raises(UnsuitableSolver, match="it is Monday"):
        solve(chain, 100, solver="choosy")
    with pytest.raises(UnsuitableSolver, match="hierarchy"):
        solve(chain, 100, solver="tree")
    assert solve(chain, 100).schedule is not None


def test_an_exception_of_the_receiver_of_progress_is_its_own(chain):
    def fail(progress):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        solve(chain, 100, progress=fail)


@pytest.mark.parametrize("name", list_solvers())
def test_every_solver_says_where_it_is_from(name):
    citation = cite(name)
    assert re.search(r"\b(19|20)\d\d\b", citation)
    assert citation == get_solver(name).citation
    told = sys.modules[type(get_solver(name)).__module__].__doc__
    for word in ("Guarantee", "Complexity", "Limits"):
        assert word in told
    assert re.search(r"\b(19|20)\d\d\b|RR-\d+", told)


def test_an_object_is_asked_with_its_settings(chain):
    assert get_solver(Checkmate(gap=0.5)) == Checkmate(gap=0.5)
    assert cite(Checkmate(gap=0.5)) == cite("checkmate")
    assert solve(chain, 100, solver=Checkmate()).solver == "checkmate"
    solution = solve(chain, 100, solver=Checkmate(gap=0.5, form=Form.PAPER))
    assert solution.solver == "checkmate(gap=0.5, form=Form.PAPER)"
    for solver in (Checkmate(back_end="NOSUCH"), Refine(back_end="NOSUCH")):
        with pytest.raises(UnsuitableSolver, match=r"\(back_end='NOSUCH'\).*installed; see"):
            solve(chain, 100, solver=solver)


@pytest.mark.parametrize(
    "solver",
    [
        Checkmate(gap=0.5, form=Form.PAPER),
        Checkmate(gap=1),
        Refine(back_end="SCIP"),
        HTWRemat(most_nodes=(1, 2)),
        Rotor(slots=50),
    ],
)
def test_a_name_has_the_settings_with_which_an_object_is_named(solver):
    chosen = resolve_solver(resolve_solver(solver).name)
    assert chosen.solver == solver
    assert chosen.name == resolve_solver(solver).name
    assert chosen.identity == resolve_solver(solver).identity


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "checkmate(gap)",
            r"solver='checkmate\(gap\)' cannot be read; settings are plain values by",
        ),
        ("checkmate(0.5)", "cannot be read"),
        ("checkmate(**{})", "cannot be read"),
        ("checkmate(gap=0.5", "cannot be read"),
        ("checkmate(gap=0.5, gap=1)", "cannot be read"),
        ("checkmate(gap=open('x'))", "cannot be read"),
        ("checkmate(gap=0.5)(gap=1)", "cannot be read"),
        ("checkmate(speed=3)", "'checkmate' has no setting 'speed'; it has .*gap"),
        ("store-all(speed=3)", "'store-all' has no setting 'speed'; it has none"),
        ("checkmate(gap='x')", "setting 'gap' of solver 'checkmate' is 'x'; give a value like its"),
        ("checkmate(gap=True)", "'gap' .* is True; give a value like its default, "),
        ("checkmate(form=Form.NONE)", "'form' .* is 'Form.NONE'; give a value like"),
        ("h-ilp(planner='x')", "'planner' .* is 'x'; give a value like its default, LevelPlanner"),
    ],
)
def test_settings_in_a_name_that_are_none_of_its_own(name, said):
    with pytest.raises(InvalidProblem, match=said):
        get_solver(name)


def test_an_unknown_name_with_settings():
    with pytest.raises(UnknownSolver, match=r"'checkmat'; did you mean 'checkmate'"):
        get_solver("checkmat(gap=0.5)")
    assert get_solver("checkmate()") is get_solver("checkmate")


@pytest.mark.parametrize("ask", [get_solver, lambda given: solve(unit_chain(2), 9, solver=given)])
def test_a_class_is_no_solver(ask):
    with pytest.raises(InvalidProblem, match=r"Refine, which is a class; give an object: Refine()"):
        ask(Refine)
    with pytest.raises(InvalidProblem, match="give a name, such as 'auto' or 'refine', or a solv"):
        ask(object())


def test_what_a_solver_lacks_is_named(install):
    install("older", "0.1", SOLVERS, older="Older")
    lacks = "has no takes_alternatives, citation"
    assert "older" in list_solvers()
    with pytest.raises(BrokenSolver, match=f"'older' of older 0.1 .* is broken: it {lacks}"):
        get_solver("older")

    class Older:
        name, exact, needs_hierarchy = "older", False, False
        can_solve = solve = print

    with pytest.raises(InvalidProblem, match=f"Older object at .*, which {lacks}; give a name"):
        get_solver(Older())


def test_what_ones_own_object_does_wrong_is_said_of_its_class(chain):
    class Failing(StoreAll):
        name = "mine"

        def solve(self, problem, limit, report):
            raise RuntimeError("boom")

    with pytest.raises(BrokenSolver, match=r"'mine' of .*test_registry\..*Failing is broken: it"):
        solve(chain, 100, solver=Failing())


def test_what_identifies_a_solver(install):
    """Answers are kept under it: the distribution, and the settings."""
    assert resolve_solver("checkmate").identity == resolve_solver(Checkmate()).identity
    assert resolve_solver(Checkmate(gap=0.5)).identity != resolve_solver(Checkmate()).identity
    assert (
        resolve_solver(HILP(planner=LevelPlanner(gap=0.5))).name
        == "h-ilp(planner=LevelPlanner(gap=0.5))"
    )
    assert resolve_solver(HTWRemat(most_nodes=(1, 2))).name == "h-tw-remat(most_nodes=[1, 2])"
    install("lambda", "1.0", SOLVERS, mine="Good")
    assert "version='1.0'" in resolve_solver("mine").identity

    class Subclass(Checkmate):
        """Of the same name, but not what is installed under it."""

    assert resolve_solver(Subclass()).identity is None


def test_settings_that_cannot_be_written_down_identify_nothing():
    @dataclasses.dataclass
    class Odd(StoreAll):
        key: object = None

    assert with_settings("odd", Odd()) == "odd"
    assert with_settings("odd", Odd(key=b"x")) == "odd(key=b'x')"
    assert with_settings("odd", Odd(key=len)) is None
    assert with_settings("odd", Odd(key=object())) is None
    assert with_settings("odd", Odd(key=Odd)) is None
    assert resolve_solver(Odd(key=len)).name == "store-all"


@pytest.mark.parametrize("alternatives", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_all_programs_of_refine_go_to_its_back_end(monkeypatch, alternatives):
    asked = set()
    run = milp._run

    def noted(*args, **kwargs):
        asked.update(arg for arg in args if isinstance(arg, str))
        return run(*args, **kwargs)

    monkeypatch.setattr(milp, "_run", noted)
    graph = with_mask(4) if alternatives else gpt2(layers=2)
    everything = simulate(graph, store_all(graph)).peak_bytes
    solution = solve(graph, int(0.7 * everything), solver=Refine(back_end="SCIPY"), limit_seconds=3)
    assert solution.solver == "refine(back_end='SCIPY')"
    assert asked == {"SCIPY"}


def test_a_plugin_without_a_source_is_named(install):
    install("iota", "0.1", SOLVERS, sourceless="Sourceless")
    install("kappa", "0.1", SOLVERS, sourced="Good")
    assert "iota 0.1 (iota_code:Sourceless)" in cite("sourceless")
    assert "MLSys" in cite("sourced")
    with pytest.raises(UnknownSolver):
        cite("nosuch")

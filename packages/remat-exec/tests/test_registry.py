"""Distributions that declare executors, made as folders on the import path."""

import sys

import pytest
import torch

from remat_exec import (
    Ability,
    BrokenExecutor,
    DuplicateExecutor,
    Executable,
    ExecutionError,
    Runnable,
    UnknownExecutor,
    abilities_of,
    get_executor,
    list_executors,
)
from remat_graph.torch import capture
from remat_solvers import store_all

EXECUTORS = """
from remat_exec import Executable

class Good(Executable):
    pass

def function(capture, schedule, *, budget_bytes=None, low_memory_plan=None):
    return Executable(capture, schedule, budget_bytes, low_memory_plan)

def without_low_memory_plan(capture, schedule, budget_bytes=None):
    return Executable(capture, schedule, budget_bytes)

no_class = 42
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a distribution `name` with a module of its own and these entry points."""
    modules = []

    def make(name, version, source, **points):
        root = tmp_path / f"{name}-{version}"
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (root / f"{name}_code.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {name}_code:{target}" for point, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[remat.executors]", *lines]))
        monkeypatch.syspath_prepend(root)
        modules.append(f"{name}_code")

    yield make
    for module in modules:
        sys.modules.pop(module, None)


def test_the_own_one_is_listed_with_its_distribution():
    assert list_executors()["generated"].distribution == "remat-exec"
    assert get_executor("generated") is Executable


def test_listing_imports_nothing_and_loading_is_cached(install):
    install("alpha", "1.2", EXECUTORS, good="Good", bad="Absent")
    assert list(list_executors()) == ["bad", "generated", "good"]
    assert list_executors()["good"].origin == "alpha 1.2 (alpha_code:Good)"
    assert "alpha_code" not in sys.modules
    assert get_executor("good") is get_executor("good")


@pytest.mark.parametrize("target", ["Good", "function"])
def test_one_of_a_third_party_runs_a_schedule(install, target):
    install("alpha", "1.3", EXECUTORS, mine=target)
    layer, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    captured = capture(layer, (x,), costs="estimate")
    made = get_executor("mine")(captured, store_all(captured.graph), budget_bytes=10**6)
    (output,) = made(layer, [x])
    assert torch.equal(output, layer(x))
    offered = {name for name in vars(Runnable) if not name.startswith("_")}
    assert offered == {
        "capture", "low_memory_plan", "peak_bytes", "staying_peak_bytes", "source",
        "differentiable", "takes_all", "rehearse",
    }  # fmt: skip
    assert all(hasattr(made, name) for name in offered)
    assert made.peak_bytes == made.code.peak_bytes > 0
    able = abilities_of(get_executor("mine"))
    assert able == (set(Ability) if target == "Good" else set())


def test_unknown_lists_close_matches_and_installed():
    with pytest.raises(UnknownExecutor, match=r"'generate'; did you mean 'generated'\? installed"):
        get_executor("generate")
    assert issubclass(UnknownExecutor, ExecutionError)


@pytest.mark.parametrize("name", [None, 3, ["generated"], Executable])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UnknownExecutor, match=r"executor=.*; give a name, such as 'generated'"):
        get_executor(name)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("Absent", "AttributeError"),
        ("no_class", "a int cannot be called"),
        ("without_low_memory_plan", "unexpected keyword argument 'low_memory_plan'"),
    ],
)
def test_what_is_no_executor_is_reported_when_asked_for(install, target, cause):
    install("beta", "0.3", EXECUTORS, bad=target)
    assert "bad" in list_executors()
    with pytest.raises(
        BrokenExecutor, match=rf"'bad' of beta 0\.3 \(beta_code:{target}\).*{cause}"
    ):
        get_executor("bad")
    assert get_executor("generated") is Executable


def test_a_module_that_raises_is_reported_when_asked_for(install):
    install("gamma", "2.0", "raise OSError('no disk')", bad="Good")
    with pytest.raises(BrokenExecutor, match=r"gamma 2\.0.*OSError: no disk"):
        get_executor("bad")


def test_duplicates_name_both_distributions(install):
    install("delta", "1.0", EXECUTORS, twice="Good")
    install("epsilon", "2.0", EXECUTORS, twice="Good")
    with pytest.raises(DuplicateExecutor, match=r"(delta 1\.0.*epsilon|epsilon 2\.0.*delta)"):
        get_executor("twice")
    with pytest.raises(DuplicateExecutor):
        list_executors()
    assert get_executor("generated") is Executable

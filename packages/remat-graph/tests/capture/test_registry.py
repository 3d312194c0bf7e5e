"""Distributions that declare captures, made as folders on the import path."""

import subprocess
import sys

import pytest
import torch

from remat_graph.torch import (
    BrokenCapture,
    CaptureError,
    DuplicateCapture,
    UnknownCapture,
    capture_region,
    get_capture,
    list_captures,
)

CAPTURES = """
from remat_graph.torch import capture_region

def good(region, inputs, /, **options):
    return capture_region(region, inputs, **options)

def without_options(region, inputs):
    return capture_region(region, inputs)

no_function = "capture"
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
        (info / "entry_points.txt").write_text("\n".join(["[remat.captures]", *lines]))
        monkeypatch.syspath_prepend(root)
        modules.append(f"{name}_code")

    yield make
    for module in modules:
        sys.modules.pop(module, None)


def test_the_own_one_is_listed_with_its_distribution():
    assert list_captures()["aot"].distribution == "remat-graph"
    assert get_capture("aot") is capture_region


def test_listing_imports_nothing_and_loading_is_cached(install):
    install("alpha", "1.2", CAPTURES, good="good", bad="absent")
    assert list(list_captures()) == ["aot", "bad", "good"]
    assert list_captures()["good"].origin == "alpha 1.2 (alpha_code:good)"
    assert "alpha_code" not in sys.modules
    assert get_capture("good") is get_capture("good")


def test_one_of_a_third_party_captures(install):
    install("alpha", "1.3", CAPTURES, good="good")
    x = torch.randn(3, requires_grad=True)
    captured = get_capture("good")(lambda x: (x.sin().sum(),), [x], costs="estimate")
    assert captured.graph == capture_region(lambda x: (x.sin().sum(),), [x], costs="estimate").graph


def test_unknown_lists_close_matches_and_installed():
    with pytest.raises(UnknownCapture, match=r"called 'aoti'; did you mean 'aot'\? installed are:"):
        get_capture("aoti")
    assert issubclass(UnknownCapture, CaptureError)


@pytest.mark.parametrize("name", [None, 3, ["aot"], capture_region])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(UnknownCapture, match=r"capture=.*; give a name, such as 'aot'"):
        get_capture(name)


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("absent", "AttributeError"),
        ("no_function", "a str cannot be called"),
        ("without_options", "unexpected keyword argument 'costs'"),
        ("good:", "does not load"),
    ],
)
def test_what_is_no_capture_is_reported_when_asked_for(install, target, cause):
    install("beta", "0.3", CAPTURES, bad=target)
    assert "bad" in list_captures()
    with pytest.raises(BrokenCapture, match=rf"'bad' of beta 0\.3 \(beta_code:{target}\).*{cause}"):
        get_capture("bad")
    assert get_capture("aot") is capture_region


@pytest.mark.parametrize("source", ["raise OSError('no disk')", "raise SystemExit('no disk')"])
def test_a_module_that_raises_is_reported_when_asked_for(install, source):
    install("gamma", "2.0", source, bad="good")
    with pytest.raises(BrokenCapture, match=r"gamma 2\.0.*(OSError|SystemExit): no disk"):
        get_capture("bad")


def test_duplicates_name_both_distributions(install):
    install("delta", "1.0", CAPTURES, twice="good")
    install("epsilon", "2.0", CAPTURES, twice="good")
    with pytest.raises(DuplicateCapture, match=r"(delta 1\.0.*epsilon|epsilon 2\.0.*delta)"):
        get_capture("twice")
    with pytest.raises(DuplicateCapture):
        list_captures()
    assert get_capture("aot") is capture_region


def test_a_registry_needs_no_torch():
    code = "import sys, remat_graph.plugins as p; p.find_plugins('remat.captures')['aot']; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

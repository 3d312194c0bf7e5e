"""The models of `benchmarks/wild.py`, as far as they can be looked at without their packages."""

import sys

import pytest

import matrix
import matrix_cases
import wild_cases
from matrix_cases import stand_ins
from wild_cases import packages


def test_there_are_many_models_of_many_packages():
    names = [name for kind in wild_cases.KINDS for name in wild_cases.names(kind)]
    assert len(set(names)) == len(names) >= 60
    assert len(wild_cases.KINDS) >= 20


def test_each_package_has_its_version():
    text = (matrix.SCRIPT.parent / "wild_requirements.txt").read_text()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in text.splitlines()}
    assert {kind.lower().replace("_", "-") for kind in wild_cases.KINDS} <= pinned


def test_what_is_not_installed_is_not_runnable():
    with pytest.raises(matrix_cases.NotRunnable, match="hatch run wild"):
        packages.load("none_such.models")


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        wild_cases.find("none-such/Model")


def test_a_package_is_stood_in_for_only_meanwhile(monkeypatch):
    monkeypatch.setattr(stand_ins, "STOOD_IN", ("none_such",))
    with stand_ins.stood_in():
        import none_such.models
        from none_such.ops import Convolution, misc

        assert issubclass(Convolution, none_such.models.Anything.__base__)
        assert misc.__name__ == "none_such.ops.misc"
    assert not any(name.startswith("none_such") for name in sys.modules)

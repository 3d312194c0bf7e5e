"""Every example of `examples/` runs, and what it asserts holds."""

import runpy
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from integration_cases.sweeps import swept

EXAMPLES = Path(__file__).parents[1] / "examples"
OF_RANKS = ["ddp", "fsdp2"]  # which run in `stacks/test_ranks.py`
# What they use of other libraries is tested in `stacks/`.
OF_STACKS = {"lora", "trainer", "accelerate_loop", "lightning_callback"}
LONG = {"largest_batch", "own_partitioner", "own_solver"}
# The demo trains for a minute, and has a command of its own.
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "train_gpt2")
MOST_LINES = 60


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    swept(
        [name for name in NAMES if name not in OF_RANKS],
        {*NAMES} - {*OF_RANKS} - OF_STACKS - LONG,
    ),
)
def test_an_example_does_what_it_asserts(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()  # what other tests compiled counts against the recompile limit
    AcceleratorState._reset_state(reset_partial_state=True)  # a precision of another test, say
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_asserts_something(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert any(line.strip().startswith("assert ") for line in lines)


def test_the_page_lists_every_example():
    page = (EXAMPLES / "README.md").read_text()
    listed = {
        path.stem if path.suffix else path.name
        for path in EXAMPLES.iterdir()
        if f"({path.name}" in page
    }
    folders = {path.name for path in EXAMPLES.iterdir() if (path / "pyproject.toml").exists()}
    assert listed - {"README"} == {*NAMES, "train_gpt2", *folders}

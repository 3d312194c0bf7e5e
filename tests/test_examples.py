"""Every example of `examples/` runs, and what it asserts holds.

Those of one process share one, so that what they import is imported once; those of two ranks are
started by torchrun beside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
OF_RANKS = ["ddp", "fsdp2"]
# The demo trains for a minute, and has a command of its own.
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "train_gpt2")
MOST_LINES = 60

RUN_ALL = """
import json, runpy, sys, traceback
raised = {}
for path in sys.argv[1:]:
    try:
        runpy.run_path(path, run_name="__main__")
    except BaseException:
        raised[path] = traceback.format_exc()
sys.stderr.write("\\n" + json.dumps(raised))
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def raised():
    """What each example raised, as text; none is there of one that did not."""
    alone = [EXAMPLES / f"{name}.py" for name in NAMES if name not in OF_RANKS]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    running = {name: start(*torchrun, EXAMPLES / f"{name}.py") for name in OF_RANKS}
    together = start("-c", RUN_ALL, *alone)
    found = {}
    for name, process in running.items():
        _, told = process.communicate(timeout=200)
        if process.returncode:
            found[name] = told
    _, told = together.communicate(timeout=200)
    assert together.returncode == 0, told
    for path, text in json.loads(told.splitlines()[-1]).items():
        found[Path(path).stem] = text
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_example_does_what_it_asserts(raised, name):
    assert name not in raised, raised[name]
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

"""A distribution of `examples/`, installed by pip into a folder and used from there."""

import json
import os
import shutil
import subprocess
import sys

_OPTIONS = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]


def use_installed(example, work, script):
    """Install a copy, so that the build leaves nothing in the tree; give what a script prints."""
    source = shutil.copytree(example, work / "source")
    target = work / "installed"
    _run("-m", "pip", "install", *_OPTIONS, "--target", target, source)
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    return json.loads(_run("-c", script, PYTHONPATH=os.pathsep.join(filter(None, paths))))


def _run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

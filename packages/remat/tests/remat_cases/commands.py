"""The command run in this process, and models that it is given."""

import json
import sys

import pytest
from typer.testing import CliRunner

from remat.command import app, main

FACTORY = """
import torch

def net(batch=64, depth=5):
    layers = (m for _ in range(depth) for m in (torch.nn.Linear(64, 64), torch.nn.GELU()))
    return torch.nn.Sequential(*layers), torch.zeros(batch, 64)

def odd():
    return 1

def beside():
    from sizes import WIDTH
    return torch.nn.Linear(WIDTH, 1), torch.zeros(1, WIDTH)

def failing(depth=1):
    return torch.nn.Linear(depth, 1)

def heavy():
    return torch.nn.Linear(int(torch.ones(()).item()), 1), torch.zeros(1, 1)

def ends():
    raise SystemExit(7)

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("running")
        return super().forward(x)

def stopped():
    raise KeyboardInterrupt

def chatty():
    import subprocess, sys
    subprocess.run([sys.executable, "-c", "print('from a child')"])
    return Loud(4, 4), torch.zeros(1, 4)

def loud():
    print("making")
    return Loud(4, 4), torch.zeros(1, 4)

def dropping():
    layers = (m for _ in range(3) for m in (torch.nn.Linear(64, 64), torch.nn.Dropout(0.1)))
    return torch.nn.Sequential(*layers), torch.zeros(64, 64)

class Head(torch.nn.Linear):
    def forward(self, x, y):
        scores = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, y), "scores": scores}

def head():
    return Head(4, 500), (torch.zeros(64, 4), torch.zeros(64, dtype=torch.long))
"""


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def run_json(*words):
    return json.loads(run(*words, "--json"))


def ended(capsys, monkeypatch, *words):
    """Run as a user does; give the exit code and what is said."""
    monkeypatch.setattr(sys, "argv", ["remat", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, " ".join(capsys.readouterr().err.split())

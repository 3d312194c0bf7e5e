"""The example capture and executor, installed by pip into a folder and trained with from there."""

from pathlib import Path

import pytest
from integration_cases.installed import use_installed

EXAMPLE = Path(__file__).parents[1] / "examples" / "remat-layers-example"
MODULE = EXAMPLE / "src" / "remat_layers_example" / "__init__.py"

USE = """
import copy, json, logging, sys
import torch
from torch import nn
import remat

found = {
    "capture": remat.list_captures()["counted"].origin,
    "executor": remat.list_executors()["logged"].origin,
}
found["imported_by_listing"] = "remat_layers_example" in sys.modules

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("remat_layers_example").addHandler(handler)
logging.getLogger("remat_layers_example").setLevel(logging.INFO)


class Net(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks
        self.first = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64))
        self.second = nn.Sequential(nn.Sigmoid(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


def train(model, steps=5):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(32, 16)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


for breaks, way in ((False, "rematerialize"), (True, "compile")):
    torch.manual_seed(0)
    plain = Net(breaks)
    model = copy.deepcopy(plain)
    names = {"capture": "counted", "executor": "logged", "limit_seconds": 0.1}
    names["budget"] = "1GiB" if breaks else "60KiB"
    if way == "rematerialize":
        model = remat.rematerialize(model, **names)
    else:
        model = torch.compile(model, backend="remat", options=names)
    messages.clear()
    same = all(map(torch.equal, train(model), train(plain)))
    found[way] = {"same": same, "messages": list(messages)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return use_installed(EXAMPLE, tmp_path_factory.mktemp("example"), USE)


@pytest.mark.sweep
def test_the_example_is_installed_and_listed(found):
    assert found["capture"] == "remat-layers-example 0.1.0 (remat_layers_example:counted)"
    assert found["executor"] == "remat-layers-example 0.1.0 (remat_layers_example:Logged)"
    assert not found["imported_by_listing"]


@pytest.mark.sweep
@pytest.mark.parametrize(("way", "regions"), [("rematerialize", 1), ("compile", 2)])
def test_a_model_trains_the_same_by_the_example(found, way, regions):
    used = found[way]
    assert used["same"]
    captured = [message for message in used["messages"] if message.startswith("captured")]
    assert len(captured) == regions
    assert all("forward" in message and "backward" in message for message in captured)
    assert used["messages"].count("forward") == 5 * regions
    kept = [message for message in used["messages"] if message.startswith("backward")]
    assert len(kept) == 5 * regions
    assert any(int(message.split()[2]) > 0 for message in kept)


def test_the_example_is_short_and_uses_only_what_is_public():
    lines = MODULE.read_text().splitlines()
    assert len(lines) < 60
    imports = [line.split()[1] for line in lines if line.startswith("from remat")]
    assert set(imports) == {"remat_exec", "remat_graph.torch"}

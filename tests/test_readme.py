"""What the pages say runs: their blocks of Python, and every form that an argument takes."""

import inspect
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from exec_cases.training import assert_bitwise_equal, train
from integration_cases.sweeps import swept
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import remat
from remat.front import backend
from remat_graph import Graph, Op, Stage, Value
from remat_partition.h_partition import HPartition
from remat_solvers.refine import Refine

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/**/*.md")]
# Nothing stands in for what these need.
ALONE = ("start.md", "first-ten-minutes.md", "how-it-works.md")
# Their blocks train larger models, or the same in more ways.
LONG = (
    "docs/budget.md", "docs/first-ten-minutes.md", "docs/stacks.md", "docs/start.md",
    "packages/remat/README.md", "packages/remat-solvers/README.md",
)  # fmt: skip
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIMIT_SECONDS = 0.1


def blocks(page):
    """Give the blocks of a page, each behind so many empty lines that errors name its own."""
    text = page.read_text()
    return [
        "\n" * text.count("\n", 0, found.start(1)) + found[1] for found in PYTHON.finditer(text)
    ]


RUN = [str(page.relative_to(ROOT)) for page in PAGES if blocks(page)]


class Tokens(nn.Module):
    """A model of tokens: gives logits, or with labels a mapping with a loss."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, tokens, labels=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Output(loss=loss, logits=logits)


class Output(dict):
    """What models of transformers return, in short."""

    __getattr__ = dict.__getitem__


def region():
    """Make the graph of a region: the op at its boundary stands for what happens between halves."""
    return Graph(
        values=tuple(Value(name, 100) for name in ("x", "h", "y", "dy", "dx")),
        ops=(
            Op("first", ("x",), ("h",), time=1.0),
            Op("second", ("h",), ("y",), time=1.0),
            Op("loss", ("y",), ("dy",), time=0.0, stage=Stage.BACKWARD, replayable=False),
            Op("backward", ("h", "dy"), ("dx",), time=2.0, stage=Stage.BACKWARD, twin="second"),
        ),
        resident=frozenset({"x"}),
        results=frozenset({"dx"}),
        boundary="loss",
    )


def stand_ins():
    """Make what the pages take to be there."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 10, (4, 16))
    return {
        "model": Tokens(),
        "tokens": tokens,
        "target": tokens,
        "criterion": lambda logits, target: nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten()
        ),
        "dataset": [{"tokens": row, "labels": row} for row in tokens],
        "loader": DataLoader(TensorDataset(tokens, tokens), batch_size=4),
        "graphs": [region(), region()],
        "budget_bytes": 120,
    }


@pytest.fixture
def _group(tmp_path):
    """A group of this process alone, for what shards."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def _one_machine(monkeypatch):
    """A scheduler of Dask is in this process."""
    import distributed

    client = distributed.Client

    def here(address):
        return client(processes=False, n_workers=1, dashboard_address=None)

    monkeypatch.setattr(distributed, "Client", here)


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_group", "_one_machine", "_fresh_compiler")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:distributed",
    "ignore:.*pin_memory.*no accelerator:UserWarning",
    "ignore:.*does not have many workers",
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning",
    "ignore::DeprecationWarning:lightning",
    "ignore::FutureWarning:lightning",
)
@pytest.mark.parametrize("name", swept(RUN, {*RUN} - {*LONG}))
def test_the_blocks_of_a_page_run(name, tmp_path, monkeypatch):
    import matplotlib

    page = ROOT / name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("remat_solvers.refine.solver._DEFAULT_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr("remat_solvers.queries.batch._DEFAULT_SECONDS", LIMIT_SECONDS)
    matplotlib.use("agg")
    scope = {"__name__": "__main__", "torch": torch, "remat": remat}
    for block in blocks(page):
        scope |= {} if page.name in ALONE else stand_ins()
        exec(compile(block, str(page), "exec"), scope)


class Mlp(nn.Module):
    """Something to recompute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16)) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def square(output):
    return output.square().mean()


def batch(step=0):
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(step))


def trained(model):
    return train(model, lambda model, step: model(batch(step)), square, steps=2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def planned():
    """Plan once a test of this form runs."""
    return remat.plan(Mlp(), batch(), budget="1MiB", costs="estimate")


FORMS = {
    "bytes": {"budget": 8 * 2**30},
    "with a unit": {"budget": "8GiB"},
    "with a space": {"budget": "500 MB"},
    "a fraction": {"budget": 0.9},
    "a percentage": {"budget": "90%"},
    "auto": {"budget": "auto"},
    "an optimizer": {"budget": "auto", "optimizer": adamw(Mlp().parameters())},
    "an optimizer's class": {"budget": "auto", "optimizer": torch.optim.SGD},
    "a function of a list of parameters": {"budget": "auto", "optimizer": adamw},
    "a loss of the output": {"loss": lambda output: output.square().mean()},
    "a loss of the output and the call": {"loss": lambda output, x: (output - x).square().mean()},
    "regions by name": {"budget": "1MiB", "regions": "layers.*"},
    "regions by class": {"budget": "1MiB", "regions": nn.Sequential},
    "a list of regions": {"budget": "1MiB", "regions": ["layers.0", "layers.[12]"]},
    "an example": {"args": (batch(),), "kwargs": {}},
    "an example, one tensor": {"args": batch()},
    "an example by name": {"kwargs": {"x": batch()}},
    "a solver": {"solver": "store-all"},
    "a solver with its settings": {"solver": Refine(back_end="HIGHS")},
    "a partitioner": {"solver": "h-ilp", "partitioner": "repeats"},
    "a partitioner with its settings": {"solver": "h-ilp", "partitioner": HPartition(alpha=1.0)},
    "costs that are estimated": {"costs": "estimate"},
    "costs of a device": {"costs": remat.DeviceSpec("mine", 1e11, 5e10, 2e10, 3e-6)},
    "a limit": {"limit_seconds": 0.1},
    "progress": {"progress": lambda progress: None},
    "a plan": {"args": batch(), "budget": "auto", "plan": planned},
    "the only output": {"outputs": 0},
    "the same bits, made another way": {"numerics": "bitwise"},
    "eager kernels": {"kernels": "eager", "wait": False},
    "capture and executor": {"capture": "aot", "executor": "generated"},
    "infeasible, that raises": {"on_infeasible": "raise"},
    "infeasible, that runs as it is": {"budget": 2000, "on_infeasible": "plain"},
}
ONE_OF_A_KIND = (
    "bytes", "with a space", "a percentage", "auto", "an optimizer",
    "a function of a list of parameters", "a loss of the output and the call", "regions by name",
    "an example, one tensor", "an example by name",
    "a solver with its settings", "a partitioner", "costs that are estimated", "costs of a device",
    "a limit", "progress", "a plan", "the same bits, made another way", "capture and executor",
    "infeasible, that raises", "infeasible, that runs as it is",
)  # fmt: skip
DEFAULTS = {"budget": "1MiB", "limit_seconds": LIMIT_SECONDS}


def options_of(form):
    given = {name: value() if value is planned else value for name, value in FORMS[form].items()}
    return DEFAULTS | given


def assert_trains_as_plain(model, infeasible, plain):
    with pytest.warns(remat.BudgetWarning) if infeasible else nullcontext():
        found = trained(model)
    assert_bitwise_equal(found, plain)


@pytest.fixture(scope="module")
def plain():
    return trained(Mlp())


@pytest.mark.parametrize("form", swept(FORMS, ONE_OF_A_KIND))
def test_a_form_of_an_argument_trains_as_plain_does(form, plain):
    model = remat.rematerialize(Mlp(), **options_of(form))
    assert_trains_as_plain(model, "as it is" in form, plain)


def test_every_argument_has_a_form():
    arguments = set(inspect.signature(remat.rematerialize).parameters) - {"model"}
    assert arguments == {name for form in FORMS.values() for name in form}


# The settings are one class for both ways in; these go another way in the back end.
SETTINGS_OF_THE_BACK_END = (
    "a percentage", "a function of a list of parameters", "a solver with its settings",
    "costs of a device", "progress", "the same bits, made another way",
    "infeasible, that runs as it is",
)  # fmt: skip
OPTIONS = [form for form, given in FORMS.items() if given.keys() <= {*backend.OPTIONS}]


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("form", swept(OPTIONS, SETTINGS_OF_THE_BACK_END))
def test_a_form_of_an_option_of_the_back_end_trains_as_plain_does(form, plain):
    model = torch.compile(Mlp(), backend="remat", options=options_of(form))
    assert_trains_as_plain(model, "as it is" in form, plain)


def told(page, start, end):
    return page.read_text().partition(start)[2].partition(end)[0]


def test_the_signature_on_the_page_is_that_of_the_function():
    page = ROOT / "packages" / "remat" / "README.md"
    written = told(page, "## `rematerialize(model, ", ")`")
    arguments = list(inspect.signature(remat.rematerialize).parameters.values())[1:]
    said = [f"{argument.name}={argument.default!r}".replace("'", '"') for argument in arguments]
    assert written.replace("*, ", "").split(", ") == said


def test_the_options_on_the_page_are_those_of_the_back_end():
    page = ROOT / "packages" / "remat" / "README.md"
    options = re.findall(r"`(\w+)`", told(page, "Options are ", "."))
    assert set(options) == set(backend.OPTIONS)

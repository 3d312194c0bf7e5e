"""Plans of steps of several regions as files: made here, used there, refused where they differ."""

import copy
import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import remat
from remat.command import app
from remat.session import choosing, kind_finder
from remat_exec import measure_peak

WIDTH = 32
X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Blocks with dropout between graph breaks; two kinds of regions, and code between them."""

    def __init__(self, blocks=3, width=WIDTH, act=nn.GELU):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, width * 4), act(), nn.Dropout(0.1), nn.Linear(width * 4, WIDTH)
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = x + self.blocks[0](x)
        torch._dynamo.graph_break()
        x = x + self.blocks[1](x)
        torch._dynamo.graph_break()
        for block in self.blocks[2:]:
            x = x + block(x)
        return self.head(x).square().mean()


def seeded(make=Net, **options):
    torch.manual_seed(0)
    return make(**options)


def step(model, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    model(X).backward()


def peak_of_a_step(model, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    with measure_peak() as peak:
        model(X).backward()
    return peak.peak_bytes


def assert_trains_as(model, plain, steps=3):
    for seed in range(steps):
        step(plain, seed)
        step(model, seed)
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(theirs.grad, ours.grad)


def use(plan, model=None, **options):
    return remat.rematerialize(
        seeded() if model is None else model, plan=plan, costs="estimate", **options
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The file of a plan that recomputes, and the plan."""
    budget = int(0.7 * peak_of_a_step(seeded()))
    model = remat.rematerialize(seeded(), budget=budget, costs="estimate", limit_seconds=0.1)
    with warnings.catch_warnings():  # estimates know of no workspace: one plan may be over
        warnings.simplefilter("ignore", remat.BudgetWarning)
        for seed in range(6):
            step(model, seed)
    assert model.plan.recomputations
    assert model.plan.measured_peak_bytes <= budget
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    model.plan.save(path)
    return path, model.plan


@pytest.fixture
def no_solving(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("solved")

    monkeypatch.setattr(kind_finder, "region_front", refuse)
    monkeypatch.setattr(choosing, "choose", refuse)


def test_a_loaded_plan_is_used_without_solving(made, no_solving):
    path, plan = made
    model = use(path)
    for seed in range(2):  # which keep little: what the code between the regions holds is recorded
        assert peak_of_a_step(model, seed) <= plan.budget_bytes
    assert_trains_as(model, seeded())
    assert model.plan.regions == plan.regions
    assert model.plan.lower_bound == pytest.approx(plan.lower_bound)
    assert model.plan.measured_peak_bytes <= plan.budget_bytes
    assert peak_of_a_step(model) <= plan.budget_bytes


TRAIN = """
import sys, warnings
import torch, remat
sys.path.insert(0, {folder!r})
from {module} import *
from remat.session import choosing, kind_finder
warnings.simplefilter("error", remat.BudgetWarning)
kind_finder.region_front = choosing.choose = None
torch.set_num_threads(1)
{body}
"""


@pytest.mark.sweep
def test_a_new_process_trains_with_the_same_bits(made, tmp_path):
    path, plan = made
    body = f"""
model, plain = use({str(path)!r}), seeded()
assert_trains_as(model, plain, steps=4)
assert peak_of_a_step(model) <= {plan.budget_bytes}
assert model.plan.recomputations == {plan.recomputations}
assert model.plan.measured_peak_bytes <= {plan.budget_bytes}
"""
    folder = str(__file__).rpartition("/")[0]
    code = TRAIN.format(folder=folder, module="test_step_plan_files", body=body)
    subprocess.run([sys.executable, "-c", code], check=True)


def gpt2():
    import transformers

    config = transformers.GPT2Config(
        n_layer=3, n_head=2, n_embd=32, vocab_size=64, n_positions=64, use_cache=False
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.sweep
def test_blocks_of_a_transformer_that_are_regions(tmp_path, monkeypatch):
    tokens = torch.arange(128).reshape(4, 32) % 64

    def train(model, seed):
        model.zero_grad()
        torch.manual_seed(seed)
        model(input_ids=tokens, labels=tokens).loss.backward()

    plain = gpt2()
    with measure_peak() as peak:
        train(plain, 0)
    first = remat.rematerialize(
        gpt2(), budget=int(0.8 * peak.peak_bytes), regions="transformer.h.*", costs="estimate",
        limit_seconds=0.1,
    )  # fmt: skip
    for seed in range(4):
        train(first, seed)
    assert first.plan.recomputations
    first.plan.save(tmp_path / "blocks.json")
    monkeypatch.setattr(kind_finder, "region_front", None)
    model = use(tmp_path / "blocks.json", gpt2(), regions="transformer.h.*")
    for seed in range(4):
        train(model, seed), train(plain, seed)
        for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(theirs.grad, ours.grad)
    assert model.plan.regions == first.plan.regions
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes == first.plan.budget_bytes
    with pytest.raises(remat.PlanMismatch, match="call 0 of the step"):
        train(use(tmp_path / "blocks.json", gpt2(), regions="transformer.h.*.mlp"), 0)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_back_end_tells_its_plans_and_takes_them(made, tmp_path, monkeypatch):
    torch._dynamo.reset()
    _, plan = made
    told = []
    budget = 2 * plan.budget_bytes
    options = {
        "budget": budget, "costs": "estimate", "limit_seconds": 0.1,
        "on_plan": told.append,
    }  # fmt: skip
    first = torch.compile(seeded(), backend="remat", options=options)
    for seed in range(4):
        step(first, seed)
    told[-1].save(tmp_path / "plan.json")
    monkeypatch.setattr(kind_finder, "region_front", None)
    torch._dynamo.reset()
    options = {"plan": str(tmp_path / "plan.json"), "costs": "estimate"}
    again = torch.compile(seeded(), backend="remat", options=options)
    assert_trains_as(again, seeded())
    assert peak_of_a_step(again) <= budget
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 31}, "region of call 0 of the step.*makes 131,072 bytes in .*plan.json"),
        ({"blocks": 4}, r"region of call 2 of the step.*25 ops in .*, 39 in the model"),
        ({"act": nn.Identity}, "region of call 0 of the step"),
    ],
)
def test_another_model_is_told_the_region_that_differs(made, options, said):
    path, _ = made
    with pytest.raises(remat.PlanMismatch, match=said):
        step(use(path, seeded(**options)))


def test_plans_of_one_region_and_of_several_are_told_apart(made):
    path, _ = made
    whole = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, 1))
    with pytest.raises(remat.PlanMismatch, match="call 0"):
        remat.rematerialize(whole, X, plan=path, costs="estimate")(X)
    one = remat.plan(whole, X, budget="1GiB", costs="estimate")
    with pytest.raises(remat.PlanMismatch, match="is one region, and this one's is not"):
        step(use(one))
    with pytest.raises(remat.RematError, match="leave out regions="):
        use(one, regions="blocks.*")


def test_the_budget_is_kept_whatever_the_plan_says(made):
    path, plan = made
    model = use(path, budget=plan.budget_bytes // 2)
    with pytest.warns(remat.BudgetWarning, match="step 1"), pytest.raises(remat.BudgetTooSmall):
        assert_trains_as(model, seeded())
    model = use(path, budget=2 * plan.budget_bytes)
    assert_trains_as(model, seeded())
    assert model.plan.budget_bytes == 2 * plan.budget_bytes


def changed(path, change):
    document = json.loads(path.read_text())
    change(document["body"])
    return json.dumps(document)


def test_a_record_that_says_too_little_is_not_believed(made, tmp_path, caplog):
    _, plan = made
    moments = tuple(replace(moment, fixed_bytes=0) for moment in plan.moments)
    low = replace(plan, moments=moments, measured_peak_bytes=None)
    low = replace(low, budget_bytes=int(1.01 * low.predicted_peak_bytes))
    assert low.budget_bytes < plan.measured_peak_bytes
    low.save(tmp_path / "low.json")
    model = use(tmp_path / "low.json", limit_seconds=0.1)
    assert_trains_as(model, seeded(), steps=4)
    assert model.plan.measured_peak_bytes <= low.budget_bytes
    assert "low.json takes" in caplog.text
    assert "and 0 when it was made" in caplog.text


class Loop(nn.Module):
    """One block, called over and over."""

    def __init__(self, times=3):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = self.block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


@pytest.mark.sweep
def test_other_calls_of_the_same_regions_are_planned_anew_by_their_schedules(monkeypatch, caplog):
    first = remat.rematerialize(seeded(Loop), budget=0.8, costs="estimate", limit_seconds=0.1)
    for seed in range(4):
        step(first, seed)
    monkeypatch.setattr(kind_finder, "region_front", None)
    model = use(first.plan, seeded(Loop, times=4), budget=0.8)
    assert_trains_as(model, seeded(Loop, times=4))
    assert "the step has 4 calls of regions, the plan 3; call 3 is" in caplog.text
    assert len(model.plan.calls) == 4


def test_names_of_a_file_reach_no_code(made, tmp_path, no_solving):
    path, plan = made
    evil = "__import__('os').abort() #"

    def rename(body):
        body["calls"] = [[evil, kind] for _, kind in body["calls"]]
        body["breaks"] = [evil]
        for kind in body["kinds"]:
            text = json.dumps([kind["graph"], kind["options"]])
            ops = {op["name"] for op in kind["graph"]["body"]["ops"]}
            values = {value["name"] for value in kind["graph"]["body"]["values"]}
            for name in sorted(ops | values, key=len, reverse=True):
                text = text.replace(f'"{name}"', json.dumps(f"{evil}\n/../{name}"))
            kind["graph"], kind["options"] = json.loads(text)

    (tmp_path / "evil.json").write_text(changed(path, rename))
    model = use(tmp_path / "evil.json")
    assert_trains_as(model, seeded())
    assert "abort" not in str(model.plan)
    assert model.plan.recomputations == plan.recomputations


class Heads(nn.Module):
    """Of two outputs of the last region one is in no loss."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.body(x).tanh()
        torch._dynamo.graph_break()
        return self.head(x).tanh(), self.unused(x).tanh()


def test_gradients_that_never_came_are_part_of_the_plan(tmp_path):
    def train(model):
        model.zero_grad()
        model(X)[0].square().mean().backward()

    plain = seeded(Heads)
    first = remat.rematerialize(seeded(Heads), budget="1MiB", costs="estimate", limit_seconds=0.1)
    for _ in range(6):
        train(first)
    assert any(kind.missing for kind in first.plan.kinds)
    first.plan.save(tmp_path / "heads.json")
    model = use(tmp_path / "heads.json", copy.deepcopy(plain))
    for _ in range(3):
        train(model), train(plain)
    for theirs, ours in zip(plain.parameters(), model.parameters(), strict=True):
        assert (theirs.grad is ours.grad is None) or torch.equal(theirs.grad, ours.grad)


def test_the_command_reads_such_files(made, tmp_path):
    path, plan = made

    def run(*words):
        return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})

    told = json.loads(run("explain", path, "--json").stdout)
    assert [region["name"] for region in told["regions"]] == [name for name, _ in plan.regions]
    assert plan.regions[0][0] in run("explain", path).stdout
    for words in (("tradeoff", path), ("solve", path, "--budget", "50%")):
        refused = run(*words).exception
        assert "several regions" in str(refused)
    assert run("report", path, "--curve", "-o", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.index("<h2>The step</h2>") < page.index(f"<h2>{plan.regions[0][0]}</h2>")
    assert "The least time found within each budget." in page  # of others nothing is proved
    assert run("trace", path, "-o", tmp_path / "step.json").exit_code == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    held = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(held) == plan.predicted_peak_bytes - plan.set_aside_bytes
    assert sum(event.get("cat") == "again" for event in events) == plan.recomputations


def test_a_notebook_shows_the_step_as_a_whole(made):
    _, plan = made
    told = plan._repr_html_()
    assert "peak, measured" in told
    assert told.count("<svg") == 1
    assert "Net.forward" in told

"""What belongs to the process: no planning leaves it changed, whatever is raised meanwhile."""

import copy
import functools
import os
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.special  # noqa: F401 - adds a filter of warnings when it is imported first
import torch
from exec_cases.training import assert_bitwise_equal, train
from integration_cases.sweeps import swept
from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import builder, misc
from torch.utils import _python_dispatch

import remat
from remat_exec import Peak

LIMIT_SECONDS = 0.1
DEFAULTS = {"budget": 1.0, "limit_seconds": LIMIT_SECONDS}


def batch(size=32):
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(1))


def loss(output):
    return output.square().mean()


def state_of_the_process():
    """Give all that is global and that planning could have changed, by name."""
    backends = torch.backends
    return {
        "autocast": [
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "generators": [
            torch.get_rng_state().tolist(),
            random.getstate(),
            str(np.random.get_state(legacy=False)),
        ],
        "back ends": (
            backends.mkldnn.enabled, backends.cudnn.enabled, backends.cudnn.benchmark,
            backends.cudnn.deterministic, backends.cudnn.allow_tf32,
            backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        ),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "warnings": (list(warnings.filters), warnings.showwarning, warnings.warn),
        "patched functions": (
            torch.manual_seed, nn.Module.__call__, nn.Module.__getattr__,
            torch._dynamo.trace_rules.check, symbolic_convert.get_funcname,
            misc.LoggingLoggerVariable.call_method,
            misc.DebuggingVariable.call_function, builder.process_automatic_dynamic,
        ),
        "modes": (
            list(_python_dispatch._get_current_dispatch_mode_stack()),
            torch.overrides._get_current_function_mode_stack(),
        ),
        "tracing": (
            torch.fx._symbolic_trace._is_fx_tracing_flag, torch.compiler._is_compiling_flag,
            torch.compiler._is_exporting_flag, torch._C._autograd._profiler_enabled(),
        ),
        "settings": [
            copy.deepcopy(module.get_config_copy())
            for module in (torch._dynamo.config, torch._functorch.config)
        ],
        "environment": dict(os.environ),
    }  # fmt: skip


def assert_unchanged(before):
    after = state_of_the_process()
    for name, value in before.items():
        assert after[name] == value, name
    seeded = torch.manual_seed(0).initial_seed()  # it was found refusing
    assert seeded == 0


class Layers(nn.Module):
    """Layers with dropout, a buffer, attributes that the forward sets, and room for trouble."""

    def __init__(self, trouble=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Dropout(0.2), nn.Linear(24, 4)
        )
        self.trouble, self.calls, self.seen = trouble, 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        if self.trouble is not None:
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                self.trouble(x)
        return self.layers(x)


def fail(*_):
    raise ZeroDivisionError("of the user")


def interrupt(*_):
    raise KeyboardInterrupt


def branch(x):
    if x.sum() > 0:
        x.sin()


def lazily(model, **options):
    remat.rematerialize(model, **(DEFAULTS | options))(batch()).sum().backward()


def planned(model, **options):
    remat.rematerialize(model, batch(), **(DEFAULTS | options))


def dry(model, **options):
    remat.plan(model, batch(), **(DEFAULTS | options))


ERRORS = {
    "the budget is too small": (remat.BudgetTooSmall, {"budget": 2000}, None),
    "the forward raises": (ZeroDivisionError, {}, fail),
    "the forward is interrupted": (KeyboardInterrupt, {}, interrupt),
    "planning is interrupted": (KeyboardInterrupt, {"progress": interrupt}, None),
    "progress raises": (ZeroDivisionError, {"progress": fail}, None),
    "the loss raises": (remat.LossError, {"loss": fail}, None),
    "the loss is no scalar": (remat.LossError, {"loss": lambda output: output}, None),
    "the limit is negative": (remat.SolverError, {"limit_seconds": -1}, None),
}


WAYS = {"lazily": lazily, "planned": planned, "dry": dry}
# Each error once, and each way with an error before, within and after the forward.
ONE_OF_A_KIND = (
    ("the budget is too small", "lazily"), ("the forward raises", "lazily"),
    ("the forward raises", "planned"), ("the forward raises", "dry"),
    ("the forward is interrupted", "dry"), ("planning is interrupted", "planned"),
    ("progress raises", "dry"), ("the loss raises", "planned"), ("the loss is no scalar", "lazily"),
    ("the limit is negative", "planned"),
)  # fmt: skip


@pytest.mark.parametrize(
    "case", swept([(name, way) for name in ERRORS for way in WAYS], ONE_OF_A_KIND)
)
def test_an_error_of_planning_leaves_the_process_and_the_model_as_they_were(case):
    name, way = case[0], WAYS[case[1]]
    kind, options, trouble = ERRORS[name]
    if way is dry and trouble is fail:
        kind = remat.CaptureError
    model = Layers(trouble)
    before = state_of_the_process()
    with pytest.raises(kind):
        way(model, **options)
    left_as_before(model, before, way)


@pytest.mark.parametrize("at", ["rehearse", "measure_plain", "measure_costs", "over budget"])
def test_a_failed_measurement_leaves_them_as_they_were(monkeypatch, at):
    def over_budget(*_):
        return Peak(peak_bytes=10**12)

    where = {
        "rehearse": "remat_exec.executable.run_without_autograd",
        "measure_plain": "remat.budgets.plain._with_gradient",
        "measure_costs": "remat_graph.torch.cost.costs._time_once",
        "over budget": "remat_exec.executable.Executable.rehearse",
    }[at]
    instead = {"over budget": over_budget, "measure_costs": interrupt}  # what fails is estimated
    monkeypatch.setattr(where, instead.get(at, fail))
    model = Layers()
    before = state_of_the_process()
    kind = {"over budget": remat.BudgetTooSmall, "measure_costs": KeyboardInterrupt}
    with pytest.raises(kind.get(at, ZeroDivisionError)):
        planned(model)
    monkeypatch.undo()
    left_as_before(model, before, planned)


def test_a_refused_capture_leaves_them_as_they_were():
    model = Layers(branch)
    before = state_of_the_process()
    with pytest.raises(remat.CaptureError, match=r"if x\.sum"):
        dry(model)
    left_as_before(model, before, dry)


def left_as_before(model, before, way):
    if way is lazily:  # the forward itself is the user's, and may have drawn
        before = {**before, "generators": state_of_the_process()["generators"]}
    else:
        assert (model.calls, model.seen) == (0, [])
    assert_unchanged(before)
    model.trouble = None
    call = (lambda m, _: m(batch()), loss)
    fresh = Layers()
    fresh.load_state_dict(model.state_dict())
    assert_bitwise_equal(train(model, *call), train(fresh, *call))


@functools.lru_cache(maxsize=4)
def table(size):
    """Positions, made once for each size, as transformers' vision models make them."""
    return torch.linspace(-1, 1, size)


class WithTable(Layers):
    def forward(self, x):
        return super().forward(x) * table(len(x))[:, None]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("trouble", [None, branch])
def test_no_tensor_of_a_trace_stays_in_a_cache_and_none_is_taken_from_one(trained, trouble):
    call = (lambda m, _: m(batch()), loss)
    table.cache_clear()
    model, fresh = WithTable(trouble), WithTable()
    if trained:
        loss(model(batch())).backward()
        model.load_state_dict(fresh.state_dict())
    if trouble is None:
        dry(model)
    else:
        with pytest.raises(remat.CaptureError, match=r"if x\.sum"):
            dry(model)
    model.trouble = None
    assert_bitwise_equal(train(model, *call), train(fresh, *call))


class Broken(nn.Module):
    """A forward with a graph break, so that its first steps are recorded."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 32), nn.Linear(32, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(self.drop(h).sin().exp())


class Whole(Broken):
    def forward(self, x):
        return self.second(self.drop(torch.tanh(self.first(x))).sin().exp())


def trained(make, rematerialize, steps=6):
    """Train without any random number of the process; give the gradients of each step.

    The mask of a dropout would depend on what other threads draw: `p` is 0, and its operator is
    there all the same.
    """
    model = make()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.drop.p = 0.0
    if rematerialize:
        budget = 0.97 if make is whole else "48KiB"  # what its regions copy is in no plain step
        model = remat.rematerialize(model, budget=budget, limit_seconds=LIMIT_SECONDS)
    found = []
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(64, model.first.in_features, generator=generator)
        loss(model(x)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters()]
    if rematerialize and make is not broken:  # which waits for its turn to be recorded
        assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    return found


def whole():
    return Whole(8)


def broken():
    return Broken(12)


def test_threads_that_plan_and_train_at_once_are_right_and_leave_the_process_as_it_was():
    before = state_of_the_process()
    makes = [whole, broken, whole, broken]
    start = threading.Barrier(len(makes))

    def run(make):
        start.wait()
        return trained(make, rematerialize=True)

    with ThreadPoolExecutor(len(makes)) as pool:
        results = list(pool.map(run, makes))
    for make, found in zip(makes, results, strict=True):
        for got, expected in zip(found, trained(make, rematerialize=False), strict=True):
            assert torch.equal(got, expected)
    before["generators"] = state_of_the_process()["generators"]
    assert_unchanged(before)


def test_other_threads_compute_with_onednn_while_one_is_traced():
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append(torch.backends.mkldnn.enabled)
            return torch.tanh(super().forward(x))

    remat.plan(Seen(8, 8), (batch(),), budget="1MiB", costs="estimate")
    assert seen
    assert all(seen)


@pytest.mark.parametrize("is_on", [False, True])
def test_source_files_are_parsed_for_a_log_that_is_on_alone(is_on, monkeypatch):
    parsed = []
    state = torch._logging._internal.log_state
    monkeypatch.setattr(symbolic_convert, "get_funcname", lambda file, line: parsed.append(file))
    monkeypatch.setattr(state, "is_artifact_enabled", lambda log: is_on and log == "trace_call")
    remat.rematerialize(Layers(), (batch(),), budget="1GiB")
    assert bool(parsed) == is_on

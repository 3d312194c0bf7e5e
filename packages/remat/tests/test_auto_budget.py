"""What `"auto"` comes to: free memory, control groups, and the state of optimizers to come."""

import functools
import logging

import pytest
import torch
from torch import nn

from remat import BudgetError
from remat.budgets.auto import AutoBudget, pending_state_bytes
from remat.budgets.free_memory import free_bytes

CPU = torch.device("cpu")
AdamW, SGD, RMSprop = torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop


def layers():
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 5))
    model[1].bias.requires_grad_(False)
    return list(model.parameters()), 4 * (30 * 40 + 40 + 40 * 5)


@pytest.mark.parametrize(
    ("optimizer", "tensors"),
    [
        (None, 2),
        (AdamW, 2),
        (functools.partial(AdamW, fused=True), 2),
        (functools.partial(AdamW, capturable=True), 2),
        (functools.partial(SGD, lr=0.1), 0),
        (functools.partial(SGD, lr=0.1, momentum=0.9), 1),
        (lambda parameters: RMSprop(parameters, momentum=0.9), 2),
    ],
)
def test_the_state_of_an_optimizer_that_is_not_made_yet(optimizer, tensors):
    parameters, size = layers()
    assert pending_state_bytes(parameters, optimizer) == tensors * size


def test_an_optimizer_that_is_made_counts_for_the_parameters_without_a_state():
    (weight, *rest), size = layers()
    trained = [parameter for parameter in rest if parameter.requires_grad]
    groups = [{"params": [weight], "momentum": 0.9}, {"params": trained}]
    optimizer = SGD(groups, lr=0.1)
    assert pending_state_bytes([weight, *rest], optimizer) == weight.nbytes
    optimizer = AdamW([weight, *rest])
    assert pending_state_bytes([], optimizer) == 2 * size
    assert pending_state_bytes([], SGD(groups, lr=0.1, fused=True)) == weight.nbytes
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert pending_state_bytes([], optimizer) == 2 * (size - weight.nbytes)
    assert weight.grad is not None
    assert all(parameter.grad is None for parameter in rest)


def test_an_optimizer_that_cannot_be_tried_is_refused():
    with pytest.raises(BudgetError, match=r"LBFGS.*give the budget in bytes"):
        pending_state_bytes(layers()[0], torch.optim.LBFGS)


def test_auto_is_what_is_free_less_a_tenth_and_the_state_and_is_fixed_once(caplog, monkeypatch):
    monkeypatch.setattr("remat.budgets.auto.free_bytes", lambda device: 100_000)
    parameters, size = layers()
    auto = AutoBudget(None, lambda: parameters)
    auto.see((), CPU)
    monkeypatch.setattr("remat.budgets.auto.free_bytes", lambda device: 10)
    auto.see((), CPU)
    with caplog.at_level(logging.INFO, "remat"):
        assert auto.fix().size_bytes == (90_000 - 2 * size) // 2048 * 2048
    assert auto.fix() is auto.fix()
    assert f"90% of 100000 that are free on cpu, less {2 * size}" in caplog.text


def test_parameters_that_regions_were_called_with_are_counted_once(monkeypatch):
    monkeypatch.setattr("remat.budgets.auto.free_bytes", lambda device: 100_000)
    parameters, size = layers()
    auto = AutoBudget(AdamW)
    auto.see([torch.ones(3), *parameters[:2], 7], CPU)
    auto.see(parameters, CPU)
    assert auto.fix().size_bytes == (90_000 - 2 * size) // 2048 * 2048


def test_auto_is_refused_where_nothing_is_left(monkeypatch):
    monkeypatch.setattr("remat.budgets.auto.free_bytes", lambda device: 1000)
    auto = AutoBudget(None, lambda: layers()[0])
    auto.see((), CPU)
    with pytest.raises(BudgetError, match="optimizer="):
        auto.fix()


def test_free_memory_that_differs_a_little_gives_the_same_budget(monkeypatch):
    budgets = set()
    for free in range(8_000_000, 8_001_000, 100):
        monkeypatch.setattr("remat.budgets.auto.free_bytes", lambda device, free=free: free)
        auto = AutoBudget(None)
        auto.see((), CPU)
        budgets.add(auto.fix().size_bytes)
    (budget,) = budgets
    assert 0.9 * 8_000_000 * 31 / 32 < budget <= 0.9 * 8_000_000


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 300), (0.5, 200), (0.1, 100)])
def test_on_cuda_blocks_that_are_cached_are_free_and_a_limit_of_the_process_holds(
    monkeypatch, fraction, expected
):
    figures = {
        "mem_get_info": (200, 1000),
        "memory_reserved": 400,
        "memory_stats_as_nested_dict": {
            "active_bytes": {"all": {"current": 300}},
            "allocated_bytes": {"all": {"current": 250}},
        },
        "get_per_process_memory_fraction": fraction,
    }
    for name, figure in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, figure=figure: figure)
    assert free_bytes(torch.device("cuda", 0)) == expected


def test_what_is_free_is_some_of_what_there_is():
    assert 2**20 < free_bytes(CPU) < 2**50


GROUPS = {
    "second version": (
        "0::/jobs/one\n",
        {"jobs": ("max", 0, 0), "jobs/one": (1000, 900, 150)},
        ("memory.max", "memory.current", "inactive_file"),
        250,
    ),
    "limit of a parent": (
        "0::/jobs/one\n",
        {"jobs": (500, 400, 0), "jobs/one": (1000, 100, 0)},
        ("memory.max", "memory.current", "inactive_file"),
        100,
    ),
    "first version": (
        "4:cpu,memory:/jobs\n0::/\n",
        {"memory/jobs": (700, 650, 20)},
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        70,
    ),
    "path of another namespace": (
        "4:memory:/elsewhere\n",
        {"memory": (700, 650, 20)},
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        70,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_control_groups_are_read(name, tmp_path, monkeypatch):
    membership, groups, (limit, usage, inactive), left = GROUPS[name]
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(membership)
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    for path, (most, used, files) in groups.items():
        group = tmp_path / path
        group.mkdir(parents=True, exist_ok=True)
        (group / limit).write_text(f"{most}\n")
        (group / usage).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\n{inactive} {files}\n")
    monkeypatch.setattr("remat.budgets.free_memory._PROC", tmp_path)
    monkeypatch.setattr("remat.budgets.free_memory._CGROUPS", tmp_path)
    assert free_bytes(CPU) == left


def test_where_there_is_no_proc_psutil_is_asked(monkeypatch, tmp_path):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr("remat.budgets.free_memory._PROC", tmp_path)
    monkeypatch.setattr("remat.budgets.free_memory._CGROUPS", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 1234})())
    assert free_bytes(CPU) == 1234


def test_where_nobody_can_tell_what_is_free_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("remat.budgets.free_memory._PROC", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    with pytest.raises(BudgetError, match="give the budget in bytes"):
        free_bytes(CPU)

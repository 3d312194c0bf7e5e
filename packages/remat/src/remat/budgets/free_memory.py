"""How much memory a step could allocate: of the device, of the machine, of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from remat.errors import BudgetError
from remat_graph.torch import blocks_in_use

__all__ = ["free_bytes"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(device: torch.device) -> int:
    """How much a step could allocate on the device now; on the CPU within its control groups.

    Raises:
        BudgetError: if there is no way to know.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device)) - reserved
        return max(0, min(free, allowed)) + reserved - blocks_in_use(device)
    return max(0, min(_available(device), *_left_in_groups()))


def _available(device: torch.device) -> int:
    """Read what the machine could give without swapping; psutil knows where there is no /proc."""
    try:
        lines = (_PROC / "meminfo").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        import psutil  # noqa: PLC0415

        return int(psutil.virtual_memory().available)
    except (ImportError, OSError, RuntimeError):
        raise BudgetError(
            f"cannot tell how much memory is free on {device} here; give the budget in bytes"
        ) from None


def _left_in_groups() -> Iterator[int]:
    """Read what is left of the limit of each control group that this process is in.

    Pages of files that were not used lately count as free: the kernel takes them back first.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    yield 1 << 62
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots, names = [_CGROUPS, _CGROUPS / "unified"], _V2
        elif "memory" in controllers.split(","):
            roots, names = [_CGROUPS / "memory"], _V1
        else:
            continue
        for root in roots:
            inner = root / path.lstrip("/")
            for group in (inner, *inner.parents):
                yield from _left_in(group, *names)
                if group == root:
                    break


def _left_in(group: Path, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    try:
        most = int((group / limit).read_text(encoding="ascii"))
        used = int((group / usage).read_text(encoding="ascii"))
        facts = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return
    files = dict(line.split(" ", 1) for line in facts).get(reclaimable, "0")
    yield most - used + int(files)

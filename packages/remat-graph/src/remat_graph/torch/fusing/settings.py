"""What the code of a kernel depends on beside the kernel: settings of the process that asks for it.

Inductor's caches are keyed by them. So a process that compiles for another one has the other's.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Settings"]

_CONFIGS = (
    "torch._inductor.config", "torch._inductor.config_comms", "torch._functorch.config",
    "torch.compiler.config", "torch.fx.experimental._config",
)  # fmt: skip
_OF_PRODUCTS = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


@dataclass(frozen=True)
class Settings:
    """Settings of a process, as they are to be in another."""

    threads: int
    deterministic: int
    fills_memory: bool
    dtype: torch.dtype
    of_products: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls) -> Settings:
        """Read those of this process; of its configurations, what is plain data."""
        determinism: Any = torch.utils.deterministic
        loaded = {name: sys.modules[name] for name in _CONFIGS if name in sys.modules}
        return cls(
            torch.get_num_threads(),
            torch.get_deterministic_debug_mode(),
            determinism.fill_uninitialized_memory,
            torch.get_default_dtype(),
            {name: getattr(torch.backends.cuda.matmul, name) for name in _OF_PRODUCTS},
            {name: _plain_values(module) for name, module in loaded.items()},
        )

    def use(self) -> None:
        """Let this process have them."""
        determinism: Any = torch.utils.deterministic
        torch.set_num_threads(self.threads)
        torch.set_deterministic_debug_mode(self.deterministic)
        determinism.fill_uninitialized_memory = self.fills_memory
        torch.set_default_dtype(self.dtype)
        for name, value in self.of_products.items():
            setattr(torch.backends.cuda.matmul, name, value)
        for name, values in self.configs.items():
            config: Any = importlib.import_module(name)
            here = _plain_values(config)
            others = {key: value for key, value in values.items() if here.get(key) != value}
            config.load_config(others)


def _plain_values(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.get_config_copy().items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)

"""With what a plan was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat.__about__ import __version__

if TYPE_CHECKING:
    import torch

__all__ = ["Origin"]


@dataclass(frozen=True, slots=True)
class Origin:
    """With what a plan was made: the versions of remat and torch, and the device."""

    remat_version: str
    torch_version: str
    device: str

    @classmethod
    def here(cls, device: torch.device | None = None) -> Origin:
        """Name what is installed here, and a device; `None` for a plan that was made without."""
        import torch  # noqa: PLC0415 - takes seconds

        name = "none" if device is None else device.type
        if device is not None and device.type == "cuda":
            there = torch.cuda.is_available()
            name = torch.cuda.get_device_name(device) if there else "a CUDA device that is not here"
        return cls(__version__, str(torch.__version__), name)

    def __str__(self) -> str:
        """Describe it in words."""
        return f"remat {self.remat_version}, torch {self.torch_version}, captured on {self.device}"

"""Does remat train what is out there? Models of packages that it was not made with.

Run and judged as `benchmarks/matrix.py` does, with its options. `hatch run wild` installs the
packages. A name is `package/model`, such as `diffusers/UNet2DModel`. Exit code 1 if less than 98%
are right, differ from eager as under any `torch.compile` or are refused by remat's own exceptions,
or any is WRONG, not bitwise, OVER or foreign.

    python benchmarks/wild.py [--only PATTERN] [--kind PACKAGE] [--jobs N] [--resume] [--fresh]
"""

from __future__ import annotations

import sys

import matrix

__all__ = ["AS_PROMISED"]

AS_PROMISED = (*matrix.RIGHT, "as compiled", "refused")

if __name__ == "__main__":
    sys.exit(matrix.main("wild", AS_PROMISED))

"""Does remat train what is out there? Models of packages that it was not made with.

Run and judged as `benchmarks/matrix.py` does; its options are those. `hatch run wild` installs the
packages. A name is `package/model`, such as `diffusers/UNet2DModel`.

    python benchmarks/wild.py [--only PATTERN] [--kind PACKAGE] [--jobs N] [--resume] [--fresh]
"""

from __future__ import annotations

import sys

import matrix

if __name__ == "__main__":
    sys.exit(matrix.main("wild"))

import sys
from pathlib import Path

import torch

# Steps and their comparison are those of the tests of remat-exec.
sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "remat-exec" / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import os
import sys
from pathlib import Path

import torch

# Steps and their comparison are those of the tests of remat-exec.
sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "remat-exec" / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

os.environ["REMAT_CACHE"] = "0"  # neither read nor write what is of the user
os.environ.pop("REMAT_PLANS", None)

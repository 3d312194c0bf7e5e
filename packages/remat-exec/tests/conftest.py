import gc
import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
settings.register_profile("remat-exec", deadline=None)
settings.load_profile("remat-exec")


def pytest_collection_finish():
    """Leave what was imported out of each later garbage collection, most of whose time it takes.

    A peak is measured after a collection, four times for each plan.
    """
    gc.collect()
    gc.freeze()

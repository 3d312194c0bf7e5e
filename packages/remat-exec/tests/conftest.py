import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
settings.register_profile("remat-exec", deadline=None)
settings.load_profile("remat-exec")

import sys
from pathlib import Path

import pytest
import torch
import transformers

# Processes that a test starts find what they run there, too.
sys.path.insert(0, str(Path(__file__).parent))
transformers.utils.logging.set_verbosity_error()


@pytest.fixture(autouse=True)
def _autocast_off():
    """A test that left autocast on fails alone, not all that come after it."""
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()

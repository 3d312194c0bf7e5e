import gc
import os
import sys
from pathlib import Path

import pytest
import torch

# Steps and their comparison are those of the tests of remat-exec.
sys.path.insert(0, str(Path(__file__).parents[1] / "packages" / "remat-exec" / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("integration_cases")
torch.set_num_threads(1)

os.environ["REMAT_CACHE"] = "0"  # neither read nor write what is of the user
os.environ.pop("REMAT_PLANS", None)


@pytest.fixture(autouse=True, scope="module")
def _short_searches():
    """Search briefly where no limit is given: how fast plans are is tested beside the solvers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("remat_solvers.refine.solver._DEFAULT_SECONDS", 0.2)
        patch.setattr("remat_solvers.queries.tradeoff._SECONDS", 0.2)
        patch.setattr("remat.session.kind_finder._SECONDS", 0.05)
        patch.setattr("remat.session.kind_finder._SECONDS_PER_OP", 0.0)
        yield


@pytest.fixture
def traces(monkeypatch):
    """Count what is traced, as it comes or with symbols."""
    from remat_graph.torch.capturing import capture, sized_trace

    traced = []
    for module, kind in ((capture, "as it comes"), (sized_trace, "with symbols")):

        def counted(*args, original=module.trace_region, kind=kind):
            traced.append(kind)
            return original(*args)

        monkeypatch.setattr(module, "trace_region", counted)
    return traced


@pytest.fixture(scope="module")
def kernels_compiled_here():
    """Compile groups in this process."""
    from integration_cases.kernels import compiled_here

    with compiled_here():
        yield


@pytest.fixture
def _no_record_stays():
    """A model that is gone leaves no profiler running, whatever came of its last step."""
    yield
    gc.collect()
    assert not torch._C._autograd._profiler_enabled()

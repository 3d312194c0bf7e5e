import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from remat_solvers.core import trust

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("solver_cases.answers", "solver_cases.curves")


@pytest.fixture(autouse=True)
def believing(monkeypatch):
    """Let each test begin with all back ends believed."""
    monkeypatch.setattr(trust, "_doubts", {})


@pytest.fixture(scope="module")
def importable():
    """Put what workers import on the path of new processes."""
    with pytest.MonkeyPatch.context() as patch:
        known = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, known)))
        yield


@pytest.fixture(scope="session")
def processes():
    """Two processes, started once, which import from where this one does."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def cluster(importable, tmp_path_factory):
    """Two processes on the loopback device."""
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    settings = {
        "temporary-directory": str(tmp_path_factory.mktemp("dask")),
        "distributed.worker.memory.terminate": False,
        "distributed.scheduler.allowed-failures": 0,
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # None is port 8787, which others may have
            memory_limit=0,
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


@pytest.fixture
def dask_executor(cluster):
    return cluster.get_executor(pure=False)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Make a distribution `name` with a module of its own and these entry points."""
    modules = []

    def make(name, version, source, **points):
        root = tmp_path / f"{name}-{version}"
        info = root / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (root / f"{name}_code.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {name}_code:{target}" for point, target in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[remat.solvers]", *lines]))
        monkeypatch.syspath_prepend(root)
        modules.append(f"{name}_code")

    yield make
    for module in modules:
        sys.modules.pop(module, None)

"""Groups are compiled in other processes, which end when nobody waits."""

import os
import pickle
import shutil
import signal

import pytest
import torch
from graph_cases.groups import Gelu, in_groups, program_of
from torch._inductor import codecache, config
from torch.backends.cuda import matmul

from remat_graph.torch.fusing import beside
from remat_graph.torch.fusing.beside import Compilation
from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.program import kernels_of
from remat_graph.torch.fusing.settings import Settings
from remat_graph.torch.fusing.worker import _compile


@pytest.mark.sweep
def test_kernels_are_compiled_in_other_processes():
    program = program_of(Gelu(24), torch.randn(5, 24))
    kernels = list(kernels_of(in_groups(program)).values())
    compilation = Compilation(kernels[:2])
    (worker,) = compilation._workers
    compilation.wait()
    assert compilation.is_done
    assert worker.process.poll() is None
    compile_kernels(kernels[:2])
    assert all(kernel.compiled for kernel in kernels[:2])
    assert Compilation(kernels[:2]).count == 0
    again = Compilation(kernels[2:4])
    assert again._workers == [worker]  # nothing starts for the next
    again.wait()
    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    after = Compilation(kernels[2:4])
    assert after._workers != [worker]
    del after


def test_processes_that_do_not_start_or_end_at_once_are_no_error(monkeypatch):
    program = program_of(Gelu(20), torch.randn(5, 20))
    kernels = list(kernels_of(in_groups(program)).values())
    monkeypatch.setattr(beside.sys, "executable", "")
    compilation = Compilation(kernels)
    assert compilation.is_done
    assert compilation.count == len(kernels)
    monkeypatch.setattr(beside.sys, "executable", shutil.which("true"))
    compilation = Compilation(kernels * 100)  # more than a pipe holds
    compilation.wait()
    assert compilation.is_done


@pytest.mark.sweep
def test_other_processes_end_with_what_they_started_when_nobody_waits():
    program = program_of(Gelu(28), torch.randn(5, 28))
    compilation = Compilation(kernels_of(in_groups(program)).values())
    processes = [worker.process for worker in compilation._workers]
    del compilation
    assert all(process.wait() == -signal.SIGTERM for process in processes)
    with pytest.raises(ProcessLookupError):
        os.killpg(processes[0].pid, 0)


CHANGES = {
    "threads": lambda: torch.set_num_threads(3),
    "determinism": lambda: torch.use_deterministic_algorithms(True),
    "determinism to warn of": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "filled memory": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "type": lambda: torch.set_default_dtype(torch.float64),
    "precision": lambda: torch.set_float32_matmul_precision("high"),
    "precision by its back end": lambda: setattr(matmul, "fp32_precision", "tf32"),
    "sums of 16 bits": lambda: setattr(matmul, "allow_fp16_reduced_precision_reduction", False),
    "sums of bfloat16": lambda: setattr(matmul, "allow_bf16_reduced_precision_reduction", False),
    "Inductor": lambda: setattr(config, "epilogue_fusion", False),
    "Inductor for Triton": lambda: setattr(config.triton, "max_tiles", 3),
    "the compiler": lambda: setattr(torch.compiler.config, "cache_key_tag", "mine"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_settings_that_inductor_keys_its_code_by_are_those_of_who_asks(
    change, monkeypatch, tmp_path
):
    monkeypatch.setattr(codecache, "torch_key", bytes)  # of its sources
    job = tmp_path / "job"

    def key():
        return vars(codecache.FxGraphHashDetails(None, [torch.ones(1)], {}, []))

    before, key_before = Settings.read(), key()
    try:
        change()
        job.write_bytes(pickle.dumps((Settings.read(), [])))
        key_of_changed = key()
        assert key_of_changed != key_before
        before.use()
        assert key() == key_before
        _compile(job)
        assert key() == key_of_changed
    finally:
        torch.set_float32_matmul_precision("highest")
        before.use()


def test_a_job_has_the_settings_of_who_sends_it(monkeypatch):
    program = program_of(Gelu(20), torch.randn(5, 20))
    kernels = list(kernels_of(in_groups(program)).values())
    monkeypatch.setattr(beside.sys, "executable", shutil.which("true"))
    with config.patch(max_fusion_size=8):
        compilation = Compilation(kernels[:1])
    (worker,) = compilation._workers
    settings, _ = pickle.loads(worker._path.read_bytes())
    assert settings.configs["torch._inductor.config"]["max_fusion_size"] == 8

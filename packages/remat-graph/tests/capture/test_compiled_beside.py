"""Groups are compiled in other processes, which end when nobody waits."""

import os
import shutil
import signal

import pytest
import torch
from graph_cases.groups import Gelu, in_groups, program_of

from remat_graph.torch.fusing import beside
from remat_graph.torch.fusing.beside import Compilation
from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.program import kernels_of


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

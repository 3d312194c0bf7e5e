"""Kernels that this process compiles: to start others, as is tested beside, takes seconds."""

from contextlib import contextmanager

import pytest

from remat.session import kernels, step_kernels
from remat_graph.torch.fusing.compiling import compile_kernels
from remat_graph.torch.fusing.missing import see_compiled


class Here:
    """A compilation in this process, done once it is there."""

    is_done = True

    def __init__(self, kernels):
        compile_kernels(kernels)
        see_compiled(kernels)
        self.count = len(kernels)

    def wait(self):
        pass


@contextmanager
def compiled_here():
    with pytest.MonkeyPatch.context() as patch:
        for module in (kernels, step_kernels):
            patch.setattr(module, "Compilation", Here)
        yield

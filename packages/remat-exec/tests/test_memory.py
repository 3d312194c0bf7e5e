"""Memory: given back as soon as it can be, nothing kept between steps, and measured truly."""

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exec_cases.models import CASES, MLP, NORMED, Case
from torch import nn

from remat_exec import Executable, measure, measure_peak, profile_step
from remat_graph import simulate
from remat_graph.torch import AllocationRecorder, flatten
from remat_graph.torch.cost import cpp_log
from remat_solvers.step import region_front


def live_tensors():
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def step(case, model):
    case.loss(model(*case.args())).backward()


def wide(layers=6, width=320):
    """Layers of 400 KB, so that gradients come in several groups."""
    return Case(
        "wide",
        lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))),
        lambda: (torch.randn(2, width),),
        lambda y: y.square().mean(),
    )


def test_gradients_are_handed_over_while_the_rest_is_computed():
    case = wide()
    model = case.remat()
    assert len(model.executable.code.groups) > 1
    step(case, model)
    with measure_peak() as accumulating:
        step(case, model)
    held = sum(p.grad.nbytes for p in model.parameters())
    model.zero_grad()
    with measure_peak() as fresh:
        step(case, model)
    assert fresh.peak_bytes >= held
    assert accumulating.peak_bytes < 0.75 * held


def test_each_gradient_is_there_as_soon_as_its_group_is():
    model = wide().remat()
    seen = []
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: seen.append(sum(p.grad is not None for p in parameters))
        )
    step(wide(), model)
    assert len(seen) == len(parameters)
    assert min(seen) < len(parameters)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_a_step_only_the_gradients_are_left(case):
    model = case.remat()
    step(case, model)
    model.zero_grad()
    args = case.args()
    with measure_peak() as peak:
        case.loss(model(*args)).backward()
    gradients = sum(p.grad.nbytes for p in model.parameters())
    assert peak.kept_bytes == gradients


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_leave_no_tensors_behind(case):
    model = case.remat()
    for _ in range(2):
        step(case, model)
    before = live_tensors()
    for _ in range(4):
        step(case, model)
    assert live_tensors() <= before


def test_a_forward_that_is_never_differentiated_leaves_nothing_behind():
    model = MLP.remat()
    step(MLP, model)
    before = live_tensors()
    for _ in range(4):
        model(*MLP.args())
    assert live_tensors() <= before


def test_a_backward_that_fails_leaves_nothing_behind():
    model = MLP.remat()
    step(MLP, model)

    def fail(_):
        raise ZeroDivisionError

    handle = model.module[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        step(MLP, model)
    handle.remove()
    model.zero_grad()
    before = live_tensors()
    step(MLP, model)
    assert live_tensors() <= before + len(list(model.parameters()))
    eager = MLP.model()
    step(MLP, eager)
    for got, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_a_module_goes_when_it_is_let_go_of():
    model = MLP.remat()
    step(MLP, model)
    watched = [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.module[0].weight)]
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_real_step_takes_no_more_than_was_predicted(case):
    model = case.remat()
    args = case.args()
    with measure_peak() as peak:
        outputs, _ = flatten(model(*args))
        sum(output.sum() for output in outputs if output.requires_grad).backward()
        del outputs
    predicted = simulate(case.captured.graph, case.store_all).peak_bytes
    assert peak.peak_bytes <= predicted + 256


def test_measure_peak_counts_what_is_held_at_once():
    with measure_peak("cpu") as peak:
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(700)
        del third
    assert peak.peak_bytes == 6000
    assert peak.kept_bytes == second.nbytes == 2000
    assert peak.reserved_bytes == 0
    assert max(held for _, held in peak.curve) == 6000
    assert [held for _, held in peak.curve] == [4000, 6000, 2000, 4800, 2000]
    moments = [moment for moment, _ in peak.curve]
    assert moments == sorted(moments)
    assert moments[0] == 0


def test_measure_peak_of_nothing_is_zero():
    with measure_peak() as peak:
        pass
    assert (peak.peak_bytes, peak.kept_bytes, peak.curve) == (0, 0, ())


def test_measure_peak_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), measure_peak():
        _ = 1 / 0
    with measure_peak() as peak:
        torch.empty(10)
    assert peak.peak_bytes == 40


def test_profile_step_warms_up_times_and_measures():
    runs = []

    def run():
        runs.append(torch.empty(250).sum())

    profile = profile_step(run, device="cpu", repeats=5)
    assert len(runs) == 7
    assert profile.seconds > 0
    assert profile.peak.peak_bytes >= 1000


def test_what_is_given_back_before_the_backward_is_made_again():
    case = NORMED
    low_memory_plan = Executable(
        case.captured, region_front(case.captured.graph).options[0].schedule
    )
    executable = Executable(case.captured, case.store_all, low_memory_plan=low_memory_plan)
    assert executable.low_memory_plan is low_memory_plan
    model, plain, drops, held = case.model(), case.model(), [], []
    for dropping in (False, True):
        model.zero_grad()
        model.load_state_dict(plain.state_dict())
        with measure_peak() as peak:
            outputs = executable(model, list(case.args()), droppable=drops.append)
            if dropping:
                drops[-1]()
        held.append(peak.kept_bytes)
        case.loss(case.captured.output_structure.rebuild(iter(outputs))).backward()
    assert held[1] < held[0]
    case.loss(plain(*case.args())).backward()
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad)


class Allocator(AllocationRecorder):
    """The CPU's recorder; that of CUDA says that this much was allocated."""

    allocated = 0

    def __enter__(self):
        return self if self.device.type == "cuda" else super().__enter__()

    def __exit__(self, *raised):
        if self.device.type == "cuda":
            self.peak_bytes = Allocator.allocated
        else:
            super().__exit__(*raised)


@pytest.mark.parametrize(("on_cuda", "expected"), [(0, 4096), (10**6, 10**6)])
def test_a_machine_with_a_gpu_is_measured_where_the_block_allocates(monkeypatch, on_cuda, expected):
    monkeypatch.setattr(measure, "AllocationRecorder", Allocator)
    monkeypatch.setattr(Allocator, "allocated", on_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with measure_peak() as peak:
        _made = torch.empty(1024)
    assert peak.peak_bytes == expected


@pytest.mark.parametrize("collect", [True, False])
def test_garbage_is_collected_before_the_block_or_not_in_it(collect):
    gc.disable()
    gc.collect()  # lest the next allocations set off a search
    try:
        cycle = [torch.zeros(1000)]
        cycle.append(cycle)
        there = weakref.ref(cycle[0])
        del cycle
        gc.enable()
        with measure_peak("cpu", collect=collect):
            assert (there() is None) == collect
            assert gc.isenabled() == collect
        assert gc.isenabled()
    finally:
        gc.enable()


def test_the_log_of_torch_is_quiet_about_older_blocks_and_about_nothing_else(capfd):
    level = cpp_log._level()
    before = level.value
    older = [torch.empty(1000) for _ in range(3)]
    with measure_peak() as peak:
        assert level.value >= 2
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: measure_peak().__enter__()).result()  # never ended
        older.clear()
    gc.collect()
    assert peak.peak_bytes == 0
    assert level.value == before
    assert "unknown size" not in capfd.readouterr().err


@pytest.mark.sweep
def test_a_thread_that_ends_while_it_is_recorded_leaves_no_line_on_stderr():
    code = """
import threading
import torch
from remat_graph.torch import AllocationRecorder

recorder = AllocationRecorder(torch.device("cpu"), shared=True)
thread = threading.Thread(target=recorder.__enter__)
thread.start()
thread.join()
recorder.drop()  # in a thread that it is not of
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "allback" not in out.stderr

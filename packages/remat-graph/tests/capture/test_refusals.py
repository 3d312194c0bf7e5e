"""What cannot be one static graph is refused, with the reason; the module stays as it was."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from remat_graph.torch import AllocationRecorder, CaptureError, MeasurementError, capture


class Refused(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.log, self.count = [], 0
        self.outside = [torch.ones(4)]
        self.made = forward

    def forward(self, x):
        return self.made(self, x)


def branch(m, x):
    return m.layer(x) if x.sum() > 0 else x


def number(m, x):
    return m.layer(x) * x.mean().item()


def selected(m, x):
    return m.layer(x)[x[:, 0] > 0.5]


def loop(m, x):
    while x.norm() > 1:
        x = m.layer(x) * 0.1
    return x


def reshapes_buffer(m, x):
    m.mean = x.mean()
    return m.layer(x)


def resizes_input(m, x):
    x.unsqueeze_(0)
    return m.layer(x)


def reads_a_list(m, x):
    return m.layer(x) * m.outside[0]


def stores_and_fails(m, x):
    m.count += 1
    m.last = m.mean = m.layer(x).mean(0)
    m.log.append(random.random() + np.random.rand())
    torch.manual_seed(3)
    raise ZeroDivisionError("by me")


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (branch, "depends on the data of a tensor at .*return m.layer.x. if x.sum"),
        (number, "depends on the data of a tensor at .*x.mean..\\.item"),
        (selected, "depends on the data of a tensor at .*x.:, 0. > 0.5"),
        (loop, "depends on the data of a tensor at .*while x.norm"),
        (reshapes_buffer, "replaces the buffer 'mean' .* another shape"),
        (resizes_input, "another shape"),
        (reads_a_list, "neither parameter, buffer, attribute nor input.*register it"),
        (stores_and_fails, "cannot be traced at .*raise ZeroDivisionError.*by me"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_refused_with_the_reason_and_left_as_it_was(forward, message):
    module, x = Refused(forward), torch.rand(3, 4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    parameters, attributes, mean = list(module.parameters()), dict(vars(module)), module.mean
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()
    with pytest.raises(CaptureError, match=message):
        capture(module, (x,), costs="estimate")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert set(vars(module)) == set(attributes)
    assert (module.count, module.log) == (0, [])
    assert module.mean is attributes["_buffers"]["mean"] is mean
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tobytes() == states[2]
    assert module.layer(torch.rand(3, 4)).shape == (3, 4)


def test_a_lazy_module_is_refused_before_its_first_call():
    module = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    x = torch.randn(3, 4)
    with pytest.raises(CaptureError, match=r"1, a LazyLinear, has no shapes .*call the model once"):
        capture(module, (x,), costs="estimate")
    module(x)
    assert capture(module, (x,), costs="estimate").graph.ops


def test_changing_what_has_a_gradient_before_it_is_refused():
    module = Refused(lambda m, x: m.layer(x.mul_(2)))
    with pytest.raises(CaptureError, match="input 0 is changed in place and requires a gradient"):
        capture(module, (2 * torch.rand(3, 4, requires_grad=True),), costs="estimate")
    capture(module, (torch.rand(3, 4),), costs="estimate")


def test_the_users_file_and_line_are_named():
    with pytest.raises(CaptureError) as error:
        capture(Refused(branch), (torch.rand(3, 4),), costs="estimate")
    line = branch.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in str(error.value)


def test_the_line_is_found_in_a_folder_that_is_called_like_a_package(tmp_path):
    file = tmp_path / "remat" / "torch" / "model.py"
    source = "def forward(m, x):\n    return m.layer(x) if x.sum() > 0 else x\n"
    names = {}
    exec(compile(source, str(file), "exec"), names)
    with pytest.raises(CaptureError) as error:
        capture(Refused(names["forward"]), (torch.rand(3, 4),), costs="estimate")
    assert f"{file}:2" in str(error.value)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_a_hook_of_the_root_makes_is_refused_by_the_name_of_the_new():
    module = nn.utils.weight_norm(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"parametrizations\.weight_norm"):
        capture(module, (torch.rand(3, 4),), costs="estimate")


def test_measuring_inside_a_profiler_is_refused():
    cpu = torch.device("cpu")
    with AllocationRecorder(cpu) as recorder:
        kept = torch.ones(1000)
        with pytest.raises(RuntimeError, match=r"already running.*measure before it"):
            AllocationRecorder(cpu).__enter__()
    assert recorder.peak_bytes >= kept.nbytes


def test_recordings_that_share_the_profiler_each_see_all_of_their_time():
    cpu = torch.device("cpu")
    with AllocationRecorder(cpu, shared=True) as outer:
        first = torch.ones(100)
        with AllocationRecorder(cpu) as inner:
            outer.mark("within")
            second = torch.ones(1000)
            inner.mark("made")
            del second
        third = torch.ones(10)
    assert [mark.label for mark in outer.marks] == ["within", ""]
    assert [mark.label for mark in inner.marks] == ["made", ""]
    assert outer.marks[0].held_bytes == first.nbytes
    assert (inner.peak_bytes, inner.kept_bytes) == (4000, 0)
    assert (outer.peak_bytes, outer.kept_bytes) == (4400, first.nbytes + third.nbytes)


def test_one_that_shares_may_end_before_another_that_began_later():
    cpu = torch.device("cpu")
    first = AllocationRecorder(cpu, shared=True)
    first.__enter__()
    kept = torch.ones(10)
    with AllocationRecorder(cpu, shared=True) as second:
        kept = kept + kept[:1]
        first.__exit__(None, None, None)
        torch.ones(1000)
    assert (first.peak_bytes, second.peak_bytes) == (80, 4000)
    assert [each.is_running for each in (first, second)] == [False, False]


def test_recordings_see_nothing_of_a_block_in_which_they_are_paused():
    cpu = torch.device("cpu")
    with AllocationRecorder(cpu) as recorder, AllocationRecorder.paused():
        assert not torch._C._autograd._profiler_enabled()
    assert recorder.marks[0].held_bytes == 0
    with AllocationRecorder(cpu) as recorder:
        kept = torch.ones(10)
        with AllocationRecorder.paused():
            with AllocationRecorder(cpu) as inner:
                torch.ones(1000)
            with torch.profiler.profile():
                torch.ones(100)
            assert recorder.is_running
        recorder.mark("after")
        kept = torch.cat([kept, kept[:1]])
    assert inner.peak_bytes == 4000
    assert [(mark.label, mark.held_bytes) for mark in recorder.marks] == [("after", 40), ("", 44)]
    assert recorder.peak_bytes == 84
    with pytest.raises(ZeroDivisionError), AllocationRecorder(cpu), AllocationRecorder.paused():
        1 / 0  # noqa: B018
    assert not torch._C._autograd._profiler_enabled()


def test_in_a_backward_none_is_paused():
    seen = []

    def hook(gradient):
        with AllocationRecorder.paused():
            seen.append(torch._C._autograd._profiler_enabled())

    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    with AllocationRecorder(torch.device("cpu"), shared=True) as recorder:
        x.sum().backward()
    assert seen == [True]
    assert recorder.peak_bytes > 0


def test_the_profiler_of_a_recording_that_another_thread_dropped_can_be_ended():
    recorder = AllocationRecorder(torch.device("cpu"), shared=True)
    recorder.__enter__()
    dropping = threading.Thread(target=recorder.drop)
    dropping.start()
    dropping.join()
    with AllocationRecorder.paused(), torch.profiler.profile():
        torch.ones(100)
    assert not torch._C._autograd._profiler_enabled()


def test_in_a_backward_nothing_is_recorded_that_could_not_be_stopped():
    cpu, raised = torch.device("cpu"), []

    def hook(gradient):
        with pytest.raises(MeasurementError, match="from its backward on") as error:
            AllocationRecorder(cpu, shared=True).__enter__()
        raised.append(error)
        with AllocationRecorder(cpu) as recorder:
            torch.ones(10)
        assert recorder.peak_bytes == 40

    x = torch.ones(3, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert raised


def test_two_threads_measure_at_the_same_time():
    cpu = torch.device("cpu")
    started, ended = threading.Event(), threading.Event()

    def other():
        with AllocationRecorder(cpu) as recorder:
            kept = torch.ones(500)
            started.set()
            ended.wait()
            kept += torch.ones(500)
        return recorder.peak_bytes

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other)
        started.wait()
        with AllocationRecorder(cpu) as recorder:
            torch.ones(1000)
        ended.set()
        assert found.result() == 4000
    assert recorder.peak_bytes == 4000


@pytest.mark.parametrize("padding", [None, 0])
def test_sparse_gradients_are_refused(padding):
    """With padding torch selects rows in the backward, as many as the data have."""
    module = nn.Embedding(10, 4, sparse=True, padding_idx=padding)
    with pytest.raises(CaptureError, match="sparse=False"):
        capture(module, (torch.tensor([1, 2]),))


@pytest.mark.parametrize("mode", [torch.device("meta"), FakeTensorMode()], ids=["meta", "fake"])
def test_nothing_is_measured_without_data(mode):
    with mode:
        x = torch.rand(3, 4)
    with pytest.raises(CaptureError, match=r"nothing can be measured on the meta device, or of fa"):
        capture(nn.Linear(4, 4), (x,))
    capture(nn.Linear(4, 4), (x,), costs="estimate")


def test_inputs_on_another_device():
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda")
    with pytest.raises(CaptureError, match=r"input 0 is on cuda:0, the module on cpu"):
        capture(nn.Linear(4, 4), (x,), costs="estimate")
    with pytest.raises(CaptureError, match=r"input 0 is on cuda:0, the module on meta"):
        capture(nn.Linear(4, 4, device="meta"), (x,), costs="estimate")


class WithLoss(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        return {"loss": made.detach().sum(), "made": made}


def test_a_loss_that_needs_no_gradient():
    with pytest.raises(CaptureError, match=r"the loss that the forward returns depends on no tens"):
        capture(WithLoss(4, 4), (torch.rand(3, 4),), costs="estimate")


def test_nothing_to_train():
    module = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(CaptureError, match="no parameter of the module requires a gradient"):
        capture(module, (torch.rand(3, 4),))
    capture(module, (torch.rand(3, 4).requires_grad_(),), costs="estimate")


def test_an_output_that_depends_on_nothing_that_is_trained():
    with pytest.raises(CaptureError, match="no backward pass to plan"):
        capture(Refused(lambda m, x: x * 2), (torch.rand(3, 4),))


def test_no_output_at_all():
    with pytest.raises(CaptureError):
        capture(Refused(lambda m, x: None), (torch.rand(3, 4),))


@pytest.mark.parametrize("costs", ["guess", None, 1])
def test_costs_that_are_none(costs):
    with pytest.raises(CaptureError, match="costs="):
        capture(nn.Linear(4, 4), (torch.rand(3, 4),), costs=costs)


def test_a_buffer_of_a_shared_layer_that_is_changed_is_captured():
    norm = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), norm, nn.Sequential(norm))
    found = capture(module, (torch.rand(3, 4),), costs="estimate")
    assert len(found.program.writes) == 3

"""Tensors that are made when they are read behave as what they stand for, at any time."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch

from remat_exec import ExecutionError
from remat_exec.deferred import DeferredTensor, watched

DATA = torch.arange(24.0).view(4, 6) + 1


class Output(torch.autograd.Function):
    """Hands out a tensor that is made when read; its gradient is seen by `x`."""

    @staticmethod
    def forward(ctx, x, made):
        def make():
            made.append(True)
            return DATA.clone()

        return DeferredTensor.like(DATA.to("meta"), DATA.device, make)

    @staticmethod
    def backward(ctx, gradient):
        assert type(gradient) is torch.Tensor
        return gradient.sum(), None


@pytest.fixture
def output():
    x, made = torch.ones((), requires_grad=True), []
    tensor = Output.apply(x, made)
    tensor.made_times, tensor.x = made, x
    return tensor


def detached():
    return DeferredTensor.like(DATA.to("meta"), DATA.device, DATA.clone)


def test_what_needs_no_data_makes_none(output):
    assert isinstance(output, torch.Tensor)
    assert (output.shape, output.dtype, output.device) == (DATA.shape, DATA.dtype, DATA.device)
    assert output.requires_grad
    assert not output.detach().requires_grad
    assert output.stride() == DATA.stride()
    assert len(output) == 4
    views = [output.view(2, 12)[:, 1:], output[1:].T, *output.split(2), output.double()]
    views += [output.clone(), output.detach()[None], output.unbind()[1], output.data]
    assert all(isinstance(view, DeferredTensor) for view in views)
    assert not output.made_times
    whole = [DATA.view(2, 12)[:, 1:], DATA[1:].T, *DATA.split(2), DATA.double()]
    whole += [DATA.clone(), DATA[None], DATA[1], DATA]
    for view, expected in zip(views, whole, strict=True):
        assert view.stride() == expected.stride()
        assert view.storage_offset() == expected.storage_offset()
        assert torch.equal(view, expected)
    assert len(output.made_times) == 1


READS = {
    "print": lambda t: str(t.detach()) == str(DATA),
    "format": lambda t: f"{t.detach()[0, 1]:.1f}" == "2.0",
    "item": lambda t: t[0, 1].item() == 2,
    "tolist": lambda t: t.tolist() == DATA.tolist(),
    "numpy": lambda t: np.array_equal(t.detach().numpy(), DATA.numpy()),
    "array": lambda t: np.array_equal(np.asarray(t.detach()), DATA.numpy()),
    "forced numpy": lambda t: np.array_equal(t.numpy(force=True), DATA.numpy()),
    "equal": lambda t: bool((t == DATA).all()),
    "contains": lambda t: 5.0 in t,
    "stack": lambda t: torch.equal(torch.stack([t, t])[1], DATA),
    "into": lambda t: torch.equal(torch.zeros(5, 6).copy_(torch.cat([t, t[:1]]))[:4], DATA),
    "assigned": lambda t: bool(torch.zeros(2, 4, 6).index_put((torch.tensor(0),), t)[0, 0, 0]),
    "data_ptr": lambda t: t.data_ptr() != 0,
    "storage": lambda t: t.untyped_storage().nbytes() == DATA.nbytes,
    "dlpack": lambda t: torch.equal(torch.from_dlpack(t.detach()), DATA),
    "pickle": lambda t: torch.equal(pickle.loads(pickle.dumps(t)), DATA),
    "copy": lambda t: torch.equal(copy.copy(t.detach()), DATA),
    "deepcopy": lambda t: torch.equal(copy.deepcopy(t.detach()), DATA),
    "out": lambda t: torch.equal(torch.add(t.detach(), 0, out=torch.empty(4, 6)), DATA),
    "iter": lambda t: [float(row[0]) for row in t.detach()] == DATA[:, 0].tolist(),
    "elements": lambda t: torch.tensor([t.detach()[0, 0], t.detach()[0, 1]]).tolist() == [1, 2],
    "columns": lambda t: torch.as_tensor([[t.detach()[0, 0]], [t.detach()[1, 0]]]).sum() == 8,
    "elements by type": lambda t: torch.Tensor([*t.detach()[0]]).tolist() == DATA[0].tolist(),
    "unbound": lambda t: t.new_tensor(t.detach()[1].unbind()).tolist() == DATA[1].tolist(),
    "loss": lambda t: bool(torch.nn.functional.cross_entropy(t, torch.zeros(4).long()) > 0),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_right(output, name):
    with torch.no_grad() if name in ("into", "out") else torch.enable_grad():
        assert READS[name](output)
    assert len(output.made_times) == 1


def test_an_element_is_made_at_once(output):
    row = output[1]
    assert not output.made_times
    element = row[2]
    assert len(output.made_times) == 1
    assert type(element) is torch.Tensor
    (3 * element).backward()
    assert output.x.grad == 3
    number = DeferredTensor.like(DATA[0, 0].to("meta"), DATA.device, DATA[0, 0].clone)
    assert isinstance(number.detach(), DeferredTensor)  # an output that is a number waits


def test_it_is_saved_as_an_ordinary_tensor(output):
    assert type(pickle.loads(pickle.dumps(output.detach()))) is torch.Tensor
    assert type(copy.deepcopy(output.detach())) is torch.Tensor
    assert pickle.loads(pickle.dumps(output)).requires_grad
    file = io.BytesIO()
    torch.save({"output": output.detach()}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["output"], DATA)
    with pytest.raises(RuntimeError, match="requires grad"):
        output.numpy()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(output)


def test_a_gradient_comes_through_it(output):
    (output.square().sum() + output[0].float().sum()).backward()
    assert output.x.grad == 2 * DATA.sum() + 6


def test_changes_in_place_are_seen_by_views_and_not_by_copies(output):
    view, copied, cast = output.view(-1), output.clone(), output.double()
    output.mul_(2)
    row = output[0]
    row.zero_()
    assert isinstance(view, DeferredTensor)
    expected = 2 * DATA
    expected[0] = 0
    assert torch.equal(output.detach(), expected)
    assert torch.equal(view.detach(), expected.view(-1))
    assert torch.equal(copied.detach(), DATA)
    assert torch.equal(cast.detach(), DATA.double())
    output.sum().backward()
    assert output.x.grad == 2 * 18  # what is set to zero has no gradient


@pytest.mark.parametrize("in_place", [lambda t: t.add_(1), lambda t: np.add(t, 1, out=t.numpy())])
@pytest.mark.parametrize("read_first", [True, False])
def test_changes_of_an_ordinary_view_are_not_seen_by_copies(in_place, read_first):
    tensor = detached()
    view, early = tensor.view(-1), tensor[1:].clone()
    if read_first:
        assert tensor.sum() == DATA.sum()
    late, cast = view.clone(), tensor.detach().double()
    in_place(tensor.detach())
    assert torch.equal(view, DATA.view(-1) + 1)
    assert torch.equal(early, DATA[1:])
    assert torch.equal(late, DATA.view(-1))
    assert torch.equal(cast, DATA.double())


def test_a_copy_that_waits_is_made_once():
    tensor, made = detached(), []
    copied = tensor[1:].half()
    copied._make = lambda make=copied._make: made.append(True) or make()
    del tensor
    assert copied.sum() == DATA[1:].sum()
    assert made == [True]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.unsqueeze_(0),
        lambda t: t.t_(),
        lambda t: t.resize_(2, 2),
        lambda t: t.set_(torch.zeros(3)),
        lambda t: setattr(t, "data", torch.zeros(2)),
    ],
)
def test_a_change_of_its_shape_is_refused(change):
    tensor = detached()
    with pytest.raises(ExecutionError, match="made when it is read"):
        change(tensor)
    assert torch.equal(tensor, DATA)


@pytest.mark.parametrize("read_first", [True, False])
def test_python_changes_its_elements_in_place(read_first):
    tensor = detached()
    view = tensor[:2]
    if read_first:
        assert tensor.sum() == DATA.sum()
    ones = torch.ones(2, 6)
    assert view.apply_(lambda a: a + 1) is view
    assert view.map_(ones, lambda a, b: a * 2 + b) is view
    assert view.map2_(ones, ones, lambda a, b, c: a + b + c) is view
    expected = DATA.clone()
    expected[:2] = (DATA[:2] + 1) * 2 + 3
    assert torch.equal(tensor, expected)
    assert torch.equal(ones.map_(detached()[2:], lambda a, b: a + b), DATA[2:] + 1)


def test_python_changes_no_elements_of_what_needs_a_gradient(output):
    with pytest.raises(RuntimeError, match="requires grad"):
        output.apply_(lambda a: a)


@pytest.mark.parametrize("read_first", [True, False])
@pytest.mark.parametrize("part", [lambda t: t, lambda t: t.detach()[1:].T, lambda t: t.double()])
def test_another_tensor_takes_its_memory_as_data(output, part, read_first):
    taken, whole = part(output), part(DATA)
    if read_first:
        assert taken.sum() == whole.sum()
    parameter = torch.nn.Parameter(torch.zeros_like(whole))
    parameter.sum().backward()
    parameter.data = taken
    assert len(output.made_times) == 1
    assert type(parameter) is torch.nn.Parameter
    assert parameter.stride() == whole.stride()
    assert torch.equal(parameter, whole)
    with torch.no_grad():
        parameter.mul_(2)  # as it is their memory
    assert torch.equal(taken.detach(), 2 * whole)
    parameter.grad = None
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones_like(whole))


def test_a_conjugate_is_no_data_of_another_tensor():
    data = torch.complex(DATA, DATA)
    tensor = DeferredTensor.like(data.to("meta"), data.device, data.clone)
    taker = torch.zeros(4, 6, dtype=data.dtype)
    with pytest.raises(ExecutionError, match="use a clone"):
        taker.data = tensor.conj()
    taker.data = tensor.conj().clone()
    assert torch.equal(taker, data.conj())


def test_other_tensors_with_a_dispatch_of_their_own_are_set_as_data_as_before():
    with torch._subclasses.FakeTensorMode():
        taker, taken = torch.zeros(4, 6), torch.ones(6, 4)
        taker.data = taken
        with torch.inference_mode():
            other = torch.zeros(4, 6)
            other.data = torch.ones(2)
    assert (taker.shape, other.shape) == ((6, 4), (2,))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        torch.zeros(2).data = torch.zeros(2).to_sparse()


def test_a_compiled_function_takes_it(output):
    twice = torch.compile(lambda t: (t * 2).sum(), backend="eager")  # with a break of its graph
    assert twice(output) == 2 * DATA.sum()


def test_an_output_that_is_there_says_when_it_is_read():
    reads = []
    tensor = watched(DATA, lambda: reads.append(True))
    view = tensor.detach()[1:].half()
    assert not reads
    assert view.sum() == DATA[1:].sum()
    assert tensor.sum() == DATA.sum()
    assert len(reads) == 1

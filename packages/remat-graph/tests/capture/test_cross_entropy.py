"""Cross entropies by rows: the kernel beside torch's, and the losses in whose place it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from remat_graph import Numerics
from remat_graph.torch import TensorFacts, capture
from remat_graph.torch.cost.memory import AllocationRecorder
from remat_graph.torch.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_over,
    workspace_bytes,
)
from remat_graph.torch.ways.slicing import run_in_slices

aten = torch.ops.aten
CLASSES = 4096
_NONE, _MEAN, _SUM = 0, 1, 2


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    classes=st.integers(2, 40),
    reduction=st.sampled_from([_NONE, _MEAN, _SUM]),
    weighted=st.booleans(),
    ignored=st.sampled_from([-100, 1, 0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    scale=st.sampled_from([1.0, 300.0]),
    at_once=st.integers(1, 10),
    seed=st.integers(0, 999),
)
def test_it_gives_what_torch_gives(
    rows, classes, reduction, weighted, ignored, dtype, scale, at_once, seed
):
    generator = torch.Generator().manual_seed(seed)
    scores = (scale * torch.randn(rows, classes, generator=generator)).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    target[0] = ignored
    long = torch.promote_types(dtype, torch.float32)
    weight = torch.rand(classes, generator=generator).to(long) if weighted else None
    logs = aten._log_softmax(scores.to(long), 1, False)
    loss, total = aten.nll_loss_forward(logs, target, weight, reduction, ignored)
    grad = torch.randn(loss.shape, generator=generator).to(long)
    of_logs = aten.nll_loss_backward(grad, logs, target, weight, reduction, ignored, total)
    of_scores = aten._log_softmax_backward_data(of_logs, logs, 1, long).to(dtype)
    found, weight_of_all = cross_entropy(scores, target, weight, reduction, ignored, long, at_once)
    args = grad, target, weight, reduction, ignored, weight_of_all, long, at_once
    gradient = cross_entropy_backward(scores, *args)
    over = scores.clone()
    assert cross_entropy_over(over, *args) is over
    torch.testing.assert_close(found, loss, equal_nan=True)
    if reduction != _NONE:
        torch.testing.assert_close(weight_of_all, total)
    torch.testing.assert_close(gradient, of_scores, equal_nan=True)
    assert torch.equal(over.nan_to_num(), gradient.nan_to_num())


@pytest.mark.parametrize("at_once", [3, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_it_takes_no_more_beside_than_it_says(dtype, at_once):
    scores, target = torch.randn(500, 4096).to(dtype), torch.randint(4096, (500,))
    how = target, None, _MEAN, -100
    own = torch.float32, at_once
    most = workspace_bytes(TensorFacts.of(scores), *own)
    with AllocationRecorder(scores.device) as recorder:
        _, total = cross_entropy(scores, *how, *own)
    assert recorder.requested_bytes <= most
    grad = torch.ones(())
    with AllocationRecorder(scores.device) as recorder:
        cross_entropy_over(scores, grad, *how, total, *own)
    assert recorder.requested_bytes <= most


def test_a_target_that_is_no_class_is_refused_as_by_torch():
    scores = torch.randn(3, 5)
    for wrong in (5, -1):
        with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds"):
            cross_entropy(scores, torch.tensor([0, wrong, 1]), None, _MEAN, -100, torch.float32, 2)


class Head(nn.Module):
    """A projection and a loss of what it gives."""

    def __init__(self, loss, dtype=torch.float32, classes=CLASSES):
        super().__init__()
        self.project = nn.Linear(8, classes, bias=False).to(dtype)
        self.loss = loss

    def forward(self, x, target):
        return self.loss(self.project(x), target)


def flat(scores, target):
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


LOSSES = {
    "flat": flat,
    "longer": lambda scores, target: flat(scores.float(), target),
    "shifted": lambda scores, target: flat(scores[:, :-1].contiguous(), target[:, 1:]),
    "capped": lambda scores, target: flat(30 * torch.tanh(scores / 30), target),
    "summed": lambda scores, target: functional.cross_entropy(
        scores.flatten(0, 1), target.flatten(), reduction="sum"
    ),
    "each": lambda scores, target: functional.cross_entropy(
        scores.flatten(0, 1), target.flatten(), reduction="none"
    ).square().mean(),
    "weighted": lambda scores, target: functional.cross_entropy(
        scores.flatten(0, 1), target.flatten(), torch.linspace(0.1, 2, scores.shape[-1])
    ),
    "ignoring": lambda scores, target: functional.cross_entropy(
        scores.flatten(0, 1), target.flatten().masked_fill(target.flatten() % 3 == 0, -7),
        ignore_index=-7,
    ),
    "in two steps": lambda scores, target: functional.nll_loss(
        scores.flatten(0, 1).log_softmax(-1), target.flatten()
    ),
    "twice": lambda scores, target: flat(scores, target) + 2 * flat(scores[:, :3], target[:, :3]),
}  # fmt: skip


def called(captured):
    return [call.name for call in captured.program.calls.values()]


def sample(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 6, 8, dtype=dtype), torch.randint(CLASSES, (2, 6))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [  # each in one precision, in turn; in the other in a sweep
        pytest.param(name, dtype, marks=() if (number + at) % 2 == 0 else pytest.mark.sweep)
        for number, name in enumerate(LOSSES)
        for at, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_a_loss_is_one_call_in_each_half(name, dtype):
    module, call = Head(LOSSES[name], dtype), sample(dtype)
    plain = capture(module, call)
    able = plain.with_alternatives(Numerics.ROUNDING)
    is_long = dtype == torch.float32 or name == "longer"
    count = {"twice": 2}.get(name, 1) if is_long else 0
    assert called(able).count("cross_entropy") == count
    assert called(able).count("cross_entropy_backward") == count
    assert able.has_other_ops == (count > 0)
    assert called(plain.with_alternatives(Numerics.BITWISE)).count("cross_entropy") == 0
    assert able.without_alternatives().program is plain.program
    if count:
        inside = {op for cuts in able.cuts for cut in cuts for op in cut.ops}
        assert any(op.endswith("__of_scores") for op in inside)
        gone = {"aten._log_softmax.default", "aten.nll_loss_backward.default"}
        assert gone.isdisjoint(called(able))
        if name == "longer":
            assert not any("_to_copy" in each for each in called(able))
        numerics = {op.name: op.numerics for op in able.graph.ops}
        assert all(
            numerics[op] is Numerics.ROUNDING for op in numerics if op.endswith("__of_scores")
        )


@pytest.mark.parametrize("name", ["flat", "longer", "shifted"])
def test_the_gradient_is_written_over_the_scores(name):
    able = capture(Head(LOSSES[name]), sample()).with_alternatives(Numerics.ROUNDING)
    (pairs,) = (op.overwrites for op in able.graph.ops if "backward_data__of_scores" in op.name)
    assert len(pairs) == 1


@pytest.mark.parametrize(
    "loss",
    [
        lambda scores, target: functional.cross_entropy(
            scores.flatten(0, 1), target.flatten(), label_smoothing=0.1
        ),
        lambda scores, target: functional.cross_entropy(scores.transpose(1, 2), target),
        lambda scores, target: flat(scores, target) + scores.log_softmax(-1).square().mean(),
        lambda scores, target: functional.kl_div(
            scores.log_softmax(-1),
            functional.one_hot(target, CLASSES).float(),
            reduction="batchmean",
        ),
    ],
    ids=["smoothed", "classes in the middle", "scores read twice", "another loss"],
)
def test_what_stays_right_beside_it(loss):
    """Log-probabilities that something else reads are made as ever."""
    able = capture(Head(loss), sample()).with_alternatives(Numerics.ROUNDING)
    calls = called(able)
    assert calls.count("cross_entropy") == calls.count("cross_entropy_backward") <= 1
    assert any("_log_softmax.default" in each for each in calls)


def test_few_classes_stay_as_they_are():
    module = Head(flat, classes=1000)
    x, target = sample()
    able = capture(module, (x, target % 1000)).with_alternatives(Numerics.ROUNDING)
    assert not able.has_other_ops


def made_up(facts):
    if facts.dtype is torch.int64:
        return torch.zeros(facts.shape, dtype=facts.dtype)
    return torch.randn(facts.shape, dtype=facts.dtype)


@pytest.mark.parametrize("slices", [1, 3, 16, 256])
def test_slices_take_no_more_than_they_say(slices):
    """What a part takes does not shrink with the slice, until that has fewer rows."""
    x, target = torch.randn(4, 64, 8), torch.randint(CLASSES, (4, 64))
    able = capture(Head(flat), (x, target), costs="estimate").with_alternatives(Numerics.ROUNDING)
    kinds = [(kind, slices) for kind in range(len(able.cuts))]
    assert kinds
    for kind in kinds:
        for call in able.in_slices([kind]).program.calls.values():
            if call.target is run_in_slices:
                body, count, *_ = call.args
                tensors = [made_up(body.facts[name]) for name in body.body.inputs]
                with AllocationRecorder(x.device) as recorder:
                    results = body.run(tensors, body.bounds(count))
                given = sum(result.untyped_storage().nbytes() for result in results)
                assert recorder.requested_bytes - given <= call.workspace_bytes + 4096

"""Who reads the gradient of an output that the model reads itself is refused, others are not."""

import functools
import gc
import io
import warnings
import weakref

import pytest
import torch
from exec_cases.models import Case
from exec_cases.reading import Reading
from torch import distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from remat_exec import BackwardError
from remat_exec.partial_gradients import _copy_of

READS = {
    "whole": lambda m, h: m.head(h),
    "a part": lambda m, h: h[:, :2].exp(),
    "a part of a view": lambda m, h: h.view(2, 16)[0].exp(),
    "through others": lambda m, h: m.head(h).softmax(1).log(),
    "twice": lambda m, h: h * h.cos(),
    "a part of a split": lambda m, h: h.split(4, 1)[1],
}


NOT_READ = {
    "detached": lambda m, h: m.head(h.detach()),
    "its largest alone": lambda m, h: m.head.weight[h.argmax(1)],
    "a view that is returned": lambda m, h: h[:, 1],
}


@functools.cache
def case_of(read):
    """Make a case, which is captured once for all uses."""
    return Case("reading", lambda: Reading(read), lambda: (torch.randn(4, 6),), torch.sum)


def outputs(read, *, planned=True):
    case = case_of(read)
    model = case.remat() if planned else case.model()
    return (*model(*case.args()), model.module if planned else model)


def total(hidden, out):
    return hidden.square().sum() + out.sum()


def see(seen):
    """Make a hook that reads what it is given."""
    return lambda *given: seen.extend(g + 0 for g in given[-1] if g is not None)


def by_hook(hidden, out, module):
    seen = []
    hidden.register_hook(lambda grad: seen.append(3 * grad))
    loss = total(hidden, out)
    del hidden  # the hook stays
    loss.backward()
    return seen


def by_changing(hidden, out, module):
    hidden.register_hook(lambda grad: 3 * grad)
    total(hidden, out).backward()
    return []


def by_replacing(hidden, out, module):
    hidden.register_hook(lambda grad: torch.ones(4, 8))
    total(hidden, out).backward()
    return []


def by_turning(hidden, out, module):
    hidden.register_hook(lambda grad: grad.view(8, 4).view(4, 8))
    total(hidden, out).backward()
    return []


def by_retaining(hidden, out, module):
    hidden.retain_grad()
    total(hidden, out).backward()
    return [hidden.grad + 0]


def by_asking(hidden, out, module):
    return [g + 0 for g in torch.autograd.grad(total(hidden, out), hidden)]


def by_asking_for_others(hidden, out, module):
    weight = module.hidden.weight
    return [g + 0 for g in torch.autograd.grad(total(hidden, out), [hidden, weight])]


def by_edge(hidden, out, module):
    edge = torch.autograd.graph.get_gradient_edge(hidden)
    weight = module.hidden.weight
    return [g + 0 for g in torch.autograd.grad(total(hidden, out), [weight, edge])]


def by_inputs(hidden, out, module):
    total(hidden, out).backward(inputs=[hidden, module.hidden.weight])
    return [hidden.grad + 0]


def by_hook_of_node(hidden, out, module):
    seen = []
    hidden.grad_fn.register_prehook(see(seen))
    total(hidden, out).backward()
    return seen


def by_hook_after_node(hidden, out, module):
    seen = []
    hidden.grad_fn.register_hook(see(seen))
    total(hidden, out).backward()
    return seen


def by_hook_of_several(hidden, out, module):
    seen = []
    torch.autograd.graph.register_multi_grad_hook([out, hidden], see(seen))
    total(hidden, out).backward()
    return seen


def by_passing_it_on(hidden, out, module):
    (gradient,) = torch.autograd.grad(total(hidden, out), hidden, retain_graph=True)
    hidden.backward(gradient)
    return []


ASKS = [
    by_hook,
    by_changing,
    by_replacing,
    by_retaining,
    by_asking,
    by_asking_for_others,
    by_edge,
    by_inputs,
    by_hook_of_node,
    by_hook_after_node,
    by_hook_of_several,
    by_passing_it_on,
]


def compared(use, read):
    """Give pairs of what a use gives, and of gradients, by a plan and in eager."""
    found = []
    for planned in (True, False):
        hidden, out, module = outputs(read, planned=planned)
        module.zero_grad()
        given = use(hidden, out, module)
        found.append([*given, *(parameter.grad for parameter in module.parameters())])
    return zip(*found, strict=True)


def are_equal(pairs):
    return all(b is None if a is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("ask", [*ASKS, by_turning])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_part_of_a_gradient_is_refused(read, ask):
    with pytest.raises(BackwardError, match="output 0 of a region is asked for"):
        ask(*outputs(read))


def test_of_several_ranks_the_refusal_says_what_is_left_behind():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(BackwardError, match=r"Under FSDP2 go on from a checkpoint"):
            by_changing(*outputs(READS["whole"]))
    finally:
        distributed.destroy_process_group()
    with pytest.raises(BackwardError, match=r"output\.clone\(\) from the model$"):
        by_changing(*outputs(READS["whole"]))


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("read", NOT_READ.values(), ids=NOT_READ)
def test_whole_gradients_are_eagers(read, ask):
    assert are_equal(compared(ask, read))


def looking(hidden, out, module):
    seen = []
    hidden.register_hook(lambda grad: seen.append(grad.shape))
    hidden.grad_fn.register_prehook(lambda grads: seen.append(grads[0].detach().dtype))
    torch.autograd.graph.register_multi_grad_hook([hidden, out], seen.append, mode="any")
    hidden.retain_grad()
    total(hidden, out).backward()
    assert len(seen) == 3
    return []


def taking_off(hidden, out, module):
    handle = hidden.register_hook(lambda grad: 3 * grad)
    seen = []
    out.register_hook(seen.append)
    handle.remove()
    total(hidden, out).backward()
    return seen


def asking_for_the_weight(hidden, out, module):
    found = torch.autograd.grad(total(hidden, out), [hidden, module.hidden.weight])
    return found[1:]


def coming_alone(hidden, out, module):
    hidden.retain_grad()
    hidden.square().sum().backward()
    return [hidden.grad]


def of_the_other(hidden, out, module):
    out.retain_grad()
    return [*torch.autograd.grad(out.square().sum(), out), out.grad]


def coming_twice(hidden, out, module):
    views = hidden.t()[1:3], hidden.view(-1)[3:]
    (total(hidden, out) + views[0].exp().sum() + views[1].exp().sum()).backward()
    return []


def within_anomaly_mode(hidden, out, module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            total(hidden, out).backward()
    return []


def within_another_mode(hidden, out, module):
    with FlopCounterMode(display=False):
        total(hidden, out).backward()
    return []


USES = [
    looking,
    taking_off,
    asking_for_the_weight,
    coming_alone,
    of_the_other,
    coming_twice,
    within_anomaly_mode,
    within_another_mode,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_who_does_not_read_a_part_is_not_refused(read, use):
    assert are_equal(compared(use, read))


def test_outputs_are_written_to_files_without_a_warning():
    hidden, *_ = outputs(READS["whole"])
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file), hidden)


def test_what_is_watched_is_let_go_of_without_the_collector():
    hidden, out, _ = outputs(READS["whole"])
    held = nn.Linear(2, 2)
    there = weakref.ref(held)
    handle = hidden.register_hook(lambda grad, held=held: None)
    gc.disable()
    try:
        del hidden, out, handle, held
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((), ()),
        ((2, 3), (3, 1)),
        ((2, 3, 4), (12, 1, 3)),  # turned
        ((2, 3, 4), (48, 8, 1)),  # with gaps
        ((2, 3, 4), (0, 4, 1)),  # expanded
        ((2, 1, 3), (3, 7, 1)),
        ((2, 0), (1, 1)),
        ((2, 2), (1, 1)),  # overlapping
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_two_that_lie_alike_lies_as_torch_says(shape, stride, dtype):
    one, other = (torch.empty_strided(shape, stride, dtype=dtype, device="meta") for _ in range(2))
    added, like = one + other, _copy_of(torch.Size(shape), stride, dtype)
    assert (added.shape, added.stride(), added.dtype) == (like.shape, like.stride(), like.dtype)

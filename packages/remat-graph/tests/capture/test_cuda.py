"""What only CUDA does, as far as fake tensors and a stand-in for its allocator's figures go."""

import math
from dataclasses import replace

import pytest
import torch
from torch import library, nn
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from remat_graph.torch import AllocationRecorder, CaptureError, LossCost, capture
from remat_graph.torch.calls import GENERATOR_STATE_BYTES
from remat_graph.torch.cost import cuda_memory
from remat_graph.torch.cost.costs import _measure
from remat_graph.torch.tracing.fakes import fake_mode_of

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


MASKED = [aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention]


class Attention(nn.Module):
    """Attention by one of the operators of CUDA, which have fake versions for any device."""

    def __init__(self, operator, **options):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.operator, self.options = operator, options

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.operator(q, k, v, **self.options)[0].square().mean()


def efficient(dropout):
    operator = aten._scaled_dot_product_efficient_attention
    return Attention(
        operator, attn_bias=None, compute_log_sumexp=True, dropout_p=dropout, is_causal=True
    )


def flash(dropout):
    return Attention(aten._scaled_dot_product_flash_attention, dropout_p=dropout, is_causal=True)


def on_cuda(captured):
    """Give the capture as it is on CUDA; torch differentiates no fake tensor there without one."""
    joint = captured._joint

    def moved(item):
        return CUDA if isinstance(item, torch.device) else item

    with fake_mode_of(joint.graph):
        for node in joint.graph.nodes:
            node.args = map_aggregate(node.args, moved)
            node.kwargs = map_aggregate(node.kwargs, moved)
            if node.op == "placeholder":
                node.meta["val"] = torch.empty_like(node.meta["val"], device=CUDA)
    return captured.variant(captured.missing)


def captured_on_cuda(module, *args):
    return on_cuda(capture(module, args, costs="estimate"))


def op_of(graph, name):
    return next(op for op in graph.ops if op.name == name)


def calls_of(program, target):
    return [(name, call) for name, call in program.calls.items() if call.target is target]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_seeds_of_efficient_attention_are_on_the_host_and_take_no_memory_of_the_device(dropout):
    captured = captured_on_cuda(efficient(dropout), torch.rand(2, 6, 16))
    program, graph = captured.program, captured.graph
    ((name, call),) = calls_of(program, aten._scaled_dot_product_efficient_attention.default)
    *on_device, seed, offset = call.results
    assert {program.facts[result].device for result in on_device} == {CUDA}
    assert {program.facts[result].device.type for result in (seed, offset)} == {"cpu"}
    assert call.random == (CUDA if dropout else None)
    assert [graph.value_by_name[result].size_bytes for result in (seed, offset)] == [0, 0]
    ((_, backward),) = calls_of(
        program, aten._scaled_dot_product_efficient_attention_backward.default
    )
    assert {seed, offset} <= set(backward.reads)
    assert op_of(graph, name).replayable


def test_flash_attention_with_dropout_is_one_op_whose_seeds_are_on_the_device():
    captured = captured_on_cuda(flash(0.1), torch.rand(2, 6, 16))
    program = captured.program
    ((name, call),) = calls_of(program, aten._scaled_dot_product_flash_attention.default)
    results = [result for result in call.results if result is not None]
    assert {program.facts[result].device for result in results} == {CUDA}
    assert call.random == CUDA
    assert op_of(captured.graph, name).workspace_bytes == 0


class Masked(Attention):
    def forward(self, x):
        place = torch.arange(x.shape[1], device=x.device)
        later = place[:, None] < place[None, :]
        mask = torch.zeros(x.shape[0], 2, *later.shape, device=x.device)
        self.options["attn_bias"] = mask.masked_fill(later, -torch.inf)
        return super().forward(x)


@pytest.mark.parametrize("operator", MASKED)
def test_a_causal_mask_is_computed_on_the_host_and_goes(operator):
    module = Masked(operator, compute_log_sumexp=True, dropout_p=0.1)
    program = captured_on_cuda(module, torch.rand(2, 6, 16)).program
    attention = [call for call in program.calls.values() if "attention" in str(call.target)]
    assert len(attention) == 2
    for call in attention:
        names = [argument.name for argument in call.target._schema.arguments]
        given = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        assert (given["attn_bias"], given["is_causal"]) == (None, True)
    assert not any("masked_fill" in name for name in program.calls)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.sweep),
        "resnet",
        pytest.param("fno", marks=pytest.mark.sweep),
    ],
)
def test_a_model_has_the_ops_of_the_host_in_blocks_of_the_allocator_without_generators(name):
    example = zoo.build(name)
    host = capture(example.model, example.args, example.kwargs, costs="estimate")
    there = on_cuda(host)
    assert there.program.device == CUDA
    assert [op.name for op in there.graph.ops] == [op.name for op in host.graph.ops]
    blocks = {v.name: math.ceil(v.size_bytes / 512) * 512 for v in host.graph.values}
    blocks["loss@kept"] = host.loss.kept_bytes
    assert {value.name: value.size_bytes for value in there.graph.values} == blocks
    drawing = {name for name, call in host.program.calls.items() if call.random is not None}
    for op, op_there in zip(host.graph.ops, there.graph.ops, strict=True):
        state = GENERATOR_STATE_BYTES if op.name in drawing else 0
        assert op.workspace_bytes == op_there.workspace_bytes + state
    assert all(op.time > 0 for op in there.graph.ops if op.name in there.program.calls)


@library.custom_op("remat_tests::recurrent", mutates_args=())
def recurrent(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, torch.ones(1000, dtype=torch.uint8)


@recurrent.register_fake
def _(x):
    return torch.empty_like(x), x.new_empty(0, dtype=torch.uint8)


@library.custom_op("remat_tests::recurrent_backward", mutates_args=())
def recurrent_backward(gradient: torch.Tensor, reserve: torch.Tensor) -> torch.Tensor:
    return gradient * 2


@recurrent_backward.register_fake
def _(gradient, _reserve):
    return torch.empty_like(gradient)


recurrent.register_autograd(
    lambda ctx, gradient, _: recurrent_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Recurrent(nn.Linear):
    def forward(self, x):
        return recurrent(super().forward(x).T)[0].sum()


def test_what_an_operator_keeps_has_its_real_size_where_fake_tensors_say_none():
    """As of `_cudnn_rnn`; on the CPU operators are looked at that read permuted tensors."""
    graph = capture(Recurrent(4, 4), (torch.rand(3, 4),)).graph
    (name,) = (op.name for op in graph.ops if op.name == "recurrent")
    *_, reserve = op_of(graph, name).outputs
    assert graph.value_by_name[reserve].size_bytes == 1000


class WithHostTable(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            table, _ = torch.arange(1000.0, device="cpu").sort()  # its places are workspace
        return super().forward(x).sum() + table.sum().to(x.device)


def test_what_is_computed_on_the_host_takes_no_memory_of_the_device():
    host = capture(WithHostTable(4, 4), (torch.rand(3, 4),), costs="estimate")
    program = host.program
    (table, _) = program.calls["sort"].results
    assert host.graph.value_by_name[table].size_bytes == 4000
    assert _measure(program, program.calls["sort"], torch.device("cpu")).workspace_bytes >= 8000
    facts = dict(program.facts)
    for name in program.gradients:  # the parameters are on the device
        facts[name] = replace(facts[name], device=CUDA)
    moved = replace(program, facts=facts)
    assert moved.device == CUDA
    assert moved.graph({}, {}, LossCost(0, 0)).value_by_name[table].size_bytes == 0
    assert _measure(moved, moved.calls["sort"], torch.device("cpu")).workspace_bytes == 0


def test_fake_tensors_on_a_device_that_is_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = nn.Linear(4, 4, bias=False)
    with FakeTensorMode():
        module.weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
        x = torch.empty(3, 4, device="cuda")
    with pytest.raises(CaptureError, match=r"on cuda:0, and .* make the model on meta"):
        capture(module, (x,), costs="estimate")


class Caching:
    """The figures of a caching allocator: blocks of 512 bytes, large ones with a remainder.

    A block that `waits` for another stream is active until something is allocated after a wait.
    """

    def __init__(self, monkeypatch):
        self.blocks, self.asked, self.peak, self.asked_peak = [], [], 0, 0
        self.waiting, self.active_peak, self.is_waited_for = [], 0, False
        self.workspaces = self.waits = 0
        for name, stand_in in (
            ("current_device", lambda: 0),
            ("synchronize", self.synchronize),
            ("memory_stats_as_nested_dict", self.figures),
            ("reset_peak_memory_stats", self.start_anew),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(cuda_memory, "make_workspaces", self.make_workspaces)
        monkeypatch.setattr(torch, "empty", self.allocate_and_free)

    def synchronize(self, _):
        self.is_waited_for = True
        self.waits += 1

    def allocate_and_free(self, size, *, dtype, device):
        self.allocate(size)
        self.free()

    def make_workspaces(self, device):
        assert device == CUDA
        if not self.workspaces:
            self.allocate(2**23)
        self.workspaces += 1

    def allocate(self, size):
        if self.is_waited_for:
            self.waiting.clear()
        block = math.ceil(size / 512) * 512
        self.blocks.append(block if size <= 2**20 else math.ceil(block / 2**20) * 2**20)
        self.asked.append(size)
        self.peak = max(self.peak, sum(self.blocks))
        self.active_peak = max(self.active_peak, sum(self.blocks) + sum(self.waiting))
        self.asked_peak = max(self.asked_peak, sum(self.asked))

    def free(self, *, waits=False):
        block, _ = self.blocks.pop(), self.asked.pop()
        if waits:
            self.waiting.append(block)
            self.is_waited_for = False

    def start_anew(self, _):
        self.peak, self.asked_peak = sum(self.blocks), sum(self.asked)
        self.active_peak = sum(self.blocks) + sum(self.waiting)

    def figures(self, _):
        def entry(current, peak):
            return {"all": {"current": current, "peak": peak}}

        return {
            "allocated_bytes": entry(sum(self.blocks), self.peak),
            "active_bytes": entry(sum(self.blocks) + sum(self.waiting), self.active_peak),
            "requested_bytes": entry(sum(self.asked), self.asked_peak),
            "reserved_bytes": entry(2**25, 2**26),
        }


@pytest.fixture
def allocator(monkeypatch):
    return Caching(monkeypatch)


def test_blocks_what_was_asked_for_and_what_is_reserved_are_told_apart(allocator):
    allocator.allocate(700)
    with AllocationRecorder(torch.device("cuda")) as recorder:
        allocator.allocate(2**20 + 100)
        allocator.free()
        allocator.allocate(10)
    assert recorder.peak_bytes == 2**21
    assert recorder.requested_bytes == 2**20 + 100
    assert recorder.reserved_bytes == 2**26
    assert recorder.kept_bytes == 512


def test_a_block_that_waits_for_another_stream_counts_until_it_was_waited_for(allocator):
    allocator.allocate(512)
    allocator.free(waits=True)  # was there before, and is not let go of in the block
    with AllocationRecorder(CUDA) as recorder:
        allocator.allocate(1024)
        allocator.free(waits=True)
        allocator.allocate(2048)
        recorder.mark("waited for")
        allocator.free()
    seen = [(mark.held_bytes, mark.peak_bytes) for mark in recorder.marks]
    assert seen == [(2048, 3072), (0, 2048)]
    assert allocator.waits == 2  # before the first, and at the first mark


def test_where_no_block_waits_for_a_stream_neither_does_the_host(allocator):
    with AllocationRecorder(CUDA) as recorder:
        allocator.allocate(1024)
        recorder.mark("one")
        allocator.free()
    assert [mark.peak_bytes for mark in recorder.marks] == [1024, 1024]
    assert allocator.waits == 0


def test_marks_have_the_peak_since_the_one_before(allocator):
    with AllocationRecorder(CUDA) as recorder:
        allocator.allocate(1024)
        allocator.allocate(1024)
        allocator.free()
        recorder.mark("first")
        allocator.allocate(512)
        allocator.free()
        recorder.mark("second")
    seen = [(mark.label, mark.held_bytes, mark.peak_bytes) for mark in recorder.marks]
    assert seen == [("first", 1024, 2048), ("second", 1024, 1536), ("", 1024, 1024)]
    assert recorder.peak_bytes == 2048


def test_who_measures_within_a_measured_block_takes_nothing_from_it(allocator):
    with AllocationRecorder(CUDA) as outer:
        allocator.allocate(4096)
        allocator.free()
        with AllocationRecorder(CUDA) as inner:
            allocator.allocate(512)
            inner.mark("in between")
            allocator.free()
    assert inner.peak_bytes == 512
    assert outer.peak_bytes == 4096


def test_who_is_paused_sees_no_maxima_of_the_block(allocator):
    with AllocationRecorder(CUDA) as outer:
        allocator.allocate(1024)
        with AllocationRecorder.paused():
            allocator.allocate(8192)
            allocator.free()
            with AllocationRecorder(CUDA) as inner:
                allocator.allocate(4096)
                allocator.free()
        allocator.allocate(512)
    assert inner.peak_bytes == 4096
    assert (outer.peak_bytes, outer.kept_bytes) == (1536, 1536)


def test_workspaces_are_made_before_what_is_measured(allocator):
    with AllocationRecorder(CUDA) as recorder:
        pass
    assert allocator.workspaces == 1
    assert recorder.peak_bytes == recorder.kept_bytes == 0


def test_workspaces_are_made_by_a_product_and_its_backward_also_without_gradients():
    seen = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        cuda_memory.make_workspaces(torch.device("cpu"))
    assert seen.count(aten.mm.default) >= 2


def test_where_torch_refuses_products_something_else_can_be_measured(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("to enable deterministic behavior ... set CUBLAS_WORKSPACE_CONFIG")

    monkeypatch.setattr(torch.Tensor, "__matmul__", refuse)
    cuda_memory.make_workspaces(torch.device("cpu"))

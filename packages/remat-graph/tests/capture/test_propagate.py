"""What is run on fake tensors again after a rewrite, and what is not."""

import pytest
import torch
from torch import nn

from remat_graph.torch import capture
from remat_graph.torch.rewrites.propagate import propagate
from remat_graph.torch.tracing.fakes import storage_key
from remat_graph.torch.tracing.joint import copy_joint

aten = torch.ops.aten


class Copying(nn.Linear):
    def forward(self, x):
        made = super().forward(x)
        return made.clone().view(-1).relu().view(2, 6), made.sigmoid()


def traced():
    joint = copy_joint(capture(Copying(4, 4), (torch.rand(3, 4),), costs="estimate")._joint)
    propagate(joint)
    return joint


def node_of(joint, target):
    return next(iter(joint.graph.find_nodes(op="call_function", target=target)))


def fakes(joint):
    return {node: node.meta["fake"] for node in joint.graph.nodes if "fake" in node.meta}


def test_nothing_is_run_again_without_a_change():
    joint = traced()
    before = fakes(joint)
    propagate(joint)
    after = fakes(joint)
    assert all(after[node] is fake for node, fake in before.items())


def test_views_of_what_changed_are_made_anew_and_new_tensors_of_the_same_shape_stay():
    joint = traced()
    clone, view = node_of(joint, aten.clone.default), node_of(joint, aten.view.default)
    relu, sigmoid = node_of(joint, aten.relu.default), node_of(joint, aten.sigmoid.default)
    before = fakes(joint)
    source = clone.args[0]
    clone.replace_all_uses_with(source)
    propagate(joint)
    assert storage_key(view.meta["fake"]) == storage_key(source.meta["fake"])
    assert storage_key(before[view]) == storage_key(before[clone])
    assert relu.meta["fake"] is before[relu]
    assert sigmoid.meta["fake"] is before[sigmoid]


def test_another_type_goes_through_to_what_reads_it():
    joint = traced()
    sigmoid = node_of(joint, aten.sigmoid.default)
    backward = node_of(joint, aten.sigmoid_backward.default)
    with joint.graph.inserting_before(sigmoid):
        wide = joint.graph.call_function(
            aten._to_copy.default, (sigmoid.args[0],), {"dtype": torch.float64}
        )
    sigmoid.args = (wide,)
    propagate(joint)
    assert sigmoid.meta["fake"].dtype == torch.float64
    assert backward.meta["fake"].dtype == torch.float64


class Scattering(nn.Module):
    def forward(self, x, part):
        return torch.slice_scatter(x[:, 2:], part, 1, 0, 3)


def test_a_scatter_takes_the_room_that_its_input_has_in_its_buffer_however_often_captured():
    args = torch.rand(4, 8, requires_grad=True), torch.rand(4, 3)
    made = Scattering()(*args)
    for costs in ("estimate", "measure", "estimate"):
        program = capture(Scattering(), args, costs=costs).program
        (fact,) = [program.facts[call] for call in program.calls if "slice_scatter" in call][:1]
        assert (fact.stride, fact.offset) == (made.stride(), made.storage_offset())
        assert fact.storage_bytes == made.untyped_storage().nbytes() > 4 * made.numel()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "loss", [nn.BCELoss, nn.HuberLoss, nn.MSELoss, nn.SmoothL1Loss, nn.SoftMarginLoss]
)
def test_a_loss_takes_the_memory_that_torch_leaves_it(loss, reduction):
    module = loss(reduction=reduction)
    x, y = torch.rand(6, 5, requires_grad=True), torch.rand(6, 5)
    real = module(x, y).untyped_storage().nbytes()
    for costs in ("estimate", "measure"):
        graph = capture(module, (x, y), costs=costs).graph
        made = graph.value_by_name[graph.ops[0].outputs[0]]
        assert made.size_bytes == real

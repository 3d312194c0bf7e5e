"""What is run on fake tensors again after a rewrite, and what is not."""

import torch
from torch import nn

from remat_graph.torch import capture
from remat_graph.torch.rewrite import copy_joint, propagate, storage_key

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

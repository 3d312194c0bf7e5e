"""`sequence` on captured models: the layers of a model are the members of its chain."""

import pytest

import zoo
from remat_graph import Block
from remat_graph.torch import capture
from remat_partition import partition


def members(name):
    """The names of the ops of each member."""
    example = zoo.build(name)
    graph = capture(example.model, example.args, example.kwargs, costs="estimate").graph
    root = partition(graph, partitioner="sequence").root
    return [list(m.op_names()) if isinstance(m, Block) else [m] for m in root.members]


def counts(found, kind):
    """How many ops of a kind are in each member that has any."""
    number = [sum(op.startswith(kind) for op in ops) for ops in found]
    return [count for count in number if count]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt2-no-dropout", marks=pytest.mark.sweep)])
def test_the_sublayers_of_gpt2_are_members(name):
    """Neither the mask that all layers read nor the order of dropouts holds them together."""
    found = members(name)
    assert counts(found, "native_layer_norm") == [1, 1, 1, 1, 1]
    assert counts(found, "tanh") == [1, 1]
    assert max(map(len, found)) < sum(map(len, found)) / 2


@pytest.mark.sweep
def test_the_encoder_of_a_transformer_is_a_chain_and_its_decoder_a_block():
    found = members("transformer")
    assert counts(found, "_safe_softmax") == [1, 1, 4]


@pytest.mark.sweep
def test_the_blocks_of_a_resnet_are_members():
    assert counts(members("resnet"), "convolution") == [1, 4, 4, 3]

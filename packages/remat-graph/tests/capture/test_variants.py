"""Which outputs get a gradient, and what is captured where some get none."""

import pytest
import torch
from graph_cases.captured import Made, batch, captured
from torch import nn

from remat_graph.torch import CaptureError, capture


def test_a_loss_in_the_output_is_taken_to_be_differentiated():
    def forward(m, x):
        y = m.layer(x)
        return {"loss": y.square().mean(), "logits": y}

    found = captured(forward, batch())
    assert len(found.program.tangents) == 1
    assert len(found.missing) == 1
    both = captured(lambda m, x: {"cost": m.layer(x).mean(), "logits": m.layer(x)}, batch())
    assert both.missing == frozenset()


def heads(m, x):
    h = torch.tanh(m.layer(x))
    return m.left(h), m.right(h)


def test_a_variant_leaves_out_what_autograd_leaves_none():
    module = Made(heads, layer=nn.Linear(4, 4), left=nn.Linear(4, 2), right=nn.Linear(4, 3))
    found = capture(module, (batch(),), costs="estimate")
    names = {item.variable: item.key for item in found.program.inputs}
    everything = {names[v] for v in found.program.gradients}
    assert {"left.weight", "right.weight", "layer.weight"} <= everything
    for missing, unused in ((0, "left"), (1, "right")):
        variant = found.variant(frozenset({missing}))
        assert variant.missing == {missing}
        given = {names[v] for v in variant.program.gradients}
        assert given == everything - {f"{unused}.weight", f"{unused}.bias"}
        assert len(variant.graph.ops) < len(found.graph.ops)
        outputs = torch.autograd.grad(
            module(batch())[1 - missing].sum(), list(module.parameters()), allow_unused=True
        )
        autograd = {n for (n, _), g in zip(module.named_parameters(), outputs, strict=True)
                    if g is not None}  # fmt: skip
        assert given == autograd


def test_a_variant_keeps_the_forward():
    found = captured(heads, batch(), left=nn.Linear(4, 2), right=nn.Linear(4, 3))
    variant = found.variant(frozenset({0}))
    boundary = found.graph.boundary_index
    assert [op.name for op in found.graph.ops[:boundary]] == [
        op.name for op in variant.graph.ops[: variant.graph.boundary_index]
    ]
    with pytest.raises(CaptureError, match="none of the module's outputs gets a gradient"):
        found.variant(frozenset({0, 1}))

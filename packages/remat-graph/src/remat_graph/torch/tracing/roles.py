"""What inputs and outputs of a joint graph mean, read from AOTAutograd's descriptors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch._functorch._aot_autograd import descriptors as roles
from torch._functorch._aot_autograd.schemas import OutputType

from remat_graph.torch.errors import CaptureError
from remat_graph.torch.tracing.failures import has_effects
from remat_graph.torch.tracing.fakes import elements_of
from remat_graph.torch.tracing.joint import Joint, Layout, OutputRole

__all__ = ["read_roles"]


def read_roles(
    module: torch.fx.GraphModule, metadata: Any, computed_from: Sequence[tuple[int, ...]]
) -> Joint:
    """Read a joint graph that AOTAutograd traced; `computed_from` is of outputs, see `OutputRole`.

    Raises:
        CaptureError: if it has inputs or outputs that are not supported.
    """
    inputs: dict[torch.fx.Node, tuple[str, str | int]] = {}
    tangent_of: dict[torch.fx.Node, Any] = {}
    by_role: dict[Any, torch.fx.Node] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        role = node.meta["desc"]
        by_role[role] = node
        if isinstance(role, roles.ParamAOTInput):
            inputs[node] = ("parameter", role.target)
        elif isinstance(role, roles.BufferAOTInput):
            inputs[node] = ("buffer", role.target)
        elif isinstance(role, roles.PlainAOTInput):
            inputs[node] = ("input", role.idx)
        elif isinstance(role, roles.TangentAOTInput):
            tangent_of[node] = role.output
        elif isinstance(role, (roles.ForwardTokenAOTInput, roles.BackwardTokenAOTInput)):
            raise has_effects(module.graph)
        else:
            raise CaptureError(
                f"an input of the graph has the role {type(role).__name__}, which is not "
                f"supported: tensor subclasses, and inputs that are overlapping views of one "
                f"another and are changed in place, cannot be captured"
            )
    placeholders = list(inputs)
    returned: dict[Any, torch.fx.Node] = {}
    mutations: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    gradients: dict[torch.fx.Node, torch.fx.Node] = {}
    (values,) = cast("tuple[list[torch.fx.Node | None]]", module.graph.output_node().args)
    for value, role in zip(values, module.graph.output_node().meta["desc"], strict=True):
        if value is None:  # an input without a gradient
            continue
        if value.meta["val"].layout != torch.strided:
            raise CaptureError(
                f"{value.name} is a sparse tensor, which cannot be planned; "
                f"make embeddings with sparse=False"
            )
        returned[role] = value
        if isinstance(role, roles.InputMutationAOTOutput):
            mutations.append((by_role[role.mutated_input], value))
        elif isinstance(role, roles.GradAOTOutput):
            gradients[by_role[role.grad_of]] = value
        elif not isinstance(role, (roles.PlainAOTOutput, roles.IntermediateBaseAOTOutput)):
            raise CaptureError(
                f"an output of the graph has the role {type(role).__name__}, which is not "
                f"supported: changes of an input's shape or strides in place cannot be captured"
            )
    changed = set()
    for node, info in zip(placeholders, metadata.input_info, strict=True):
        hidden = info.mutations_under_no_grad_or_inference_mode
        if info.mutates_data and not (hidden or info.mutations_hidden_from_autograd):
            changed.add(inputs[node])
        if info.mutates_metadata:
            raise CaptureError(
                f"{' '.join(map(str, inputs[node]))} is changed in place and gets another shape; "
                f"clone it first"
            )
        if info.mutates_data and _overlaps_itself(node.meta["val"]):
            raise CaptureError(
                f"{' '.join(map(str, inputs[node]))} is changed in place, and several of its "
                f"elements share memory, as those of an expanded tensor do; clone it first"
            )
    return Joint(
        module.graph,
        module,
        inputs,
        {node: returned[output] for node, output in tangent_of.items()},
        tuple(_read_outputs(metadata, placeholders, returned, computed_from)),
        tuple(mutations),
        gradients,
        changed=frozenset(changed),
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _read_outputs(
    metadata: Any,
    placeholders: list[torch.fx.Node],
    returned: dict[Any, torch.fx.Node],
    computed_from: Sequence[tuple[int, ...]],
) -> Iterator[OutputRole]:
    plain = [node for role, node in returned.items() if isinstance(role, roles.PlainAOTOutput)]
    bases = [
        node for role, node in returned.items() if isinstance(role, roles.IntermediateBaseAOTOutput)
    ]
    infos = metadata.output_info
    for at, (node, others) in enumerate(zip(plain, computed_from, strict=True)):
        kind: str = "fresh"
        base: torch.fx.Node | None = None
        layout: Layout | None = None
        of = at  # the output that it is a view of, which may be one of another
        while infos[of].output_type is OutputType.alias_of_intermediate_base_is_user_output:
            of = infos[of].base_idx
        match infos[of].output_type:
            case OutputType.is_input:
                kind, base = "input", placeholders[infos[of].base_idx]
            case OutputType.alias_of_input:
                kind, base = "input_view", placeholders[infos[of].base_idx]
                layout = _layout_in(base, infos[at].view_meta_sequence)
            case OutputType.alias_of_intermediate | OutputType.alias_of_intermediate_save_as_output:
                kind, base = "view", bases[infos[of].base_idx]
            case _ if of != at:
                kind, base = "view", plain[of]
        yield OutputRole(node, kind, base, infos[at].requires_grad, layout, others)


def _layout_in(base: torch.fx.Node, views: Any) -> Layout | None:
    """Find how a view lies in an input; where that is changed in place, its node does not say.

    There is no layout where strides do not say it all: of another dtype, or another bit.
    """
    if views is None:
        return None
    whole = base.meta["val"]
    view = torch._C._functionalization.apply_view_meta_sequence(whole, views.sequence)
    if elements_of(view) != elements_of(whole):
        return None
    return tuple(view.shape), view.stride(), view.storage_offset() - whole.storage_offset()

"""What a captured graph says of a module: roles, sharing, order; and what capture leaves alone."""

import random

import torch
from graph_cases.captured import Block, Made, batch, captured, targets
from torch import nn

from remat_graph import Stage
from remat_graph.torch import capture, read_call


def test_forward_ops_come_before_the_loss_and_backward_ops_after(blocks):
    graph = blocks.graph
    assert graph.boundary == "loss"
    stages = [op.stage for op in graph.ops]
    assert stages == sorted(stages, key=lambda stage: stage is Stage.BACKWARD)
    assert graph.ops[graph.boundary_index].inputs
    assert Stage.FORWARD in stages


def test_backward_ops_have_the_forward_op_that_they_differentiate_as_twin(blocks):
    graph, calls = blocks.graph, blocks.program.calls
    pairs = {
        (str(calls[op.twin].target), str(calls[op.name].target))
        for op in graph.ops
        if op.twin is not None
    }
    assert ("aten.tanh.default", "aten.tanh_backward.default") in pairs
    assert ("aten.native_layer_norm.default", "aten.native_layer_norm_backward.default") in pairs
    for op in graph.ops:
        if op.twin is not None:
            assert op.stage is Stage.BACKWARD


def test_equal_layers_are_equivalent_op_for_op(blocks):
    by_target = {}
    for op in blocks.graph.ops:
        call = blocks.program.calls.get(op.name)
        if call is not None and op.stage is Stage.FORWARD:
            by_target.setdefault(str(call.target), []).append(op.equivalence)
    for target in ("aten.tanh.default", "aten.addmm.default", "aten.native_layer_norm.default"):
        assert len(by_target[target]) == 4
        assert len(set(by_target[target])) == 1
    assert len({equivalences[0] for equivalences in by_target.values()}) == len(by_target)


def test_layers_of_another_size_are_not_equivalent():
    found = capture(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), (batch(),), costs="estimate")
    forward = [op for op in found.graph.ops if op.stage is Stage.FORWARD]
    assert len({op.equivalence for op in forward}) == 2


def test_roles_of_the_inputs():
    found = captured(
        lambda m, x, *, scale: m.layer(x) * scale + m.shift,
        batch(), kwargs={"scale": torch.rand(4)}, shift=torch.rand(4),
    )  # fmt: skip
    roles = {(item.kind, item.key) for item in found.program.inputs}
    assert ("parameter", "layer.weight") in roles
    assert ("parameter", "layer.bias") in roles
    assert ("buffer", "shift") in roles
    assert {("input", 0), ("input", 1)} <= roles


def test_a_tensor_attribute_of_the_instance_is_an_input():
    module = Made(lambda m, x: m.layer(x) * m.mask, layer=nn.Linear(4, 4))
    module.__dict__["mask"] = torch.rand(4)
    found = capture(module, (batch(),), costs="estimate")
    assert ("attribute", "mask") in {(i.kind, i.key) for i in found.program.inputs}


def test_what_is_there_before_the_step_weighs_nothing(blocks):
    graph = blocks.graph
    inputs = {blocks.program.storage[item.variable] for item in blocks.program.inputs}
    assert graph.resident <= inputs
    assert graph.resident
    assert not graph.resident & {v for op in graph.ops for v in op.outputs}


def test_results_are_what_the_user_keeps_outputs_and_gradients(blocks):
    program = blocks.program
    kept = {program.storage[v] for v in (*program.returned, *program.gradients.values())}
    assert blocks.graph.results == (kept - blocks.graph.resident) | {"loss@kept"}
    assert len(program.gradients) == 16


def test_tied_parameters_are_one_input_with_one_gradient():
    tied = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)
    other.weight = tied.weight
    found = captured(lambda m, x: m.other(torch.tanh(m.layer(x))), batch(), layer=tied, other=other)
    assert len([i for i in found.program.inputs if i.kind == "parameter"]) == 1
    (gradient,) = found.program.gradients.values()
    assert "add" in str(found.program.calls[gradient].target)


def test_the_gradient_of_what_is_tied_is_summed_as_autograd_does():
    one, two, three = (nn.Linear(4, 4, bias=False) for _ in range(3))
    two.weight = three.weight = one.weight
    module = nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three)
    program = capture(module, (batch(),), costs="estimate").program
    at = {name: position for position, name in enumerate(program.order)}
    (gradient,) = program.gradients.values()
    last = program.calls[gradient]
    first = program.calls[last.reads[0]]
    made = [program.storage[name] for name in (*first.reads, last.reads[1])]
    assert [at[name] for name in made] == sorted(at[name] for name in made)


def test_a_layer_used_at_two_places_of_the_tree_is_one_layer():
    layer = nn.Linear(4, 4)
    module = nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer))
    before = layer.weight
    found = capture(module, (batch(),), costs="estimate")
    assert len(found.program.gradients) == 2
    assert layer.weight is before
    assert module(batch()).shape == (3, 4)


def test_one_tensor_given_twice_is_one_input():
    x = batch()
    found = captured(lambda m, a, b: m.layer(a) * b, x, x)
    assert len([i for i in found.program.inputs if i.kind == "input"]) == 1


def test_views_share_the_buffer_of_their_base():
    found = captured(lambda m, x: torch.tanh(m.layer(x)).view(2, 6).t().relu(), batch())
    program = found.program
    assert program.views
    made = {v for op in found.graph.ops for v in op.outputs}
    for view, call in program.views.items():
        assert program.storage[view] in {program.storage[v] for v in call.reads}
        assert view not in made


def test_sizes_are_those_of_the_buffers(blocks):
    values = blocks.graph.value_by_name
    assert all(
        values[program_value].size_bytes == blocks.program.facts[program_value].storage_bytes
        for program_value in values
        if program_value in blocks.program.facts
    )
    tanh = next(n for n, c in blocks.program.calls.items() if "tanh.default" in str(c.target))
    assert values[tanh].size_bytes == 5 * 8 * 4


def test_an_operator_with_several_results_is_one_op_with_several_values(blocks):
    norms = [op for op in blocks.graph.ops if op.name.startswith("native_layer_norm")]
    assert len(norms[0].outputs) == 3


def test_random_operators_keep_their_order():
    module = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4), nn.Dropout(), nn.Dropout()
    )
    found = capture(module, (batch(),), costs="estimate")
    drawing = [name for name, call in found.program.calls.items() if call.random is not None]
    assert len(drawing) == 3
    ops = {op.name: op for op in found.graph.ops}
    assert [ops[name].order_after for name in drawing] == [(), (drawing[0],), (drawing[1],)]
    assert all(found.program.calls[name].random == torch.device("cpu") for name in drawing)


def test_attention_without_dropout_draws_nothing():
    def attend(m, x):
        q = m.layer(x).view(1, 1, 3, 4)
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    found = captured(attend, batch())
    assert any("scaled_dot_product" in target for target in targets(found))
    assert all(call.random is None for call in found.program.calls.values())


def test_dropout_that_nothing_reads_still_draws():
    def draws(m, x):
        nn.functional.dropout(x, 0.5)
        return m.layer(x)

    found = captured(draws, batch())
    assert sum(call.random is not None for call in found.program.calls.values()) == 1


def test_parts_without_gradients_have_no_backward():
    def forward(m, x):
        with torch.no_grad():
            still = torch.exp(m.layer(x))
        return torch.sin(m.layer(x)) * still

    found = captured(forward, batch())
    backward = [op for op in found.graph.ops if op.stage is Stage.BACKWARD]
    names = [str(found.program.calls[op.name].target) for op in backward if op.name != "loss"]
    assert any("cos" in name for name in names)
    assert not any("exp" in name for name in names)


def test_gradients_never_share_a_buffer():
    found = captured(
        lambda m, x: x + m.a + m.b, batch(),
        a=nn.Parameter(torch.zeros(3, 4)), b=nn.Parameter(torch.zeros(3, 4)),
    )  # fmt: skip
    storages = [found.program.storage[g] for g in found.program.gradients.values()]
    assert len(set(storages)) == len(storages) == 2
    assert not set(storages) & {found.program.storage[t] for t in found.program.tangents}


def test_measuring_leaves_everything_as_it_was():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = batch()
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x_before = x.clone()
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    grad_mode, mkldnn = torch.is_grad_enabled(), torch.backends.mkldnn.enabled
    with torch.no_grad():
        capture(module, (x,))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(x, x_before)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert (torch.is_grad_enabled(), torch.backends.mkldnn.enabled) == (grad_mode, mkldnn)


def test_capturing_twice_gives_the_same_graph():
    module = Block()
    one, two = (capture(module, (torch.rand(2, 8),), costs="estimate") for _ in range(2))
    assert one.graph == two.graph


def test_an_lstm_is_traced_by_its_layer_and_keeps_its_weights():
    module = nn.LSTM(4, 4, batch_first=True)
    weights = list(module._flat_weights)
    found = capture(module, (torch.rand(2, 3, 4),), costs="estimate")
    layers = [target for target in targets(found) if "lstm_layer" in target]
    assert len(layers) == 2  # and its backward
    assert all(a is b for a, b in zip(module._flat_weights, weights, strict=True))
    assert len(found.program.gradients) == 4


def test_read_call_takes_arguments_apart():
    x = batch()
    call = read_call((x, 1), {"deep": [x, batch()]})
    assert len(call.tensors) == 2
    assert call.slots == (0, 0, 1)
    one, other = batch(), batch()
    (first, number), keywords = call.rebuild([one, other])
    assert first is keywords["deep"][0] is one
    assert keywords["deep"][1] is other
    assert number == 1


def test_code_that_asks_is_traced_as_by_a_compiler():
    def forward(module, x):
        made = module.layer(x)
        return torch.sin(made) if torch.compiler.is_compiling() else made

    assert "aten.sin.default" in targets(captured(forward, batch()))
    assert not torch.compiler.is_compiling()

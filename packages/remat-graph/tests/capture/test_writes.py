"""What a forward writes in place: pure operators, and one write of each tensor at its end."""

import torch
from graph_cases.captured import Made, batch, captured, targets
from torch import nn

from remat_graph import Stage
from remat_graph.torch import capture


def test_in_place_operators_become_pure_ones():
    def forward(m, x):
        y = m.layer(x)
        y.mul_(2)
        y[:, 0] = 1.0
        return y.relu_()

    found = captured(forward, batch())
    for call in found.program.calls.values():
        assert not str(call.target._schema.name).endswith("_")


def test_a_buffer_is_written_once_at_the_end_of_the_forward():
    def forward(m, x):
        m.mean.add_(x.mean(0))
        y = m.layer(x) + m.mean
        m.mean.mul_(0.5)
        return y

    found = captured(forward, batch(), mean=torch.zeros(4))
    ((name, write),) = found.program.writes.items()
    role = {i.variable: (i.kind, i.key) for i in found.program.inputs}
    assert role[write.target] == ("buffer", "mean")
    graph = found.graph
    op = graph.ops[graph.op_index[name]]
    assert op.stage is Stage.FORWARD
    assert not op.replayable
    reads = [n for n, c in found.program.calls.items() if write.target in c.reads]
    assert set(op.order_after) >= {n for n in reads if n not in found.program.backward_ops}


def test_a_replaced_buffer_is_written_in_place():
    def forward(m, x):
        m.mean = 0.9 * m.mean + x.mean(0).detach()
        return m.layer(x)

    module = Made(forward, layer=nn.Linear(4, 4), mean=torch.zeros(4))
    before = module.mean
    found = capture(module, (batch(),), costs="estimate")
    assert len(found.program.writes) == 1
    assert module.mean is before
    assert not before.any()


def test_batch_norm_is_replayed_without_its_statistics():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    found = capture(module, (batch(),), costs="estimate")
    (norm,) = (c for c in found.program.calls.values() if "batch_norm_legit" in str(c.target))
    assert "no_stats" in str(norm.replay.target)
    assert len(norm.replay.results) == 3
    assert len(found.program.writes) == 3
    (op,) = (op for op in found.graph.ops if "batch_norm_legit" in op.name)
    assert op.replayable


def test_batch_norm_whose_statistics_are_read_is_not_replayed():
    def forward(m, x):
        return torch.tanh(m.norm(m.layer(x)) * m.norm.running_var)

    found = captured(forward, batch(), norm=nn.BatchNorm1d(4))
    (op,) = (op for op in found.graph.ops if "batch_norm_legit" in op.name)
    assert not op.replayable


def test_a_changed_input_that_backward_reads_is_copied_first():
    def forward(m, x, state):
        y = m.layer(x) * state.clone()
        state.add_(1)
        return y

    found = captured(forward, batch(), torch.rand(3, 4))
    assert "aten.clone.default" in targets(found)
    (write,) = found.program.writes.values()
    backward = [found.program.calls[n] for n in found.program.backward_ops if n != "loss"]
    assert not any(write.target in call.reads for call in backward)

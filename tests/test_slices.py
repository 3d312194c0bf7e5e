"""Parts of a program in slices: which are cut, and that their gradients are those of the whole."""

import copy
import itertools

import pytest
import torch
from integration_cases.sliced_models import (
    BATCH,
    LOSSES,
    MODELS,
    TOKENS,
    WIDTH,
    WORDS,
    Model,
    built,
    hidden,
    trained,
    words,
)
from torch import nn
from torch.nn import functional

from remat_exec import Executable, measure_peak
from remat_graph import Numerics, simulate
from remat_graph.torch import CaptureError, capture
from remat_graph.torch.cost import costs
from remat_graph.torch.ways.slice_by_slice import SlicedBody
from remat_graph.torch.ways.slicing import run_in_slices
from remat_solvers import store_all


def sliced_ops(captured):
    calls = captured.program.calls.items()
    return [op for op, call in calls if call.target is run_in_slices]


@pytest.mark.parametrize("name", MODELS)
def test_slices_give_the_gradients_of_the_whole(name):
    model, args = built(name)
    expected = trained(model, model, args)
    able = capture(model, args, {}).with_alternatives(Numerics.ROUNDING, laid_out=())
    assert able.cuts
    for count in (2, 3):
        sliced = able.in_slices([(kind, count) for kind in range(len(able.cuts))])
        assert sliced_ops(sliced)
        executable = Executable(sliced, store_all(sliced.graph))
        with measure_peak() as peak:
            found = trained(lambda *given: executable(model, list(given))[0], model, args)  # noqa: B023
        assert peak.peak_bytes <= simulate(sliced.graph, executable.schedule).peak_bytes + 4096
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_scores_that_are_read_more_than_once_are_never_there_whole(name):
    model, args = built(name)
    able = capture(model, args, {}).with_alternatives(Numerics.ROUNDING, laid_out=())
    sliced = able.in_slices([(0, able.cuts[0][0].units)])
    scores = BATCH * TOKENS * WORDS * 8
    assert max(value.size_bytes for value in able.graph.values) == scores
    assert max(value.size_bytes for value in sliced.graph.values) < scores


def test_what_many_slices_add_is_not_lost_in_16_bits():
    """Not a gradient of a weight, nor the count of targets that a mean is divided by."""
    torch.manual_seed(0)
    tokens = 600  # more than bfloat16 counts in ones

    def forward(m, x, y):
        return functional.cross_entropy(m.out(x), y)

    model = Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)).bfloat16()
    args = torch.randn(tokens, WIDTH).bfloat16(), torch.randint(WORDS, (tokens,)) // 9
    exact = copy.deepcopy(model).float()
    (expected,) = trained(exact, exact, (args[0].float(), args[1]))
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    sliced = able.in_slices([(0, tokens)])
    assert sliced_ops(sliced)
    executable = Executable(sliced, store_all(sliced.graph))
    loss = executable(model, list(args))[0].detach()
    assert float(loss) == pytest.approx(float(exact(args[0].float(), args[1]).detach()), rel=0.01)
    with measure_peak() as peak:
        (found,) = trained(lambda *given: executable(model, list(given))[0], model, args)
    assert (found.float() - expected).norm() < 0.01 * expected.norm()
    assert peak.peak_bytes <= simulate(sliced.graph, executable.schedule).peak_bytes + 4096


def test_equal_layers_have_equal_cuts():
    model, args = built("gated MLPs")
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    assert len(able.cuts[0]) == 3
    sliced = able.in_slices([(0, 4)])
    kinds = {sliced.program.equivalence[op] for op in sliced_ops(sliced)}
    assert len(sliced_ops(sliced)) == 6
    assert len(kinds) == 2


@pytest.mark.parametrize("name", ["head", "gated MLPs"])
def test_what_slices_take_is_what_was_predicted(name):
    model, args = built(name)
    able = capture(model, args, {}).with_alternatives(Numerics.ROUNDING, laid_out=())
    sliced = able.in_slices([(0, 2)])
    workspace = {op.name: op.workspace_bytes for op in sliced.graph.ops}
    for op in sliced_ops(sliced):
        predicted = sliced.program.calls[op].workspace_bytes
        assert predicted == pytest.approx(workspace[op], rel=0.35, abs=2048)


def test_two_slices_are_measured_for_all(monkeypatch):
    model, args = built("head")
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    program = able.in_slices([(0, 5)]).program  # of 12 rows: 2, 2, 3, 2 and 3
    ticks = itertools.count()
    monkeypatch.setattr(costs.time, "perf_counter", lambda: float(next(ticks)))
    counted = {}

    def run(body, given, bounds, *after):
        counted[tuple(body.body.outputs)] = bounds
        return run_whole(body, given, bounds, *after)

    run_whole = SlicedBody.run
    monkeypatch.setattr(SlicedBody, "run", run)
    measured = costs.measure_costs(program)
    assert list(counted.values()) == [[0, 3, 6]] * 2
    for op, call in program.calls.items():
        if call.body is not None:
            assert measured[op].time == 3 + (12 - 6) / 3
            assert measured[op].workspace_bytes == pytest.approx(call.workspace_bytes, abs=1024)


def test_what_the_user_is_handed_is_not_cut():
    def forward(m, x, y):
        scores = m.out(x)
        return functional.cross_entropy(scores.view(-1, WORDS), y.view(-1)), scores

    torch.manual_seed(0)
    model = Model(forward, out=nn.Linear(WIDTH, WORDS, bias=False)).double()
    args = hidden(), words()
    able = capture(model, args, {}, costs="estimate").with_alternatives(Numerics.ROUNDING)
    sliced = able.in_slices([(kind, 2) for kind in range(len(able.cuts))])
    executable = Executable(sliced, store_all(sliced.graph))
    for one, other in zip(executable(model, list(args)), model(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_what_draws_is_not_cut():
    def forward(m, x):
        return m.down(functional.dropout(functional.gelu(m.up(x)), 0.5)).square().mean()

    torch.manual_seed(0)
    wide = 16 * WIDTH
    model = Model(forward, up=nn.Linear(WIDTH, wide), down=nn.Linear(wide, WIDTH)).double()
    able = capture(model, (hidden(),), {}, costs="estimate")
    random = {op for op, call in able.program.calls.items() if call.random is not None}
    assert random
    assert not any(random & cut.ops for kind in able.cuts for cut in kind)


def test_slices_are_refused_where_rounding_may_not_differ():
    model, args = built("head")
    captured = capture(model, args, {}, costs="estimate")
    for refused in (captured, captured.with_alternatives(Numerics.BITWISE)):
        with pytest.raises(CaptureError, match="another order"):
            refused.in_slices([(0, 2)])
    with pytest.raises(CaptureError, match="kinds of cuts"):
        captured.with_alternatives(Numerics.ROUNDING).in_slices([(9, 2)])


def test_what_has_no_elements_is_not_cut():
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
    captured = capture(model, (torch.randn(2, 0, 4),), {}, costs="estimate")
    assert captured.cuts == ()

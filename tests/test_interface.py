"""The result stands in for the model everywhere: what a user can do with one, works with it."""

import copy
import gc
import inspect
import logging
import weakref

import pytest
import torch
from exec_cases.models import Scheduled
from exec_cases.training import assert_bitwise_equal, assert_close, train
from integration_cases.one_net import LIMIT_SECONDS, Net, batch, loss, net, planned, step
from torch import nn

import remat
import zoo
from remat_graph.torch import capture


@pytest.fixture(scope="module")
def shared():
    """A planned model for tests that leave it as it is."""
    return planned()


def test_the_class_and_everything_on_it_are_those_of_the_model(shared):
    original = net()
    assert type(shared) is Net
    assert isinstance(shared, Net)
    assert shared.describe() == "Net 24"
    assert shared.config == original.config
    assert inspect.signature(shared.forward) == inspect.signature(original.forward)
    assert shared.forward.__name__ == "forward"
    assert list(shared.state_dict()) == list(original.state_dict())
    assert [name for name, _ in shared.named_parameters()] == [
        name for name, _ in original.named_parameters()
    ]
    assert [name for name, _ in shared.named_modules()] == [
        name for name, _ in original.named_modules()
    ]
    assert repr(shared) == repr(original)


def test_parameters_buffers_and_submodules_are_shared():
    original = net()
    model = planned(original)
    for ours, theirs in (
        (model.parameters(), original.parameters()),
        (model.buffers(), original.buffers()),
        (model.children(), original.children()),
    ):
        assert all(a is b for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        model.enter.weight.fill_(0.5)
    assert float(original.again.weight.detach().mean()) == 0.5


def test_the_original_is_left_as_it_was():
    original, fresh = net(), net()
    state = torch.get_rng_state()
    attributes = set(vars(original))
    model = planned(original)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(vars(original)) == attributes
    assert "forward" not in vars(original)
    assert all(parameter.grad is None for parameter in original.parameters())
    for ours, theirs in zip(original.buffers(), fresh.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.warns(remat.BudgetWarning, match=f"steps parameters of {type(model).__name__}"):
        steps = step(original)
    assert_bitwise_equal(steps, step(fresh))


def test_what_is_set_on_the_result_is_not_set_on_the_original():
    original = net()
    model = planned(original)
    model.note = "ours"
    model.extra = nn.Linear(2, 2)
    model.register_buffer("more", torch.zeros(1))
    assert not hasattr(original, "note")
    assert not hasattr(original, "extra")
    assert not hasattr(original, "more")


def test_without_gradients_the_original_runs():
    original = net()
    model = planned(original)
    plan = model.plan
    reference = net()
    for mode in (True, False):
        model.train(mode)
        reference.train(mode)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.manual_seed(2)
                got = model(batch(5))
                torch.manual_seed(2)
                assert torch.equal(got, reference(batch(5)))
                assert not got.requires_grad
                assert got.is_inference() == (context is torch.inference_mode)
    assert model.plan is plan
    model.train()
    assert_close(step(model), step(reference.train()))


def test_eval_mode_with_gradients_is_planned_for():
    model, eager = planned(), net()
    plan = model.plan
    assert_close(step(model.eval()), step(eager.eval()))
    assert int(model.norm.num_batches_tracked) == 0
    assert model.plan is not plan
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    assert_close(step(model.train()), step(eager.train()))
    assert model.plan is plan


def test_arguments_of_every_kind_are_bound_as_by_the_forward():
    model, eager = planned(), net()
    shift = torch.full((24,), 0.25)
    for kwargs in ({"scale": 2.0}, {"shift": shift}, {"deep": True, "shift": shift}, {}):
        assert_close(step(model, **kwargs), step(eager, **kwargs))
    with pytest.raises(TypeError, match="unexpected keyword argument 'sacle'"):
        model(batch(), sacle=1.0)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model()
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        remat.rematerialize(net(), (), {"scale": 2.0}, budget=0.7)


def test_hooks_of_the_root_and_of_submodules_run():
    def doubled(module, args, output):
        return 2 * output

    def hooked(model):
        calls = []
        model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        model.register_forward_hook(doubled)
        model.register_full_backward_hook(lambda m, g, h: calls.append("backward"))
        model.register_forward_hook(lambda *_: calls.append("forward"))
        return calls

    inner, eager_inner = net(), net()
    for each in (inner, eager_inner):
        each.leave.register_forward_hook(doubled)
        each.enter.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    model = planned(inner)
    calls, eager_calls = hooked(model), hooked(eager_inner)
    x = batch().requires_grad_()
    assert_close(step(model, x), step(eager_inner, x))
    assert calls == eager_calls == ["forward", "backward"] * 2


def test_hooks_of_the_original_come_along_and_later_ones_stay_apart():
    original = net()
    original.register_forward_hook(lambda m, a, output: output + 100)
    model = planned(original)
    assert model(batch()).detach().mean() > 50
    original.register_forward_hook(lambda m, a, output: output + 10_000)
    assert model(batch()).detach().mean() < 5_000


def test_a_shallow_copy_is_refused_since_it_would_run_the_first(shared):
    other = copy.copy(shared)
    with pytest.raises(remat.RematError, match=r"copy\.copy of a rematerialized model"):
        other(batch())
    assert shared(batch()).shape == (64, 8)


def test_without_an_example_the_plan_is_made_at_the_first_training_call():
    model = remat.rematerialize(net(), budget=0.7, limit_seconds=LIMIT_SECONDS)
    assert str(model.plan) == "remat plan: not made yet; it is made at the first training call"
    with torch.no_grad():
        model.eval()(batch())
    assert "not made yet" in str(model.plan)
    model.train()
    assert_close(step(model), step(net()))
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes


def test_one_tensor_stands_for_its_tuple():
    model = remat.rematerialize(net(), batch(), budget=0.7, limit_seconds=LIMIT_SECONDS)
    plan = model.plan
    model(batch())
    assert model.plan is plan


def test_the_plan_says_what_it_is(shared):
    plan = shared.plan
    text = str(plan)
    for part in (
        "remat plan", "operations", "budget", "peak, predicted", "peak, measured",
        "plain autograd", "storing everything", "overhead, predicted", "overhead, at least",
        "solver", "MiB", plan.solution.solver, f"{plan.recomputations} recomputed",
    ):  # fmt: skip
        assert part in text
    assert plan.budget_bytes == int(0.7 * plan.plain_peak_bytes)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.measured_peak_bytes <= plan.budget_bytes
    assert plan.store_all_peak_bytes > plan.budget_bytes
    assert plan.recomputations > 0
    assert plan.bound_overhead is None or plan.bound_overhead <= plan.predicted_overhead
    assert "def backward(" in plan.source
    assert len(plan.schedule) > len(plan.graph.ops)


def test_planning_dry_runs_nothing_and_says_the_same():
    original = net()
    plan = remat.plan(original, batch(), budget=0.7, limit_seconds=LIMIT_SECONDS)
    assert plan.measured_peak_bytes is None
    assert str(plan).count("not measured") == 1  # its own peak: plain autograd's is
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert_bitwise_equal(step(original), step(net()))


@pytest.mark.parametrize("share", [0.85, 0.67])
def test_planning_on_the_meta_device_for_another_machine(share):
    model, x = net().to("meta"), batch(256).to("meta")
    spec = remat.DeviceSpec("a pocket calculator", 1e3, 1e3, 1e3, 1e-3)
    plan = remat.plan(model, x, budget=share, costs=spec, limit_seconds=LIMIT_SECONDS)
    assert plan.budget_bytes == int(share * plan.plain_peak_bytes)
    assert plan.plain_peak_bytes == pytest.approx(plan.store_all_peak_bytes, rel=0.01)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.graph.time > 1
    if share == 0.67:  # no schedule that draws the dropout once takes less
        assert "draw_again" in plan.source


def test_auto_takes_what_is_free_and_logs_it(caplog):
    with caplog.at_level(logging.INFO, "remat"):
        model = planned(budget="auto")
        assert "not made yet" in str(model.plan)
        loss(model(batch())).backward()
    assert "budget 'auto' takes" in caplog.text
    assert f"{model.plan.budget_bytes} bytes" in caplog.text
    assert model.plan.recomputations == 0


def test_progress_is_told(shared):
    told = []
    planned(progress=told.append)
    assert told
    assert told[-1].solver


def test_nothing_is_printed(capfd):
    model = planned()
    step(model)
    step(model, batch(5))
    str(model.plan)
    with pytest.raises(remat.BudgetTooSmall):
        planned(budget=100)
    assert capfd.readouterr() == ("", "")


def test_a_fixed_solver_is_the_one_that_plans():
    assert planned(solver="refine").plan.solution.solver == "refine"
    assert planned(solver="store-all", budget=1.0).plan.solution.solver == "store-all"


def test_autocast_is_part_of_the_plan():
    def under_autocast(model, _):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch())

    original = net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture(original, (batch(),), costs="estimate")
        model = planned()
    stored = Scheduled(original, captured)
    got = train(model, under_autocast, loss)
    assert_bitwise_equal(got, train(stored, under_autocast, loss))
    assert_close(got, train(net(), under_autocast, loss), rtol=0.02)
    assert got.tensors["output 0 of step 0"].dtype == torch.bfloat16


def test_what_torch_compile_is_told_it_leaves_alone():
    compiled = torch.compile(nn.Sequential(planned(), nn.Linear(8, 2)), backend="eager")
    compiled(batch()).sum().backward()
    assert all(p.grad is not None for n, p in compiled.named_parameters() if "again" not in n)


def test_a_zoo_model_of_every_output_structure_gives_it_back():
    example = zoo.build("inplace")
    model = remat.rematerialize(
        example.model, example.args, example.kwargs, budget=1.0, limit_seconds=LIMIT_SECONDS
    )
    output = model(*example.args, **example.kwargs)
    assert list(output) == ["features", "halves", "spread"]
    assert isinstance(output["halves"], list)
    assert not output["spread"].requires_grad


def test_a_batch_is_not_held_after_its_step():
    model = remat.rematerialize(net(), budget="1MiB", limit_seconds=LIMIT_SECONDS)
    for _ in range(2):
        x = torch.randn(4, 8)
        held = weakref.ref(x)
        model(x).sum().backward()
        del x
        gc.collect()
        assert held() is None

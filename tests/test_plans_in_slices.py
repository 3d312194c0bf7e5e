"""Plans whose largest values are made in slices: right, within the budget, and told of."""

import copy
import json

import pytest
import torch
from integration_cases.language import Language
from integration_cases.sliced_models import trained

import remat
from remat_exec import MemoryChanged, measure_peak
from remat_graph import DocumentError, Numerics


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    model = Language()
    expected = trained(model, model, (model.ids,))
    with measure_peak() as peak:
        trained(model, model, (model.ids,))
    model.zero_grad(set_to_none=True)
    return model, [each.clone() for each in expected], peak.peak_bytes


@pytest.mark.sweep
def test_a_budget_below_the_floor_of_whole_values(plain, tmp_path):
    model, expected, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    with pytest.raises(remat.BudgetTooSmall) as refused:
        remat.rematerialize(copy.deepcopy(model), (model.ids,), budget=budget)
    assert "numerics='rounding'" in refused.value.__notes__[0]

    sliced = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), budget=budget, numerics="rounding"
    )
    trained(sliced, sliced, (model.ids,))
    with measure_peak() as peak:
        found = trained(sliced, sliced, (model.ids,))
    assert peak.peak_bytes <= budget
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert "stretches in slices" in str(sliced.plan)
    assert sliced.plan.numerics is Numerics.ROUNDING

    sliced.plan.save(tmp_path / "plan.json")
    again = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), plan=tmp_path / "plan.json", numerics="rounding"
    )
    for one, other in zip(trained(again, again, (model.ids,)), found, strict=True):
        assert torch.equal(one, other)
    assert again.plan.kinds[0].sliced == sliced.plan.kinds[0].sliced
    with pytest.raises(remat.PlanMismatch, match="numerics="):
        remat.rematerialize(copy.deepcopy(model), (model.ids,), plan=tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["body"]["kinds"][0]["sliced"] = [[0, 0]]
    (tmp_path / "damaged.json").write_text(json.dumps(document))
    with pytest.raises(DocumentError, match="damaged"):
        remat.rematerialize(
            copy.deepcopy(model), (model.ids,), plan=tmp_path / "damaged.json", numerics="rounding"
        )


def test_a_dry_plan_in_slices_is_followed(plain):
    model, _, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    with torch.device("meta"):
        meta = Language()
    planned = remat.plan(
        meta, (torch.empty(2, 64, dtype=torch.long, device="meta"),),
        budget=budget, numerics="rounding", costs="estimate",
    )  # fmt: skip
    assert planned.kinds[0].sliced
    real = copy.deepcopy(model)
    followed = remat.rematerialize(real, (model.ids,), plan=planned, numerics="rounding")
    with measure_peak() as peak:
        trained(followed, followed, (model.ids,))
    assert peak.peak_bytes <= budget


def test_time_in_slices_is_told_beside_that_of_the_whole(plain, tmp_path):
    model, _, peak_bytes = plain
    budget = int(0.4 * peak_bytes)
    sliced = remat.plan(model, (model.ids,), budget=budget, costs="estimate", numerics="rounding")
    whole = remat.plan(model, (model.ids,), budget=1.0, costs="estimate")
    once = sum(op.time for op in whole.graph.ops)
    assert sliced.kinds[0].sliced
    assert sliced.predicted_overhead == pytest.approx(sliced.time / once - 1)
    assert sliced.predicted_overhead > 0.05  # the logits are made again
    sliced.save(tmp_path / "plan.json")
    assert type(sliced).load(tmp_path / "plan.json").predicted_overhead == sliced.predicted_overhead


def test_a_curve_has_what_slices_reach(plain):
    model, *_ = plain
    budgets = [0.4, 1.0]
    whole, sliced = (
        remat.tradeoff(model, (model.ids,), costs="estimate", budgets=budgets, numerics=numerics)
        for numerics in (None, "rounding")
    )
    assert [point.solution is None for point in whole.points] == [True, False]
    assert all(point.solution is not None for point in sliced.points)
    assert sliced.points[1].solution.time == whole.points[1].solution.time
    assert sliced.points[0].lower_bound <= sliced.points[0].solution.time
    assert sliced.overhead(sliced.points[0].solution.time) > 0.05
    spread = remat.tradeoff(model, (model.ids,), costs="estimate", points=3, numerics="rounding")
    assert spread.points[0].budget_bytes < whole.points[0].budget_bytes
    with pytest.raises(remat.RematError, match="numerics"):
        remat.tradeoff(remat.plan(model, (model.ids,), budget=1.0).graph, numerics="rounding")


def test_what_a_slice_is_made_of_again_may_not_change_uncounted(plain):
    model, _, peak_bytes = plain
    sliced = remat.rematerialize(
        copy.deepcopy(model), (model.ids,), budget=int(0.4 * peak_bytes), numerics="rounding"
    )
    loss = sliced(model.ids)
    sliced.head.weight.data.mul_(1.5)  # the logits are made of it again
    with pytest.raises(MemoryChanged):
        loss.backward()

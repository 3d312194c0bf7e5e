"""What a forward does beside computing: counting, logging, warning."""

import logging
import warnings

import pytest
from exec_cases.training import assert_bitwise_equal
from stack_cases.models import assert_planned, record, rematerialized

import remat
from loop_cases.models import Blocks, Counting, batch, made, square

logger = logging.getLogger(__name__)


class Logging(Blocks):
    def forward(self, x):
        logger.info("forward of %d rows", len(x))
        return super().forward(x)


class Warning(Blocks):
    def forward(self, x):
        warnings.warn("old", UserWarning, stacklevel=1)
        return super().forward(x)


@pytest.mark.parametrize("example", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_steps_are_counted_once_each_and_planned_for_once(example):
    original = made(Counting)
    model = rematerialized(original, *([batch()] if example else []))
    assert (model.steps, model.inner.steps, int(model.count)) == (0, 0, 0)
    assert_bitwise_equal(record(model, steps=4), record(made(Counting), steps=4))
    assert (model.steps, model.inner.steps, int(model.count)) == (4, 4, 4)
    assert original.steps == 0
    assert_planned(model)


@pytest.mark.sweep
def test_a_counted_step_within_a_measured_block_has_its_plan():
    """Each number is another call to TorchDynamo, of a graph that is known."""
    model = rematerialized(made(Counting))
    record(model, steps=3)
    x = batch()
    model.zero_grad()
    with remat.measure_peak() as peak:
        square(model(x)).backward()
    assert 0 < peak.peak_bytes <= model.plan.budget_bytes


def test_a_line_in_the_log(caplog):
    model = rematerialized(made(Logging))
    with caplog.at_level(logging.INFO, __name__):
        got = record(model)
    assert "forward of 32 rows" in caplog.messages
    assert_bitwise_equal(got, record(made(Logging)))
    assert_planned(model)


def test_a_warning():
    model = rematerialized(made(Warning))
    with pytest.warns(UserWarning, match="old"):
        got = record(model)
    with pytest.warns(UserWarning, match="old"):
        expected = record(made(Warning))
    assert_bitwise_equal(got, expected)
    assert_planned(model)

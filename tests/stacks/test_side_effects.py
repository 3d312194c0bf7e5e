"""What a forward does beside computing: counting, logging, warning."""

import logging
import warnings

import pytest
import torch
from exec_cases.training import assert_bitwise_equal
from stack_cases.models import Blocks, assert_planned, batch, made, record, rematerialized
from torch import nn

logger = logging.getLogger(__name__)


class Counting(nn.Module):
    """Counts its calls, on itself and on what it holds."""

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.inner = Blocks()
        self.inner.steps = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        self.inner.steps += 1
        self.count += 1
        return self.inner(x)


class Logging(Blocks):
    def forward(self, x):
        logger.info("forward of %d rows", len(x))
        return super().forward(x)


class Warning(Blocks):
    def forward(self, x):
        warnings.warn("old", UserWarning, stacklevel=1)
        return super().forward(x)


@pytest.mark.parametrize("example", [True, False])
def test_steps_are_counted_once_each_and_planned_for_once(example):
    original = made(Counting)
    model = rematerialized(original, *([batch()] if example else []))
    assert (model.steps, model.inner.steps, int(model.count)) == (0, 0, 0)
    assert_bitwise_equal(record(model, steps=4), record(made(Counting), steps=4))
    assert (model.steps, model.inner.steps, int(model.count)) == (4, 4, 4)
    assert original.steps == 0
    assert_planned(model)


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

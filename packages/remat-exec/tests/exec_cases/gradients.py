"""Gradients of two models beside one another."""

import torch


def assert_same_gradients(model, other, **tolerance):
    for got, expected in zip(model.parameters(), other.parameters(), strict=True):
        if expected.grad is None or got.grad is None:
            assert got.grad is expected.grad
        else:
            torch.testing.assert_close(got.grad, expected.grad, **tolerance)


def pair(case):
    """A model run by its schedule, and the same one run by eager."""
    return case.remat(), case.model()

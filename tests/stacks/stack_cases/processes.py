"""Loops of two processes: each trains a rematerialized and a plain model and records both."""

from stack_cases.models import Watched, assert_same_tensors


def beside_plain(rank, case):
    """Run a loop with options by a rank; give a pair of records."""
    loop, options = case
    watched = Watched(lambda run: loop(run, **options), steps=3)
    for model in watched.models:
        assert "not made yet" not in str(model.plan)
    return watched.got, watched.expected


def assert_same_records(found):
    """Compare what the ranks have kept, bit by bit."""
    raised = [rank for rank in found if isinstance(rank, str)]
    assert not raised, "\n".join(raised)
    for got, expected in found:
        assert_same_tensors(got, expected)

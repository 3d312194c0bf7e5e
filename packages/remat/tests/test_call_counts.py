"""Which steps are expected to have several calls before a backward."""

import pytest

from remat.session.call_counts import CallCounts


def surprises(steps):
    """List the positions of steps of several calls that were not expected, and of the others."""
    counts, too_few, too_many = CallCounts(), [], []
    for at, several in enumerate(steps):
        if counts.expects_several != several:
            (too_few if several else too_many).append(at)
        counts.end_step(several=several)
    return too_few, too_many


def of(text):
    return [digit == "2" for digit in text]


@pytest.mark.parametrize(
    ("steps", "too_few", "too_many"),
    [
        ("11111", [], []),
        ("22222", [0], []),
        ("1112" + 8 * "1", [3], [4, 5, 6, 7]),  # one that is odd
        (8 * "12", [1], [2, 4, 6]),  # in turn: known after three
        (4 * "112", [2], [3, 4, 6, 7, 9, 10]),  # of a longer period: never over the budget again
    ],
)
def test_steps_are_expected_to_be_like_those_after_steps_like_the_last(steps, too_few, too_many):
    found = surprises(of(steps))
    assert found[0] == too_few
    assert found[1] == too_many


def test_odd_steps_are_expected_for_longer_each_time_they_were_not():
    odd = [7, 27, 47, 67, 87, 107, 127]  # 19 steps of one call between two
    too_few, _ = surprises([at in odd for at in range(140)])
    assert too_few == odd[:4]


def test_it_is_sure_after_two_in_a_row():
    counts, sure = CallCounts(), []
    for several in of("12222"):
        counts.end_step(several=several)
        sure.append(counts.is_sure)
    assert sure == [False, False, False, True, True]

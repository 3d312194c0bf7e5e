"""A region that cannot be captured: for the same reason at two sizes, it is refused at all."""

from __future__ import annotations

import pytest

from remat.session.refused import RefusedCaptures
from remat_graph.torch import CaptureError, NoBackward


def tried(refused: RefusedCaptures, size: int, error: CaptureError | None) -> bool:
    """Whether a capture is tried at a size; one that is raises the error."""
    is_tried = False
    try:
        with refused.seen(size):
            is_tried = True
            if error is not None:
                raise error
    except CaptureError:
        pass
    return is_tried


def test_the_same_reason_at_two_sizes_is_that_of_all() -> None:
    refused = RefusedCaptures()
    assert tried(refused, 1, NoBackward("none"))
    assert tried(refused, 1, NoBackward("none"))  # of the same size
    assert tried(refused, 2, CaptureError("none"))
    assert tried(refused, 3, CaptureError("of 3 rows"))
    assert tried(refused, 4, CaptureError("of 4 rows"))
    assert tried(refused, 5, None)
    assert tried(refused, 6, CaptureError("of 4 rows"))
    assert not tried(refused, 7, None)
    with pytest.raises(CaptureError, match="of 4 rows"), refused.seen(8):
        raise AssertionError

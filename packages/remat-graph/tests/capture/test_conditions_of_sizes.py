"""For which numbers a trace with symbols holds."""

import pytest
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from remat_graph.torch.tracing.symbols import Conditions, expression_of, new_symbol


@pytest.mark.parametrize(("rows", "holds"), [(6, True), (8, True), (9, False), (4, False)])
def test_a_condition_does_not_hold_where_it_divides_by_zero(rows, holds):
    env = ShapeEnv()
    symbol = new_symbol(env, "rows", 6)
    assert 24 % (symbol - 4) == 0  # which torch notes, as another number would decide otherwise
    conditions = Conditions(env, (str(expression_of(symbol)),))
    assert conditions.hold((rows,)) is holds

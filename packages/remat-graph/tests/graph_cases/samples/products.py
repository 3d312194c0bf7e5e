"""Products of matrices and vectors."""

import torch

from graph_cases.samples.drawing import sample

aten = torch.ops.aten


@sample(aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
def _product(d, target):
    rows, inner, columns = d.int(1, 6), d.int(1, 6), d.int(1, 6)
    batch = [d.int(1, 4)] if "bmm" in str(target) else []
    factors = [d.signed(*batch, rows, inner), d.signed(*batch, inner, columns)]
    if "add" not in str(target):
        return factors, {}
    shapes = [(*batch, rows, columns), (columns,), (1, columns), (rows, 1), (1,)]
    return [d.signed(*d.of(*shapes)), *factors], d.of({}, {"beta": 2, "alpha": 0.5})


@sample(aten.mv.default)
def _matrix_vector(d, target):
    inner = d.int(1, 6)
    return [d.signed(d.int(1, 6), inner), d.signed(inner)], {}


@sample(aten.dot.default)
def _dot(d, target):
    inner = d.int(1, 6)
    return [d.signed(inner), d.signed(inner)], {}

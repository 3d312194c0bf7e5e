"""What raises where a matrix is singular is one operator, which raises by itself."""

import pytest
import torch
from torch import nn

from remat_graph.torch import CaptureError, capture

aten = torch.ops.aten


def of_both_halves(matrix):
    return torch.linalg.inv(torch.linalg.eig(matrix)[1].abs())


FUNCTIONS = {
    "linalg_inv_ex": torch.linalg.inv,
    "_linalg_solve_ex": lambda matrix: torch.linalg.solve(matrix, matrix[:, :2]),
    "linalg_cholesky_ex": torch.linalg.cholesky,
    "linalg_lu_factor_ex": lambda matrix: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(matrix), matrix
    ),
}


class OfAMatrix(nn.Module):
    def __init__(self, function, size=4):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.eye(size))

    def forward(self, x):
        return x @ self.function(self.weight * 2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_its_operator_is_asked_to_raise(name):
    x = torch.ones(3, 4)
    calls = capture(OfAMatrix(FUNCTIONS[name]), (x,), costs="estimate").program.calls.values()
    asked = [call for call in calls if call.kwargs.get("check_errors")]
    assert [call.target for call in asked] == [getattr(aten, name).default]


def test_so_are_those_of_both_halves():
    x = torch.ones(3, 4)
    calls = capture(OfAMatrix(of_both_halves), (x,), costs="estimate").program.calls.values()
    asked = [call.target for call in calls if call.kwargs.get("check_errors")]
    assert asked == [aten.linalg_inv_ex.default, aten._linalg_solve_ex.default]


def look_only(matrix):
    torch.linalg.cholesky(matrix)
    return matrix


def test_one_that_nobody_reads_would_not_run_and_is_refused():
    with pytest.raises(CaptureError, match="has an effect besides what it returns"):
        capture(OfAMatrix(look_only), (torch.ones(3, 4),), costs="estimate")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_measured_with_a_matrix_that_has_an_inverse(name, caplog):
    size = 540  # of so many numbers that only the first are drawn
    with caplog.at_level("INFO", "remat_graph.torch.cost.costs"):
        capture(OfAMatrix(FUNCTIONS[name], size), (torch.ones(1, size),))
    assert "is estimated" not in caplog.text

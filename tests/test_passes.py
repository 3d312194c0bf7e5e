"""A plan is right with any pass left out that may be."""

import pytest
import torch
from torch import nn

import remat
from remat_graph.torch import CaptureError, capture, passes_of


class Model(nn.Module):
    """Gives each pass that may be left out something to do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        position = torch.arange(x.shape[1])
        mask = position[:, None] >= position[None, :]
        h = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        h = h + nn.functional.embedding(position, self.out.weight)
        h = self.norm(h.double().float() + h.double().float())
        return self.out(h.clone()).relu().square().sum()


def step(model, x):
    model(x).backward()
    return [parameter.grad for parameter in model.parameters()], list(model.buffers())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("drop-statistics", marks=pytest.mark.sweep),
        "drop-copies",
        pytest.param("add-rows", marks=pytest.mark.sweep),
        pytest.param("merge-equal", marks=pytest.mark.sweep),
        pytest.param("name-causal-masks", marks=pytest.mark.sweep),
    ],
)
def test_a_plan_without_a_pass_is_right(name, monkeypatch):
    x = torch.rand(256, 6, 8)
    plain = step(Model(), x)
    monkeypatch.setenv("REMAT_PASSES", f"-{name}")
    assert name not in {run.name for run in passes_of(Model(), (x,))}
    model = remat.rematerialize(Model(), (x,), budget="90%")
    ours = step(model, x)
    assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_pass_that_is_unknown_is_an_error(monkeypatch):
    monkeypatch.setenv("REMAT_PASSES", "-merge")
    with pytest.raises(remat.RematError, match="merge-equal"):
        remat.rematerialize(Model(), budget="80%")


def test_it_is_refused_before_anything_is_traced(monkeypatch):
    class Untraceable(Model):
        def forward(self, x):
            raise AssertionError

    monkeypatch.setenv("REMAT_PASSES", "-merge-tied")
    with pytest.raises(CaptureError, match="a tied parameter would get a part"):
        capture(Untraceable(), (torch.rand(4, 6, 8),))

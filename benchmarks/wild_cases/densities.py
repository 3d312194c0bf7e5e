"""Models of densities: normalizing flows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from matrix_cases.case import Built
from wild_cases.packages import load

__all__ = ["MODELS"]


class _Density(nn.Module):
    """The likelihood of points under a flow."""

    def __init__(self, flow: nn.Module, likelihood: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.flow = flow
        self.likelihood = likelihood

    def forward(self, points: Tensor) -> Tensor:
        return self.likelihood(self.flow, points)


def _normflows(make: Callable[[Any], list[nn.Module]]) -> Built:
    package = load("normflows")
    base = package.distributions.base.DiagGaussian(4)
    model = package.NormalizingFlow(base, make(package))
    return Built(_Density(model, lambda flow, points: flow.forward_kld(points)), (_points(),))


def _points() -> Tensor:
    return torch.randn(32, 4)


def _real_nvp(package: Any) -> list[nn.Module]:
    flows: list[nn.Module] = []
    for _ in range(3):
        flows.append(package.flows.AffineCouplingBlock(package.nets.MLP([2, 32, 4])))
        flows += [package.flows.ActNorm(4), package.flows.Permute(4, mode="swap")]
    return flows


def _spline(package: Any) -> list[nn.Module]:
    return [
        flow
        for _ in range(2)
        for flow in (
            package.flows.AutoregressiveRationalQuadraticSpline(4, 1, 16),
            package.flows.LULinearPermute(4),
        )
    ]


def _residual(package: Any) -> list[nn.Module]:
    return [
        package.flows.Residual(
            package.nets.LipschitzMLP([4, 16, 4], init_zeros=True, lipschitz_const=0.9),
            reduce_memory=False,
        )
        for _ in range(2)
    ]


def _zuko(name: str, **options: Any) -> Built:
    flow = getattr(load("zuko.flows"), name)(4, hidden_features=(32, 32), **options)
    return Built(_Density(flow, lambda flow, points: -flow().log_prob(points)), (_points(),))


def _glow() -> Built:
    package, modules = load("FrEIA.framework"), load("FrEIA.modules")
    flow = package.SequenceINN(4)
    for _ in range(3):
        flow.append(
            modules.AllInOneBlock,
            subnet_constructor=lambda inputs, outputs: nn.Sequential(
                nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs)
            ),
        )
    return Built(flow, (_points(),))


def _nflows() -> Built:
    package, parts = load("nflows.flows"), load("nflows.transforms")
    steps = [
        step
        for _ in range(2)
        for step in (
            parts.ReversePermutation(features=4),
            parts.MaskedAffineAutoregressiveTransform(features=4, hidden_features=16),
        )
    ]
    base = load("nflows.distributions").StandardNormal(shape=[4])
    flow = package.Flow(parts.CompositeTransform(steps), base)
    return Built(_Density(flow, lambda flow, points: -flow.log_prob(points)), (_points(),))


MODELS: dict[str, Callable[[], Built]] = {
    "normflows/AffineCouplingBlock": lambda: _normflows(_real_nvp),
    "normflows/AutoregressiveRationalQuadraticSpline": lambda: _normflows(_spline),
    "normflows/Residual": lambda: _normflows(_residual),
    "zuko/NSF": lambda: _zuko("NSF", transforms=2),
    "zuko/CNF": lambda: _zuko("CNF"),
    "FrEIA/AllInOneBlock": _glow,
    "nflows/MaskedAffineAutoregressiveTransform": _nflows,
}

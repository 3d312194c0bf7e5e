"""Models of graphs, molecules, fields and differential equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from matrix_cases.case import Built
from wild_cases.packages import load

__all__ = ["MODELS"]


def _graph(nodes: int = 40, edges: int = 160) -> tuple[Tensor, Tensor]:
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges))


def _geometric(name: str, **options: Any) -> Built:
    model = getattr(load("torch_geometric.nn"), name)(
        in_channels=16, hidden_channels=32, num_layers=3, out_channels=8, **options
    )
    return Built(model, _graph())


def _atoms(name: str, **options: Any) -> Built:
    package = load("torch_geometric.nn")
    kinds, batch = torch.randint(1, 9, (12,)), torch.arange(12) // 6
    return Built(
        getattr(package, name)(interaction_graph=_pairs, **options),
        (kinds, 2 * torch.randn(12, 3), batch),
    )


def _pairs(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Join each two atoms of a molecule; the package's own search wants an extension in C++."""
    count = positions.shape[0]
    edges = torch.cartesian_prod(torch.arange(count), torch.arange(count)).T
    edges = edges[:, (edges[0] != edges[1]) & (edges[0] // 6 == edges[1] // 6)]
    return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


def _gps() -> Built:
    package = load("torch_geometric.nn")

    class GPS(nn.Module):
        """Local messages and attention of all nodes, and one answer for each graph."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                package.GPSConv(
                    16, package.GINConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), heads=2
                )
                for _ in range(2)
            )

        def forward(self, nodes: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
            for layer in self.layers:
                nodes = layer(nodes, edges, batch)
            pooled: Tensor = package.global_mean_pool(nodes, batch)
            return pooled

    return Built(GPS(), (*_graph(), torch.arange(40) // 20))


def _edge_conv() -> Built:
    package = load("torch_geometric.nn")

    class Points(nn.Module):
        """Two convolutions over the edges of a cloud of points."""

        def __init__(self) -> None:
            super().__init__()
            self.first = package.EdgeConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "max")
            self.second = package.EdgeConv(nn.Sequential(nn.Linear(64, 16), nn.ReLU()), "max")

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            found: Tensor = self.second(self.first(nodes, edges), edges)
            return found

    return Built(Points(), _graph())


def _operator(name: str, *shape: int, **options: Any) -> Built:
    return Built(getattr(load("neuralop.models"), name)(**options), (torch.randn(*shape),))


def _uno() -> Built:
    return _operator(
        "UNO", 2, 1, 16, 16, in_channels=1, out_channels=1, hidden_channels=8, n_layers=3,
        lifting_channels=16, projection_channels=16, uno_out_channels=[8, 16, 8],
        uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        channel_mlp_skip="linear",
    )  # fmt: skip


def _e3nn_network() -> Built:
    model = load("e3nn.nn.models.gate_points_2101").Network(
        irreps_in="4x0e", irreps_hidden="8x0e + 4x1o", irreps_out="2x0e", irreps_node_attr="1x0e",
        irreps_edge_attr="1x0e + 1x1o", layers=2, max_radius=2.0, number_of_basis=4,
        radial_layers=1, radial_neurons=16, num_neighbors=4.0, num_nodes=12.0, reduce_output=False,
    )  # fmt: skip
    return Built(
        model, ({"pos": torch.randn(12, 3), "x": torch.randn(12, 4), "z": torch.ones(12, 1)},)
    )


def _e3nn_layers() -> Built:
    o3, layers = load("e3nn.o3"), load("e3nn.nn")

    class Equivariant(nn.Module):
        """Spherical harmonics, a tensor product with learned weights, and a gate."""

        def __init__(self) -> None:
            super().__init__()
            self.harmonics = o3.SphericalHarmonics("0e + 1o + 2e", normalize=True)
            self.gate = layers.Gate("8x0e", [torch.relu], "4x0e", [torch.sigmoid], "4x1o")
            self.product = o3.FullyConnectedTensorProduct(
                "8x0e", self.harmonics.irreps_out, self.gate.irreps_in
            )
            self.last = o3.Linear(self.gate.irreps_out, "4x0e")

        def forward(self, values: Tensor, directions: Tensor) -> Tensor:
            found: Tensor = self.last(self.gate(self.product(values, self.harmonics(directions))))
            return found

    return Built(Equivariant(), (torch.randn(32, 8), torch.randn(32, 3)))


def _egnn() -> Built:
    model = load("egnn_pytorch").EGNN_Network(depth=2, dim=16, num_tokens=8, m_dim=8)
    return Built(model, (torch.randint(0, 8, (2, 12)), torch.randn(2, 12, 3)))


def _se3_transformer() -> Built:
    model = load("se3_transformer_pytorch").SE3Transformer(
        dim=8, heads=2, dim_head=8, depth=1, num_degrees=2, num_neighbors=4
    )
    return Built(model, (torch.randn(1, 12, 8), torch.randn(1, 12, 3), torch.ones(1, 12).bool()))


def _point_transformer() -> Built:
    model = load("point_transformer_pytorch").PointTransformerLayer(
        dim=16, pos_mlp_hidden_dim=16, attn_mlp_hidden_mult=2, num_neighbors=4
    )
    return Built(model, (torch.randn(1, 16, 16), torch.randn(1, 16, 3)))


class _Field(nn.Module):
    """The right-hand side of a differential equation."""

    noise_type = "diagonal"
    sde_type = "ito"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
        self.noise = nn.Linear(4, 4)

    def forward(self, _time: Tensor, state: Tensor) -> Tensor:
        found: Tensor = self.layers(state)
        return found

    f = forward

    def g(self, _time: Tensor, state: Tensor) -> Tensor:
        found: Tensor = self.noise(state).sigmoid()
        return found


def _ode(solve: str, **options: Any) -> Built:
    package = load("torchdiffeq")

    class Flow(nn.Module):
        """The states at some times."""

        def __init__(self) -> None:
            super().__init__()
            self.field = _Field()

        def forward(self, state: Tensor, times: Tensor) -> Tensor:
            found: Tensor = getattr(package, solve)(self.field, state, times, **options)
            return found

    return Built(Flow(), (torch.randn(16, 4), torch.linspace(0.0, 1.0, 4)))


def _sde() -> Built:
    package = load("torchsde")

    class Flow(nn.Module):
        """The states at some times, by noise drawn in each step."""

        def __init__(self) -> None:
            super().__init__()
            self.field = _Field()

        def forward(self, state: Tensor, times: Tensor) -> Tensor:
            found: Tensor = package.sdeint(self.field, state, times, dt=0.1, method="euler")
            return found

    return Built(Flow(), (torch.randn(16, 4), torch.linspace(0.0, 0.5, 3)))


def _exact_gp() -> Built:
    package = load("gpytorch")
    inputs, targets = torch.rand(24, 2), torch.randn(24)

    class Process(nn.Module):
        """The loss of a Gaussian process over features of a small network."""

        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
            self.mean = package.means.ConstantMean()
            self.kernel = package.kernels.ScaleKernel(package.kernels.RBFKernel())
            self.noise = package.likelihoods.GaussianLikelihood()

        def forward(self, points: Tensor, values: Tensor) -> Tensor:
            found = self.features(points)
            prior = package.distributions.MultivariateNormal(self.mean(found), self.kernel(found))
            loss: Tensor = -self.noise(prior).log_prob(values)
            return loss

    return Built(Process(), (inputs, targets))


def _acquisition() -> Built:
    models, acquisition = load("botorch.models"), load("botorch.acquisition")

    class Improvement(nn.Module):
        """The expected improvement of points that are to be chosen."""

        def __init__(self) -> None:
            super().__init__()
            inputs = torch.rand(12, 2, dtype=torch.float64)
            model = models.SingleTaskGP(inputs, inputs.sin().sum(-1, keepdim=True)).eval()
            self.value = acquisition.LogExpectedImprovement(model, best_f=1.0)
            self.points = nn.Parameter(torch.rand(8, 1, 2, dtype=torch.float64))

        def forward(self, scale: Tensor) -> Tensor:
            found: Tensor = self.value(self.points * scale)
            return found

    return Built(Improvement(), (torch.ones((), dtype=torch.float64),))


def _kan() -> Built:
    model = load("kan").KAN(
        width=[4, 8, 2], grid=3, k=3, seed=0, auto_save=False, symbolic_enabled=False
    )
    return Built(model, (torch.randn(32, 4),))


def _siren() -> Built:
    model = load("siren_pytorch").SirenNet(dim_in=2, dim_hidden=32, dim_out=3, num_layers=4)
    return Built(model, (torch.rand(256, 2),))


MODELS: dict[str, Callable[[], Built]] = {
    "torch-geometric/GCN": lambda: _geometric("GCN", dropout=0.1),
    "torch-geometric/GAT": lambda: _geometric("GAT", heads=2),
    "torch-geometric/GIN": lambda: _geometric("GIN"),
    "torch-geometric/EdgeConv": _edge_conv,
    "torch-geometric/GPSConv": _gps,
    "torch-geometric/SchNet": lambda: _atoms(
        "SchNet", hidden_channels=32, num_filters=32, num_interactions=2, num_gaussians=16
    ),
    "neuraloperator/FNO": lambda: _operator(
        "FNO",
        2,
        1,
        16,
        16,
        n_modes=(4, 4),
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        n_layers=2,
    ),
    "neuraloperator/TFNO": lambda: _operator(
        "TFNO",
        2,
        1,
        16,
        16,
        n_modes=(4, 4),
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        n_layers=2,
        factorization="tucker",
        implementation="factorized",
        rank=0.2,
    ),
    "neuraloperator/UNO": _uno,
    "e3nn/Network": _e3nn_network,
    "e3nn/FullyConnectedTensorProduct": _e3nn_layers,
    "egnn-pytorch/EGNN_Network": _egnn,
    "se3-transformer-pytorch/SE3Transformer": _se3_transformer,
    "point-transformer-pytorch/PointTransformerLayer": _point_transformer,
    "torchdiffeq/rk4": lambda: _ode("odeint", method="rk4"),
    "torchdiffeq/dopri5": lambda: _ode("odeint", method="dopri5"),
    "torchdiffeq/adjoint": lambda: _ode("odeint_adjoint", method="rk4"),
    "torchsde/sdeint": _sde,
    "gpytorch/MultivariateNormal": _exact_gp,
    "botorch/LogExpectedImprovement": _acquisition,
    "pykan/KAN": _kan,
    "siren-pytorch/SirenNet": _siren,
}

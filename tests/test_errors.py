"""One base for all errors, and refusals that say what to write instead."""

import functools
import importlib
import inspect
import pickle
import pkgutil

import pytest
import torch
from torch import distributed, nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import remat
import remat_graph

PACKAGES = ("remat_graph", "remat_partition", "remat_solvers", "remat_exec", "remat")


def errors_of(name):
    """Find the public exceptions that a package defines, in whichever module."""
    package = importlib.import_module(name)
    found = pkgutil.walk_packages(package.__path__, f"{name}.")
    for module in [package, *(importlib.import_module(info.name) for info in found)]:
        for kind in vars(module).values():
            defined = inspect.isclass(kind) and kind.__module__ == module.__name__
            raised = inspect.isclass(kind) and issubclass(kind, Exception)
            if defined and raised and not issubclass(kind, Warning) and kind.__name__[0] != "_":
                yield kind


@pytest.mark.parametrize("name", PACKAGES)
def test_every_error_has_the_one_base(name):
    kinds = list(errors_of(name))
    assert kinds
    for kind in kinds:
        assert issubclass(kind, remat.RematError), kind


def test_the_base_is_one_and_users_may_still_catch_what_they_did():
    assert remat.RematError is remat_graph.RematError
    for kind in (remat.CaptureError, remat.SolverError, remat.BudgetTooSmall, remat.BudgetError):
        assert issubclass(kind, ValueError)
    for kind in (remat.ExecutionError, remat.BudgetExceeded, remat.BackwardError):
        assert issubclass(kind, RuntimeError)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def loss(output):
    return output.square().mean()


def rematerialized(model=None, **options):
    options = {"budget": "1MiB", "limit_seconds": 0.1} | options
    return remat.rematerialize(model or net(), **options)


def of_parameters(model, parameters):
    return loss(torch.func.functional_call(model, parameters, (batch(),)))


def gradient(model):
    torch.func.grad(functools.partial(of_parameters, model))(dict(model.named_parameters()))


def in_forward_mode(model):
    with forward_ad.dual_level():
        model(forward_ad.make_dual(batch(), batch()))


TRANSFORMS = {
    "grad": gradient,
    "vmap": lambda model: torch.func.vmap(model)(torch.stack([batch(), batch()])),
    "jvp": lambda model: torch.func.jvp(model, (batch(),), (batch(),)),
    "forward mode": in_forward_mode,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's forward mode
@pytest.mark.parametrize("regions", [None, nn.Linear])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_of_torch_func_is_for_the_original_model(name, regions):
    original = net()
    model = rematerialized(original, regions=regions)
    with pytest.raises(remat.RematError, match=r"torch\.func.*use the original model"):
        TRANSFORMS[name](model)
    TRANSFORMS[name](original)
    with torch.no_grad():
        torch.func.vmap(model)(torch.stack([batch(), batch()]))


@pytest.mark.parametrize("regions", [None, nn.Linear])
def test_a_double_backward_is_for_the_original_model(regions):
    model = rematerialized(regions=regions)
    x = batch().requires_grad_()
    with pytest.raises(remat.RematError, match=r"create_graph=True.*run the original module"):
        torch.autograd.grad(loss(model(x)), x, create_graph=True)


@pytest.mark.parametrize("regions", [None, nn.Linear])
def test_several_backwards_at_once_are_for_the_original_model(regions):
    original = net()
    model = rematerialized(original, regions=regions)
    x = batch().requires_grad_()
    several = {"grad_outputs": torch.eye(2)[0], "is_grads_batched": True}
    with pytest.raises(remat.RematError, match=r"is_grads_batched=True.*run the original module"):
        torch.autograd.grad(loss(model(x)), x, **several)
    torch.autograd.grad(loss(original(x)), x, **several)
    loss(model(x)).backward()  # what was refused leaves nothing behind


def narrowed(made, position):
    return made.narrow(0, position, 1)


def at_a_number(made, position):
    return made[int(position)]


class Indexed(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layers, self.read = net(), read
        self.register_buffer("position", torch.tensor(2))

    def forward(self, x):
        made = self.layers(x)
        return self.read(made, self.position) * made


def test_a_start_that_is_a_tensor_is_refused_by_its_line_and_a_number_makes_regions():
    with pytest.raises(remat.CaptureError, match=r"test_errors\.py:\d+.*int\(tensor\) there"):
        loss(rematerialized(Indexed(narrowed))(batch())).backward()
    model, original = rematerialized(Indexed(at_a_number)), Indexed(at_a_number)
    for each in (model, original):
        loss(each(batch())).backward()
    for one, other in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.fixture
def _process_group(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize(
    ("wrap", "instead"),
    [
        (DistributedDataParallel, r"DistributedDataParallel\(remat\.rematerialize\(model"),
        (fully_shard, r"regions=.* first.* and then fully_shard"),
        (lambda model: nn.Sequential(fully_shard(model)), r"regions=.* first"),
    ],
)
def test_a_model_that_is_wrapped_already_says_what_comes_first(wrap, instead):
    model = wrap(net())
    with pytest.raises(remat.RematError, match=instead):
        rematerialized(model)
    with pytest.raises(remat.RematError, match=instead):
        remat.plan(model, batch(), budget="1MiB")


class Holding:
    """A loss that has a function, such as a reduction, of its own."""

    def __init__(self, reduce):
        self.reduce = reduce

    def __call__(self, output):
        return self.reduce(loss(output))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("loss", lambda output: loss(output)),
        ("loss", functools.partial(lambda o: o)),
        ("loss", Holding(lambda o: o)),
        ("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ],
)
def test_what_cannot_be_pickled_says_what_can_be(name, given):
    with pytest.raises(remat.RematError, match=f"{name}= cannot be pickled.* at the top of a mod"):
        pickle.dumps(rematerialized(**{name: given}))


def test_a_loss_object_is_pickled_with_the_model():
    assert pickle.loads(pickle.dumps(rematerialized(loss=Holding(torch.mean))))


class Forked(nn.Module):
    """Depends on data, and on whether it is exported."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = self.layer(x)
        if torch.compiler.is_exporting():
            raise NotImplementedError("not for export")
        if y.sum() > 0:
            return y
        return -y


def test_both_errors_of_two_traces_are_shown():
    both = r"if y\.sum\(\) > 0.*torch\.where.*not for export"
    with pytest.raises(remat.CaptureError, match=both):
        remat.plan(Forked(), batch(), budget="1MiB")

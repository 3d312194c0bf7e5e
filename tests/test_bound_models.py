"""Models that hold methods of their own, as hooks of parts, and what else refers to them."""

import copy
import functools
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import remat


class Net(nn.Module):
    """A hook that is its method hands on a feature; others are chosen where it is made."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(16, 8)
        self.scale, self.seen, self.feature = 1.0, 0, None
        self.update, self.acts = self.by_average, {"soft": self.soft}
        self.register_buffer("mean", torch.zeros(16))
        self.handle = self.net[1].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.feature = output * self.scale
        return functional.dropout(output, 0.3, self.training)

    def by_average(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)

    def soft(self, x):
        return torch.tanh(x / self.scale)

    def forward(self, x):
        self.scale = 1.0 + self.seen
        self.seen += 1
        x = self.net(x)
        self.update(self.feature)
        return self.acts["soft"](x + self.head(self.feature - self.mean)).square().mean()


class Closed(Net):
    """Refers to itself by functions, a partial call and a part that holds it."""

    def __init__(self):
        super().__init__()
        self.noise = lambda x: functional.dropout(x, 0.5, self.training)
        self.again = functools.partial(lambda model, x: x * model.scale, self)
        object.__setattr__(self.head, "owner", self)
        self.net[0].register_forward_hook(lambda module, args, output, own=self: output + own.seen)
        self.net[0].register_forward_hook(
            lambda module, args, output, *, own=self: output / own.scale
        )

    def forward(self, x):
        return super().forward(self.again(self.noise(x * self.head.owner.scale)))


class Listed(Net):
    """Has itself in a list."""

    def __init__(self):
        super().__init__()
        self.all = [self]

    def forward(self, x):
        return super().forward(functional.dropout(x, 0.5, self.all[0].training))


class Helper:
    """Is no container."""

    def __init__(self, model):
        self.model = model


class Helped(Net):
    """Has an object that knows it."""

    def __init__(self):
        super().__init__()
        self.all = Helper(self)

    def forward(self, x):
        return super().forward(functional.dropout(x, 0.5, self.all.model.training))


class Weak(Net):
    """Is known to a part by a weak reference, which makes no circle."""

    def __init__(self):
        super().__init__()
        self.head.owner = weakref.ref(self)

    def forward(self, x):
        return super().forward(x * self.head.owner().scale)


def steps(model, count=3):
    for at in range(count):
        model.zero_grad()
        torch.manual_seed(at)
        loss = model(torch.randn(4, 8))
        loss.backward()
        yield loss.detach(), *(part.grad.clone() for part in model.parameters()), model.mean


def assert_like_eager(model, plain):
    for ours, theirs in zip(steps(model), steps(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert model.seen == plain.seen
    model.feature = plain.feature = None  # no copy is made of a tensor with a graph


def planned(plain):
    return remat.rematerialize(copy.deepcopy(plain), budget=2**24, limit_seconds=0.1)


def test_hooks_and_attributes_that_are_methods_are_of_the_copy():
    plain = Net()
    model = planned(plain)
    assert_like_eager(model, plain)
    assert_like_eager(copy.deepcopy(model), copy.deepcopy(plain))
    assert_like_eager(pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(plain)))
    model.eval()
    with torch.no_grad():
        x = torch.randn(4, 8)
        model.net(x)
        assert torch.equal(model.net(x), model.net(x))


class Block(nn.Module):
    """Holds a method, and hangs another on a part of itself, as a block that keeps its maps."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.act = nn.Linear(8, 8), 1.0, self.soft
        self.layer.register_forward_hook(self.scaled)

    def scaled(self, module, args, output):
        return output * self.scale

    def soft(self, x):
        return torch.tanh(x / self.scale)

    def forward(self, x):
        self.scale += 1.0
        return x + self.act(self.layer(x))


class Blocks(nn.Module):
    """Blocks, to one of which it listens by a method."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.seen, self.mean, self.total = 0, torch.zeros(()), 1.0
        self.blocks[1].register_forward_hook(self.listen)

    def listen(self, module, args, output):
        self.total = self.total + 1.0
        return output * self.total

    def forward(self, x):
        self.seen += 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("regions", [None, "blocks.*"])
def test_methods_of_parts_that_are_copied_are_of_these(regions):
    plain = Blocks()
    model = remat.rematerialize(
        copy.deepcopy(plain), budget=2**24, limit_seconds=0.1, regions=regions
    )
    for ours, theirs in zip(steps(model), steps(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert model.total == plain.total
    assert [block.scale for block in model.blocks] == [block.scale for block in plain.blocks]


def test_a_model_of_a_model_that_is_planned_has_methods_of_its_own():
    plain = Blocks()
    model = copy.deepcopy(plain)
    model.blocks[0] = remat.rematerialize(model.blocks[0], budget=2**24)
    model = remat.rematerialize(model, budget=2**24, limit_seconds=0.1)
    for ours, theirs in zip(steps(model), steps(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert [block.scale for block in model.blocks] == [block.scale for block in plain.blocks]


def test_a_list_of_blocks_that_are_copied_is_told_of():
    plain = Blocks()
    plain.order = [plain.blocks[1]]
    with pytest.warns(UserWarning, match="order of Blocks refers to the original"):
        remat.rematerialize(plain, budget=2**24, regions="blocks.*")


@pytest.mark.parametrize("kind", [Closed, Weak])
def test_functions_that_close_over_the_model_and_weak_references_are_of_the_copy(kind):
    torch.manual_seed(0)
    plain = kind()
    torch.manual_seed(0)  # a deep copy has the functions of the first
    assert_like_eager(remat.rematerialize(kind(), budget=2**24, limit_seconds=0.1), plain)


def test_the_original_keeps_its_own_hooks():
    plain = Net()
    other = copy.deepcopy(plain)
    assert_like_eager(remat.rematerialize(plain, budget=2**24, limit_seconds=0.1), other)
    assert (plain.seen, plain.feature) == (0, None)
    plain(torch.randn(4, 8))
    assert plain.feature is not None


def test_a_hook_that_is_removed_is_gone():
    plain = Net()
    model = remat.rematerialize(plain, budget=2**24, limit_seconds=0.1)
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model(x)
    plain.handle.remove()
    before = model.feature
    model(x)
    assert torch.equal(model.feature, before)


@pytest.mark.parametrize("kind", [Listed, Helped])
def test_what_else_refers_to_the_model_is_told_of_and_evaluates_with_it(kind):
    plain = kind()
    with pytest.warns(UserWarning, match=f"all of {kind.__name__} refers to the original model"):
        model = remat.rematerialize(plain, budget=2**24, limit_seconds=0.1)
    x = torch.randn(4, 8)
    model(x).backward()
    model.eval()
    with torch.no_grad():
        model(x)
    assert not plain.training

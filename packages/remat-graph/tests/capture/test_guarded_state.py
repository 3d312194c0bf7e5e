"""State that Python code reads: its changes are noticed between calls, and refused in a forward."""

import copy
import enum
import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from remat_graph.torch import AllocationRecorder, CaptureError, ModuleState, capture, read_call
from remat_graph.torch.guards import shares_with_module
from remat_graph.torch.snapshot import snapshot

X = torch.rand(3, 4)


class Kind(enum.Enum):
    A = 1
    B = 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.other = nn.ReLU()
        self.nested = {"a": {"k": 2.0}}
        self.act = functional.relu
        self.pairs = ((1.0, 2.0), (3.0, 4.0))
        self.kind = Kind.A
        self.names = frozenset({1})
        self.dtype = torch.float32
        self.array = np.ones(3)
        self.first = self.second = SimpleNamespace(k=1.0)
        self.partial = functools.partial(functional.leaky_relu, negative_slope=0.1)
        self.modules_in_order = [self.layer, self.other]
        self.slotted = Slotted([1])
        self.raw = b"1"
        self.number = 1
        self.nan = [float("nan")]

    def forward(self, x):
        return self.layer(x)


CHANGES = {
    "nested": lambda m: m.nested["a"].update(k=3.0),
    "act": lambda m: setattr(m, "act", functional.gelu),
    "pairs": lambda m: setattr(m, "pairs", ((7.0, 2.0), (3.0, 4.0))),
    "kind": lambda m: setattr(m, "kind", Kind.B),
    "names": lambda m: setattr(m, "names", frozenset({2})),
    "dtype": lambda m: setattr(m, "dtype", torch.float64),
    "array": lambda m: m.array.__setitem__(0, 9),
    "second": lambda m: setattr(m, "second", SimpleNamespace(k=5.0)),
    "partial": lambda m: m.partial.keywords.update(negative_slope=0.5),
    "modules_in_order": lambda m: m.modules_in_order.reverse(),
    "slotted": lambda m: m.slotted.value.append(2),
    "raw": lambda m: setattr(m, "raw", b"2"),
    "number": lambda m: setattr(m, "number", 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_state_of_a_module_is_noticed_and_named(name):
    module = Net()
    check = ModuleState(module).bind(module)
    assert check() is None
    CHANGES[name](module)
    assert name in check()


def test_a_module_that_differs_when_it_is_bound_is_noticed():
    state = ModuleState(Net())
    for name in ("pairs", "dtype", "act", "nested"):
        module = Net()
        CHANGES[name](module)
        assert f"{name} was changed" in state.bind(module)()


def test_equal_state_is_the_same_state():
    module = Net()
    check = ModuleState(module).bind(module)
    module.nested = {"a": {"k": 2.0}}
    module.array = module.array.copy()
    module.second = SimpleNamespace(k=1.0)
    module.nan = [-float("nan")]
    assert check() is None


ARGUMENTS = {
    "object": (lambda: SimpleNamespace(scale=2.0), lambda a: setattr(a, "scale", 3.0)),
    "set": (set, lambda a: a.add("a")),
    "array": (lambda: np.zeros(2), lambda a: a.__setitem__(0, 1)),
    "slots": (lambda: Slotted(1), lambda a: setattr(a, "value", 2)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_changed_in_place_is_another_call(name):
    make, change = ARGUMENTS[name]
    argument = make()
    before = read_call((X, argument), {}).signature
    assert before.difference(read_call((X, argument), {}).signature) is None
    assert before.difference(read_call((X, make()), {}).signature) is None
    change(argument)
    assert "other than tensors" in before.difference(read_call((X, argument), {}).signature)


def test_cycles_depth_and_size_have_an_end():
    cycle = {"k": 1}
    cycle["self"] = [cycle]
    before = snapshot(cycle)
    assert snapshot(cycle) == before
    cycle["k"] = 2
    assert snapshot(cycle) != before
    deep = functools.reduce(lambda inner, _: [inner], range(100), 1)
    assert snapshot(deep) == snapshot(deep)
    for huge in (list(range(200_000)), dict.fromkeys(range(200_000)), set(range(200_000))):
        assert snapshot([huge]) == snapshot([huge])
        assert snapshot(huge) != snapshot(copy.copy(huge))
    assert snapshot([0.0]) != snapshot([-0.0])
    assert snapshot([1]) != snapshot([True])


def test_inputs_that_share_their_memory_are_another_call():
    apart = read_call((X, X.clone()), {}).signature
    assert "share their memory" in apart.difference(read_call((X, X.view(3, 4)), {}).signature)
    assert apart.difference(read_call((X + 1, X), {}).signature) is None


def test_inputs_that_share_memory_with_the_module():
    module = nn.BatchNorm1d(4)
    module.plain = torch.ones(4)
    mean, plain = module.running_mean, module.plain
    assert shares_with_module([X, mean[:2], plain], module) == ((), (2,), (5,))
    assert shares_with_module([X], module) == shares_with_module([X + 1], module) == ((),)
    assert shares_with_module([], module) == ()


class Calls(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.settings = {"n": 0}
        self.config = SimpleNamespace(n=0, inner=[1])
        self.rng = random.Random(0)
        self.generator = np.random.default_rng(0)
        self.outside = [torch.ones(4)]
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def counts_in_a_dict(m, x):
    m.settings["n"] += 1
    return m.layer(x)


def counts_in_an_object(m, x):
    m.config.inner[0] += 1
    return m.layer(x)


def draws(m, x):
    return m.layer(x) * m.rng.random()


def draws_numpy(m, x):
    return m.layer(x) * float(m.generator.random())


def seeds_in_a_fork(m, x):
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return m.layer(x) + torch.randn(4)


def reads_a_list(m, x):
    return m.layer(x) * m.outside[0]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (counts_in_a_dict, r"changes Calls\.settings"),
        (counts_in_an_object, r"changes Calls\.config"),
        (draws, r"changes Calls\.rng"),
        (draws_numpy, r"changes Calls\.generator"),
        (seeds_in_a_fork, "seeds torch's global random generator"),
        (reads_a_list, r"neither parameter, buffer, attribute nor input.*register it"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_a_replay_would_not_repeat_is_refused(forward, message):
    seed = torch.manual_seed
    with pytest.raises(CaptureError, match=message):
        capture(Calls(forward), (X,), costs="estimate")
    assert torch.manual_seed is torch.random.manual_seed is seed


class Keeper:
    def __init__(self):
        self.kept = {}

    def hook(self, module, args, output):
        self.kept["last"] = output


@pytest.mark.parametrize("kind", ["closure", "method", "object of a closure"])
def test_a_hook_that_keeps_a_tensor_is_refused(kind):
    kept, keeper = [], Keeper()
    hooks = {
        "closure": lambda m, a, output: kept.append(output),
        "method": keeper.hook,
        "object of a closure": lambda m, a, output: keeper.hook(m, a, output),
    }
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module[0].register_forward_hook(hooks[kind])
    with pytest.raises(CaptureError, match="hook of 0 stores a tensor"):
        capture(module, (X,), costs="estimate")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_old_weight_norm_is_refused_by_the_name_of_the_new():
    module = nn.utils.weight_norm(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"parametrizations\.weight_norm"):
        capture(module, (X,), costs="estimate")


def test_measuring_inside_a_profiler_is_refused():
    cpu = torch.device("cpu")
    with AllocationRecorder(cpu) as recorder:
        kept = torch.ones(1000)
        with pytest.raises(RuntimeError, match=r"already running.*example inputs"):
            AllocationRecorder(cpu).__enter__()
    assert recorder.peak_bytes >= kept.nbytes


def test_the_line_is_found_in_a_folder_that_is_called_like_a_package(tmp_path):
    file = tmp_path / "remat" / "torch" / "model.py"
    source = "def forward(m, x):\n    return m.layer(x) if x.sum() > 0 else x\n"
    names = {}
    exec(compile(source, str(file), "exec"), names)
    with pytest.raises(CaptureError) as error:
        capture(Calls(names["forward"]), (X,), costs="estimate")
    assert f"{file}:2" in str(error.value)

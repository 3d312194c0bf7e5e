"""What a forward stores or draws is put back after it was traced, and each trace starts alike."""

import functools
import gc
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.fx._lazy_graph_module import _LazyGraphModule

from remat_graph.torch import capture, capture_region, left_as_it_was
from remat_graph.torch.tracing import caches

X = torch.rand(3, 4)


class Storing(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.plain = torch.ones(4)
        self.count, self.log, self.kinds = 0, [1], {1}
        self.config = SimpleNamespace(seen={"n": 0, "inner": [1]}, last=deque([1], maxlen=3))
        self.rng, self.generator = random.Random(0), np.random.default_rng(0)
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


def counts(m, x):
    m.count += 1
    return torch.sin(x) if m.count > 1 else m.layer(x)


def appends(m, x):
    m.log.append(m.layer(x))
    m.kinds.add(2)
    return m.log[-1]


def stores(m, x):
    m.last = m.layer(x)
    return m.last


def replaces(m, x):
    m.plain = m.plain * 2
    m.layer.extra, m.mean = m.plain, m.mean + x.mean(0)
    return m.layer(x) * m.plain + m.mean


def stores_in_an_object(m, x):
    m.config.seen["n"] += 1
    m.config.seen["inner"][0] = m.config.seen["last"] = x
    m.config.last.extend([x, x, x])
    m.config.more = x
    return m.layer(x)


def draws(m, x):
    own = m.rng.random() + m.generator.random()
    return m.layer(x) * (own + random.random() + float(np.random.rand()))


def seeds(m, x):
    torch.manual_seed(7)
    return m.layer(x) + torch.randn(4)


def seeds_in_a_fork(m, x):
    with torch.random.fork_rng():
        return seeds(m, x)


def content(item):
    """All that can be read from a module, tensors by identity."""
    if isinstance(item, nn.Module):
        return {name: content(value) for name, value in vars(item).items() if name != "_forward"}
    if isinstance(item, (dict, SimpleNamespace)):
        entries = item if isinstance(item, dict) else vars(item)
        return {name: content(value) for name, value in entries.items()}
    if isinstance(item, (list, deque)):
        return [content(value) for value in item]
    if isinstance(item, random.Random):
        return item.getstate()
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    return id(item)


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize(
    "forward",
    [counts, appends, stores, replaces, stores_in_an_object, draws, seeds, seeds_in_a_fork],
    ids=lambda item: item.__name__,
)
def test_a_forward_that_stores_or_draws_is_captured_and_the_module_left_as_it_was(forward):
    module = Storing(forward)
    before, generators = content(module), states()
    found = capture(module, (X,), costs="estimate")
    assert content(module) == before
    assert states() == generators
    assert not module.mean.any()
    assert len(found.program.gradients) == 2
    assert capture(module, (X,), costs="estimate").graph == found.graph


class Keeper:
    def __init__(self):
        self.kept = {}

    def hook(self, module, args, output):
        self.kept["last"] = output

    def also(self, kept, module, args, output):
        kept.append(output)


@pytest.mark.parametrize("kind", ["closure", "method", "object of a closure", "partial"])
def test_what_a_hook_keeps_is_dropped(kind):
    kept, keeper = [], Keeper()
    hooks = {
        "closure": lambda m, a, output: kept.append(output),
        "method": keeper.hook,
        "object of a closure": lambda m, a, output: keeper.hook(m, a, output),
        "partial": functools.partial(keeper.also, kept),
    }
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module[0].register_forward_hook(hooks[kind])
    capture(module, (X,), costs="estimate")
    assert (kept, keeper.kept) == ([], {})


def test_containers_come_back_as_what_they_were():
    module = nn.Linear(2, 2)
    module.items = [{"a": 1}, OrderedDict(z=1, a=2), defaultdict(list, k=[1]), {1, 2}, [3, [4]]]
    expected = [{"a": 1}, OrderedDict(z=1, a=2), defaultdict(list, k=[1]), {1, 2}, [3, [4]]]
    inner = list(module.items)
    with left_as_it_was(module):
        module.items[1].move_to_end("z")
        module.items[2]["new"].append(1)
        module.items[3].clear()
        module.items[4][1].append(5)
        module.items[0] = None
    assert module.items == expected
    assert all(one is other for one, other in zip(module.items, inner, strict=True))
    assert list(module.items[1]) == ["z", "a"]
    assert module.items[2].default_factory is list


def test_classes_and_lazy_layers_come_back_as_what_they_were():
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 4))
    with left_as_it_was(module):
        module(X)
        nn.utils.parametrizations.weight_norm(module[2])
        assert [type(part) for part in module[:2]] == [nn.Linear, nn.BatchNorm1d]
    assert [type(part) for part in module] == [nn.LazyLinear, nn.LazyBatchNorm1d, nn.Linear]
    assert module[0].has_uninitialized_params()
    assert isinstance(module[1].running_mean, nn.parameter.UninitializedBuffer)
    assert [*module[2].state_dict()] == ["weight", "bias"]
    assert module(X).shape == (3, 4)
    assert type(module[0]) is nn.Linear


def test_a_module_that_contains_itself_or_looks_odd_is_no_obstacle():
    class Odd:
        def __getattribute__(self, name):
            raise RuntimeError

    module = nn.Linear(2, 2)
    module.cycle = [module]
    module.cycle.append(module.cycle)
    module.odd = [Odd(), weakref.proxy(Keeper()), nn.UninitializedParameter()]
    module.large = list(range(100_000))
    deep = functools.reduce(lambda inner, _: [inner], range(100), 1)
    module.deep = deep
    with left_as_it_was(module):
        module.cycle.append(1)
    assert len(module.cycle) == 2


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_old_norms_of_a_layer_inside_are_captured(norm):
    module = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh())
    weight = module[0].weight
    found = capture(module, (X,), costs="estimate")
    assert module[0].weight is weight
    assert len(found.program.gradients) == len(list(module.parameters()))


def test_a_capture_of_a_region_lets_go_of_its_inputs():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)))
    captures = []

    def back_end(graph, _):
        def run(*inputs):
            captures.append(capture_region(graph, inputs, costs="estimate"))
            return graph(*inputs)

        return run

    x = torch.randn(4, 8)
    torch.compile(net, backend=back_end)(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert captures[0]._trace_whole is not None  # one of several blocks was traced
    assert held() is None


def test_a_lazy_graph_keeps_the_code_that_it_writes_of_itself():
    graph = _LazyGraphModule.from_graphmodule(symbolic_trace(nn.ReLU()))
    with left_as_it_was(graph):
        graph(torch.ones(1))
    assert "relu" in graph.code.lower()


@functools.lru_cache(maxsize=1)
def positions():
    return torch.arange(4.0)


def test_caches_are_sought_in_the_code_of_a_model_and_not_in_ours_or_that_of_its_tests():
    """Which this file refers to: to look through all that takes longer than to trace a layer."""
    found = caches.caches_within(Storing(counts))
    assert any(cache is positions for cache in found)
    names = {cache.__module__.partition(".")[0] for cache in found}
    assert not names & {"remat_graph", "pytest", "_pytest", "hypothesis"}

"""Taking structures apart and putting them together again as what they were."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from remat_graph.torch import CaptureError, flatten

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Pair:
    first: object
    second: object = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    inner: object
    name: str = "frozen"


class Plain:
    def __init__(self, tensor):
        self.tensor = tensor
        self.label = "plain"
        self.more = [tensor + 1]


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def tensor(value=0.0):
    return torch.full((2,), float(value))


def rebuilt(item):
    tensors, structure = flatten(item)
    assert structure.leaves == len(tensors) == len(list(structure.paths()))
    return structure.rebuild(iter(tensors))


def same(one, other):
    """Equal in type and content, tensors by identity."""
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if dataclasses.is_dataclass(one) or isinstance(one, Plain):
        return same(vars(one), vars(other))
    return one == other


ITEMS = {
    "tensor": tensor(),
    "tuple": (tensor(), [tensor(), 3], None),
    "namedtuple": Point(tensor(), y=(1, tensor())),
    "torch.return_types": torch.max(torch.rand(3, 2), dim=0),
    "torch.Size": (torch.Size([2, 3]), tensor()),
    "dict": {"b": tensor(), "a": {"deep": [tensor()]}, 3: "three"},
    "OrderedDict": OrderedDict(z=tensor(), a=tensor()),
    "defaultdict": defaultdict(list, x=tensor()),
    "dataclass": Pair(tensor(), {"k": tensor()}),
    "frozen dataclass": Frozen(Frozen(tensor(), "inner")),
    "plain object": Plain(tensor()),
    "nothing with tensors": {"a": [1, 2.5, "x", None, b"", True, 1j]},
    "empty": ((), [], {}),
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_rebuilding_gives_the_item_back(item):
    assert same(rebuilt(item), item)


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_rebuilding_takes_other_tensors_and_leaves_the_item_alone(item):
    tensors, structure = flatten(item)
    others = [t.clone() for t in tensors]
    made = structure.rebuild(iter(others))
    assert [id(t) for t in flatten(made)[0]] == [id(t) for t in others]
    assert [id(t) for t in flatten(item)[0]] == [id(t) for t in tensors]


def test_a_model_output_comes_back_as_one():
    output = CausalLMOutputWithPast(loss=torch.ones(()), logits=tensor())
    made = rebuilt(output)
    assert type(made) is CausalLMOutputWithPast
    assert list(made) == ["loss", "logits"]
    assert made.loss is output.loss
    assert made[1] is output.logits
    assert made.past_key_values is None
    assert list(flatten(output)[1].paths()) == [".loss", ".logits"]


def test_a_key_value_cache_comes_back_as_one():
    cache = DynamicCache()
    keys, values = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 3, 4)
    cache.update(keys, values, 0)
    tensors, structure = flatten({"cache": cache})
    assert len(tensors) == 2
    made = structure.rebuild(iter([keys + 1, values + 1]))["cache"]
    assert type(made) is DynamicCache
    assert torch.equal(made.layers[0].keys, keys + 1)
    assert torch.equal(cache.layers[0].keys, keys)
    assert made.get_seq_length() == 3


def test_objects_without_a_dict_and_callables_are_constants():
    slotted = Slotted(1)
    for item in (slotted, print, torch.nn.Linear(1, 1), Plain, torch.float32, torch.device("cpu")):
        tensors, structure = flatten([item])
        assert tensors == []
        assert structure.rebuild(iter(()))[0] is item


@pytest.mark.parametrize(
    "make", [list, dict, lambda: Plain(tensor())], ids=["list", "dict", "object"]
)
def test_a_cycle_is_refused(make):
    item = make()
    if isinstance(item, list):
        item.append(item)
    elif isinstance(item, dict):
        item["self"] = item
    else:
        item.me = item
    with pytest.raises(CaptureError, match="contains itself"):
        flatten(item)


def test_the_same_object_twice_is_no_cycle():
    shared = [tensor()]
    assert len(flatten((shared, shared))[0]) == 2


_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=2), st.just("tensor"))
_NESTED = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(Pair),
        inner.map(Frozen),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=8,
)


def _with_tensors(item):
    if item == "tensor":
        return tensor()
    if isinstance(item, dict):
        return {key: _with_tensors(value) for key, value in item.items()}
    if isinstance(item, Point):
        return Point(*map(_with_tensors, item))
    if isinstance(item, (list, tuple)):
        return type(item)(map(_with_tensors, item))
    if isinstance(item, Pair):
        return Pair(_with_tensors(item.first))
    if isinstance(item, Frozen):
        return Frozen(_with_tensors(item.inner))
    return item


@given(_NESTED)
def test_any_nesting_comes_back(item):
    item = _with_tensors(item)
    assert same(rebuilt(item), item)

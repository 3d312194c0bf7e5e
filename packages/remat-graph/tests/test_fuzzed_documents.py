"""Damaged and hostile documents: an equal object, or one error that names the file."""

import contextlib
import json
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import (
    Block,
    Compute,
    DocumentError,
    Free,
    Graph,
    GraphError,
    Hierarchy,
    Op,
    Schedule,
    Solution,
    Status,
    Trial,
    Value,
    canonical_hash,
    decode,
    encode,
    from_networkx,
    simulate,
    to_dot,
    to_networkx,
    to_svg,
)

CODE = "__import__('os').system('touch ran')"
SUSPECT = {
    "exec",
    "compile",
    "import",
    "os.system",
    "os.exec",
    "subprocess.Popen",
    "pickle.find_class",
}
STRINGS = [
    "", " ", "A", "a", "op0", "v0.0", "forward", "backward", "compute", "free", CODE, f"'){CODE}#",
    f"\"\n{CODE}\n\"", "</title><script>alert(1)</script>", "]]>&lt;", "\\",
    "\x00\x1b[2J", "\n\r\t", "\ud800", "\u202e\u2028", "\U0001f600" * 20, "{0.__class__}",
    "%s%n", "[red]bold[/red]", "../../etc/passwd", "x" * 5000,
]  # fmt: skip
NUMBERS = [
    -1, 0, 1, True, 0.5, -0.0, 1e-320, 1e308, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30,
    10**400,
]  # fmt: skip
SHAPES = [None, [], {}, [[]], [None], {"name": "b", "members": []}, ["compute", "A"]]


class Listener:
    """Hears what is run while it listens; such a hook cannot be taken away again."""

    def __init__(self):
        self.heard = []
        self.listens = False

    def __call__(self, event, arguments):
        if self.listens and event in SUSPECT:
            self.heard.append(f"{event} {arguments!r}"[:200])


@pytest.fixture(scope="module")
def listener(fixed_documents):
    for item in fixed_documents:
        decode(encode(item))  # msgspec evaluates the annotations of a type when it first reads it
    made = Listener()
    sys.addaudithook(made)
    return made


@pytest.fixture(scope="module")
def fixed_documents():
    schedule = Schedule((Compute("A"), Free("a"), Compute("A")))
    trials = (Trial("a", Status.LIMIT, None, 3, None, 0.5),)
    solution = Solution(Status.FEASIBLE, schedule, 2.0, 10, 1.5, "refine", 0.25, trials)
    graph = Graph((Value("a", 4),), (Op("A", (), ("a",), 0.5),))
    return graph, Hierarchy(graph, Block("root", ("A",))), schedule, solution


def read(data, listener):
    """Decode; see that nothing is run, and that an error is ours and names the document."""
    listener.heard.clear()
    listener.listens = True
    try:
        found = decode(data, source="plan.json")
    except DocumentError as error:
        found = str(error)
    finally:
        listener.listens = False
    assert listener.heard == []
    if not isinstance(found, str):
        return found
    assert found.startswith("plan.json ")
    assert len(found) < 40_000
    return None


def use(item):
    """Do with a document that was read what the packages do; only errors of ours may come out."""
    assert decode(encode(item)) == item
    graph = item.graph if isinstance(item, Hierarchy) else item
    if isinstance(item, Hierarchy):
        for fold in (False, True):
            ElementTree.fromstring(to_svg(item, fold=fold))
            to_dot(item, fold=fold).encode()
    if isinstance(graph, Graph):
        assert from_networkx(to_networkx(graph)) == graph
        canonical_hash(graph)
        with contextlib.suppress(GraphError):
            simulate(graph, Schedule(tuple(Compute(op.name) for op in graph.ops)))


def places(tree, here=()):
    """Name every place in a tree, the root first."""
    yield here
    if isinstance(tree, dict | list):
        for key, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(part, (*here, key))


def at(tree, place):
    for key in place:
        tree = tree[key]
    return tree


def mutated(data, tree):
    """Change a tree at one place."""
    tree = json.loads(json.dumps(tree))
    found = list(places(tree))[1:]
    place = data.draw(st.sampled_from(found))
    parent, key = at(tree, place[:-1]), place[-1]
    kind = data.draw(st.sampled_from(["value", "copy", "remove", "rename", "twice", "deep"]))
    if kind == "value":
        parent[key] = data.draw(st.sampled_from([*STRINGS, *NUMBERS, *SHAPES]))
    elif kind == "copy":
        parent[key] = json.loads(json.dumps(at(tree, data.draw(st.sampled_from(found)))))
    elif kind == "remove":
        del parent[key]
    elif kind == "deep":
        for _ in range(data.draw(st.sampled_from([3, 200]))):
            parent[key] = [parent[key]] if data.draw(st.booleans()) else {"members": [parent[key]]}
    elif isinstance(parent, list):
        parent.insert(data.draw(st.integers(0, len(parent))), parent[key])
    else:
        parent[data.draw(st.sampled_from(STRINGS))] = parent[key]
        if kind == "rename":
            del parent[key]
    return tree


@pytest.fixture(scope="module")
def documents(hierarchies, graphs, fixed_documents):
    """Draw one of any kind."""

    def draw(data):
        kind = data.draw(st.sampled_from(["graph", "hierarchy", "fixed"]))
        if kind == "graph":
            return data.draw(graphs())
        return (
            hierarchies(data)
            if kind == "hierarchy"
            else data.draw(st.sampled_from(fixed_documents))
        )

    return draw


@given(data=st.data())
def test_a_changed_document_is_read_as_another_or_refused_by_name(documents, listener, data):
    tree = json.loads(encode(documents(data)))
    for _ in range(data.draw(st.integers(1, 3))):
        tree = mutated(data, tree)
    text = json.dumps(tree)
    item = read(text.encode(), listener)
    if item is not None:
        use(item)


@given(data=st.data())
def test_changed_bytes_are_read_as_a_document_or_refused_by_name(documents, listener, data):
    content = bytearray(encode(documents(data)))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.integers(0, 4)))
        insert = data.draw(
            st.one_of(
                st.binary(max_size=4),
                st.sampled_from([b"NaN", b"1e999", b"9" * 5000, b'"', b"\\ud800", b"[" * 5000]),
            )
        )
        content[start:end] = insert
    item = read(bytes(content), listener)
    if item is not None:
        use(item)

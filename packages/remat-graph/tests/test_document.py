import contextlib
import json
import math
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_graph import (
    SCHEMA_VERSION,
    Block,
    Compute,
    DocumentError,
    Free,
    Graph,
    Hierarchy,
    Op,
    Provenance,
    Schedule,
    Solution,
    Stage,
    Status,
    Trial,
    Value,
    decode,
    encode,
    load,
    save,
)

SCHEDULE = Schedule((Compute("A"), Free("a"), Compute("A")))
SOLUTION = Solution(Status.FEASIBLE, SCHEDULE, 2.0, 10, 1.5, "refine", 0.25)


def document(item):
    return json.loads(encode(item))


def refused(data, match):
    if not isinstance(data, bytes):
        data = json.dumps(data).encode()
    with pytest.raises(DocumentError, match=match):
        decode(data, source="plan.json")


@given(data=st.data())
def test_random_graphs_come_back_equal(any_graphs, data):
    graph = data.draw(any_graphs())
    owed = graph.without_alternatives()
    forward = tuple(op.name for op in owed.ops if op.stage is Stage.FORWARD)
    hierarchy = Hierarchy(owed, Block("root", forward))
    for item in (graph, hierarchy):
        back = decode(encode(item))
        assert back == item
        assert encode(back) == encode(item)


@pytest.mark.parametrize(
    "item",
    [
        Schedule(()),
        SCHEDULE,
        SOLUTION,
        Solution(Status.INFEASIBLE, None, 0.0, 0, None, "", 0.0),
        replace(
            SOLUTION,
            trials=(
                Trial("a", Status.LIMIT, None, 3, None, 0.5),
                Trial("b", Status.OPTIMAL, 0.1, 2, 0.1, 2.0),
            ),
        ),
        Solution(
            Status.OPTIMAL, SCHEDULE, 0.1 + 0.2, 2**62, 1e-300, "x\u00e9\u2192\U0001f600", 1.0
        ),
    ],
)
def test_comes_back_equal(item):
    assert decode(encode(item)) == item


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "infeasible"}, "that is infeasible has a schedule"),
        ({"status": "limit"}, "that is limit has a schedule"),
        ({"schedule": None}, "that is feasible has no schedule"),
        ({"lower_bound": 2.5}, "takes 2.0 s, less than its bound, 2.5 s"),
    ],
)
def test_a_solution_that_contradicts_itself_is_refused(change, said):
    told = document(SOLUTION)
    assert told["body"].keys() >= change.keys()
    told["body"] |= change
    refused(told, said)


def test_nested_blocks_come_back_equal(diamond):
    inner = Block("inner", (Block("leaf", ("B",)), "C"))
    hierarchy = Hierarchy(diamond, Block("root", ("A", inner, "L")))
    assert decode(encode(hierarchy)) == hierarchy


def test_a_block_deeper_than_the_stack_is_refused():
    deep = b'{"name":"b","members":[' * 100_000
    data = b'{"body":{"graph":{},"root":' + deep + b'},"kind":"hierarchy","version":1}'
    refused(data, "plan.json")


def test_equal_graphs_give_equal_bytes():
    def graph(resident, time, op_fields):
        return Graph(
            tuple(Value(name, 1) for name in "abcdefgh"),
            (Op("op", (), (), time, **op_fields),),
            resident=resident,
            results=resident,
        )

    one = graph(frozenset("abcdefgh"), 1.0, {})
    others = [
        graph(frozenset(reversed("abcdefgh")), 1, {}),
        graph(list("hgfedcba"), True, {"workspace_bytes": 0, "order_after": ()}),
    ]
    assert [encode(other) for other in others] == [encode(one)] * 2
    zero = Op("op", (), (), 0.0)
    assert encode(Graph((), (zero,))) == encode(Graph((), (replace(zero, time=-0.0),)))
    assert encode(replace(SOLUTION, time=2)) == encode(SOLUTION)


def test_the_bytes_are_these():
    values = (Value("w", 8), Value("a", 4), Value("b", 4))
    ops = (
        Op("A", ("w",), ("a",), 0.5, provenance=Provenance("h.0", "a.py:1")),
        Op("B", ("a",), ("b",), 1.0, overwrites=(("a", "b"),)),
    )
    graph = Graph(values, ops, resident=frozenset("w"))
    assert encode(graph) == (
        b'{"kind":"graph","version":3,"body":{"values":[{"name":"w","size_bytes":8},'
        b'{"name":"a","size_bytes":4},{"name":"b","size_bytes":4}],'
        b'"ops":[{"name":"A","inputs":["w"],"outputs":["a"],"time":0.5,'
        b'"provenance":["h.0","a.py:1"]},{"name":"B","inputs":["a"],"outputs":["b"],'
        b'"time":1.0,"overwrites":[["a","b"]]}],'
        b'"resident":["w"],"results":[],"boundary":null}}\n'
    )
    assert encode(Schedule((Compute("A"), Free("a")))) == (
        b'{"kind":"schedule","version":3,"body":{"steps":[["compute","A"],["free","a"]]}}\n'
    )


@pytest.mark.parametrize("version", [1, 2])
def test_what_earlier_versions_wrote_is_read(version):
    data = (
        b'{"kind":"graph","version":%d,"body":{"values":[{"name":"w","size_bytes":8},'
        b'{"name":"a","size_bytes":4}],"ops":[{"name":"A","inputs":["w"],"outputs":["a"],'
        b'"time":0.5}],"resident":["w"],"results":[],"boundary":null}}\n' % version
    )
    values = (Value("w", 8), Value("a", 4))
    ops = (Op("A", ("w",), ("a",), 0.5),)
    assert decode(data) == Graph(values, ops, resident=frozenset("w"))


@pytest.mark.parametrize("field", ["time", "lower_bound", "solve_seconds"])
@pytest.mark.parametrize("figure", [math.inf, math.nan])
def test_what_json_cannot_hold_is_not_written(field, figure):
    with pytest.raises(DocumentError, match=f"{field} is {figure}"):
        encode(replace(SOLUTION, **{field: figure}))


@pytest.mark.parametrize("field", ["time", "lower_bound", "seconds"])
def test_what_json_cannot_hold_of_a_trial_is_not_written(field):
    trial = replace(Trial("a", Status.OPTIMAL, 1.0, 3, 1.0, 0.5), **{field: math.inf})
    with pytest.raises(DocumentError, match=f"{field} is inf"):
        encode(replace(SOLUTION, trials=(trial,)))


def test_other_types_are_not_written():
    with pytest.raises(DocumentError, match="cannot write a Value"):
        encode(Value("v", 1))


def test_every_truncation_is_refused(diamond):
    data = encode(diamond).rstrip()
    for length in range(len(data)):
        refused(data[:length], "plan.json")


@given(data=st.data())
def test_a_damaged_byte_is_refused_or_read_as_a_document(diamond_bytes, data):
    at = data.draw(st.integers(0, len(diamond_bytes) - 1))
    byte = data.draw(st.integers(0, 255))
    damaged = diamond_bytes[:at] + bytes([byte]) + diamond_bytes[at + 1 :]
    with contextlib.suppress(DocumentError):
        assert isinstance(decode(damaged), Graph)


@pytest.fixture(scope="module")
def diamond_bytes():
    graph = Graph(
        (Value("w", 10), Value("a", 4), Value("b", 2)),
        (Op("A", ("w",), ("a",), 0.5), Op("B", ("a",), ("b",), 1.0, order_after=("A",))),
        resident=frozenset("w"),
        results=frozenset("b"),
    )
    return encode(graph)


def at(body, *keys):
    for key in keys:
        body = body[key]
    return body


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        (("ops", 0, "time"), "1", r"Expected `float`, got `str` - at `\$\.body\.ops\[0\]\.time`"),
        (("ops", 2, "inputs"), "a", r"\$\.body\.ops\[2\]\.inputs`"),
        (("ops", 1, "outputs", 0), None, r"\$\.body\.ops\[1\]\.outputs\[0\]`|outputs\[\.\.\.\]"),
        (("ops", 0, "stage"), "sideways", r"'sideways' - at `\$\.body\.ops\[0\]\.stage`"),
        (("ops", 0, "replayable"), 1, r"\$\.body\.ops\[0\]\.replayable`"),
        (("ops", 0, "surprise"), 1, r"unknown field `surprise` - at `\$\.body\.ops\[0\]`"),
        (("values", 3, "size_bytes"), 1.5, r"\$\.body\.values\[3\]\.size_bytes`"),
        (("values",), {}, r"\$\.body\.values`"),
        (("boundary",), 3, r"\$\.body\.boundary`"),
        (("resident",), None, r"\$\.body\.resident`"),
        (("ops", 0, "time"), -1.0, "holds an invalid graph: op 'A' has time=-1.0"),
        (("boundary",), "zzz", "holds an invalid graph: boundary 'zzz'"),
    ],
)
def test_the_field_at_fault_is_named(diamond, where, value, match):
    whole = document(diamond)
    at(whole["body"], *where[:-1])[where[-1]] = value
    refused(whole, match)


@pytest.mark.parametrize("missing", ["values", "ops", "resident", "results", "boundary"])
def test_a_missing_field_is_named(diamond, missing):
    whole = document(diamond)
    del whole["body"][missing]
    refused(whole, f"plan.json is a damaged graph: .*missing required field `{missing}`")


@pytest.mark.parametrize("step", [["jump", "A"], ["compute"], ["compute", "A", "B"], "A", []])
def test_a_damaged_step_is_named(step):
    whole = document(SCHEDULE)
    whole["body"]["steps"][1] = step
    refused(whole, r"damaged schedule: .*\$\.body\.steps\[1\]")


def test_a_damaged_hierarchy_is_refused(diamond):
    whole = document(Hierarchy(diamond, Block("root", ("A", "B", "C", "L"))))
    whole["body"]["root"]["members"].pop()
    refused(whole, "invalid hierarchy: op 'L' is in no block")


def test_an_unknown_status_is_refused():
    whole = document(SOLUTION)
    whole["body"]["status"] = "great"
    refused(whole, r"damaged solution: .*'great' - at `\$\.body\.status`")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": SCHEMA_VERSION + 1}, f"schema version {SCHEMA_VERSION + 1}; this remat-graph"),
        ({"version": 0}, "schema version 0"),
        ({"version": "1"}, r"not a remat document: .*\$\.version"),
        ({"kind": "poem"}, "of kind 'poem'; known are .*'graph'"),
        ({"kind": None}, r"not a remat document: .*\$\.kind"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"kind": "schedule"}, "damaged schedule"),
    ],
)
def test_the_envelope(diamond, change, match):
    refused(document(diamond) | change, match)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"\xff\xfe", b"{}", b"not json"])
def test_what_is_no_document_is_refused(data):
    refused(data, "plan.json is not a remat document")


def test_save_and_load(tmp_path, diamond):
    path = tmp_path / "graph.json"
    save(diamond, path)
    assert load(path) == diamond
    save(SCHEDULE, str(path))
    assert load(str(path)) == SCHEDULE
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_document_alone(tmp_path, monkeypatch, diamond):
    path = tmp_path / "graph.json"
    save(SCHEDULE, path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(diamond, path)
    assert load(path) == SCHEDULE
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_encoded_touches_no_file(tmp_path):
    with pytest.raises(DocumentError):
        save(replace(SOLUTION, time=math.nan), tmp_path / "solution.json")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_or_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        save(SCHEDULE, tmp_path / "none" / "s.json")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "s.json")


def test_load_names_the_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(b"{")
    with pytest.raises(DocumentError, match=r"broken\.json is not a remat document"):
        load(path)

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from remat_graph import Block, Graph, Hierarchy, Op, Value, to_dot, to_svg
from remat_graph.drawing.layout import MOST_LANES, lay_out
from remat_graph.drawing.picture import draw, readable_bytes

SVG = "{http://www.w3.org/2000/svg}"


def layers(count, odd=()):
    """A chain of blocks of two ops, all alike but for the odd ones; a skip from first to last."""
    values, ops, blocks = [Value("x", 8)], [], []
    for i in range(count):
        source = f"h{i - 1}" if i else "x"
        size = 16 if i in odd else 8
        values += [Value(f"m{i}", size), Value(f"h{i}", 8)]
        ops.append(Op(f"a{i}", (source,), (f"m{i}",), 1.0))
        ops.append(Op(f"b{i}", (f"m{i}", source), (f"h{i}",), 1.0))
        blocks.append(Block(f"layer{i}", (f"a{i}", f"b{i}")))
    ops.append(Op("end", (f"h{count - 1}", "h0"), (), 1.0, order_after=("a0", "b1")))
    graph = Graph(tuple(values), tuple(ops), resident=frozenset("x"))
    return Hierarchy(graph, Block("root", (*blocks, "end")))


def colours(hierarchy, fold=False):
    return {box.title: box.colour for box in draw(hierarchy, fold=fold).root.boxes()}


def test_identical_blocks_have_one_colour_and_others_none():
    found = colours(layers(5, odd=[3]))
    alike = {found[f"layer{i}"] for i in (1, 2, 4)}  # 0 reads what is resident, and is read twice
    assert len(alike) == 1
    assert re.fullmatch("#[0-9a-f]{6}", *alike)
    assert [found[name] for name in ("layer0", "layer3", "root", "a1", "end")] == 5 * [None]
    two = colours(layers(6, odd=[3, 4]))
    assert None not in {two["layer2"], two["layer3"]}
    assert two["layer2"] != two["layer3"] == two["layer4"]


@settings(max_examples=40)
@given(data=st.data())
def test_colours_are_classes(hierarchies, data):
    hierarchy = hierarchies(data)
    found = {box.title: box.colour for box in draw(hierarchy).root.boxes() if box.is_block}
    for unique in hierarchy.unique_blocks:
        shades = {found[member.name] for member in unique.members}
        assert len(shades) == 1
        assert (shades == {None}) == (len(unique.members) == 1)


def test_folding_opens_one_block_of_a_class():
    picture = draw(layers(5), fold=True)
    opened = [box.title for box in picture.root.boxes() if box.members]
    assert opened == ["root", "layer0", "layer1"]
    assert [box.ops for box in picture.root.members] == [2, 2, 2, 2, 2, 1]
    arrows = {(arrow.source, arrow.target): dict(arrow.values) for arrow in picture.arrows}
    assert arrows["block layer2", "block layer3"] == {"h2": 8}
    assert arrows["op b1", "block layer2"] == {"h1": 8}
    assert arrows["op a0", "op end"] == {}
    assert ("block layer2", "block layer2") not in arrows


@given(data=st.data())
def test_every_dependency_is_an_arrow(hierarchies, data):
    hierarchy = hierarchies(data)
    graph = hierarchy.graph
    picture = draw(hierarchy)
    ops = graph.ops[: graph.boundary_index]
    hard = {(graph.ops[graph.producer[v]].name, op.name, v, graph.value_by_name[v].size_bytes)
            for op in ops for v in op.inputs if v in graph.producer}  # fmt: skip
    soft = {(earlier, op.name) for op in ops for earlier in op.order_after}
    names = [(a.source.removeprefix("op "), a.target.removeprefix("op ")) for a in picture.arrows]
    assert sorted(names) == sorted({(source, target) for source, target, *_ in hard} | soft)
    assert hard == {
        (*ends, v, size)
        for ends, arrow in zip(names, picture.arrows, strict=True)
        for v, size in arrow.values.items()
    }


@given(data=st.data())
def test_a_layout_overlaps_nothing_and_runs_down(data):
    size = st.floats(5, 80)
    sizes = data.draw(st.lists(st.tuples(size, size), max_size=14))
    ends = st.integers(0, max(0, len(sizes) - 1))
    arrows = sorted({(min(pair), max(pair)) for pair in data.draw(st.lists(st.tuples(ends, ends)))})
    arrows = [(a, b) for a, b in arrows if a != b]
    layout = lay_out(sizes, arrows)
    boxes = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(layout.corners, sizes, strict=True)]
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert left >= -1e-6
        assert right <= layout.width + 1e-6
        assert top >= 0
        assert bottom <= layout.height + 1e-6
        for other in boxes[:i]:
            assert (
                left >= other[2] or right <= other[0] or top >= other[3] or bottom <= other[1]
            )  # fmt: skip
    for (source, target), route in zip(arrows, layout.routes, strict=True):
        assert route[0][1] == boxes[source][3]
        assert route[-1][1] == boxes[target][1]
        heights = [y for _, y in route]
        assert all(y <= below + 1e-6 for y, below in pairwise(heights))
        for (x, y), (same, end) in zip(route[::2], route[1::2], strict=True):  # past the boxes
            assert x == same
            for left, top, right, bottom in boxes:
                beside = x <= left or x >= right or end <= top + 1e-6 or y >= bottom - 1e-6
                assert beside


def test_long_arrows_share_one_lane_beside_the_boxes():
    """Lanes of their own would be one in every layer for every box: a picture of n² places."""
    count = 400
    chain = [(i, i + 1) for i in range(count - 1)]
    long = [(i, count - 1) for i in range(count - 2)]
    layout = lay_out([(30.0, 20.0)] * count, [*chain, *long])
    routes = dict(zip([*chain, *long], layout.routes, strict=True))
    assert max(map(len, layout.routes)) <= 2 * MOST_LANES + 4
    right = max(x for x, _ in layout.corners) + 30
    beside = {points[2][0] for ends, points in routes.items() if ends[1] - ends[0] > MOST_LANES + 1}
    assert len(beside) == 1
    assert right < beside.pop() <= layout.width
    assert len(routes[count - 2 - MOST_LANES, count - 1]) == 2 * (MOST_LANES + 1) + 2


def rectangles(svg):
    """Find the boxes of a picture: text to (left, top, right, bottom, fill)."""
    found = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        x, y, width, height = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert text.text not in found
        found[text.text] = (x, y, x + width, y + height, rect.get("fill"))
    return found


@settings(max_examples=40)
@given(data=st.data(), fold=st.booleans())
def test_an_svg_shows_all_boxes_in_one_another(hierarchies, data, fold):
    hierarchy = hierarchies(data)
    picture = draw(hierarchy, fold=fold)
    svg = to_svg(hierarchy, fold=fold)
    found = rectangles(svg)
    place = {
        box.key: found[f"{box.title} · {box.ops} ops" if box.is_block else box.title]
        for box in picture.root.boxes()
    }
    assert len(place) == len(found)
    for box in picture.root.boxes():
        left, top, right, bottom, fill = place[box.key]
        assert fill == (box.colour or "white")
        for member in box.members:
            inner = place[member.key]
            assert left < inner[0] < inner[2] < right
            assert top < inner[1] < inner[3] < bottom
    paths = len(list(ET.fromstring(svg).iter(f"{SVG}path")))
    assert paths <= len(picture.arrows)
    assert (paths > 0) == bool(picture.arrows)
    width, height = (float(ET.fromstring(svg).get(key)) for key in ("width", "height"))
    assert max(corners[2] for corners in found.values()) < width
    assert max(corners[3] for corners in found.values()) < height


def test_the_arrows_of_an_svg_join_members_of_one_block():
    """Between blocks once for each pair, whatever is read how often inside; soft ones dashed."""
    svg = ET.fromstring(to_svg(layers(3)))
    titles = [path.find(f"{SVG}title").text for path in svg.iter(f"{SVG}path")]
    # In each layer m; between layers h; to the end h2, h0, and what only comes before it: layer 1.
    assert sorted(titles) == sorted([*(3 * ["8 B"]), *(2 * ["8 B"]), "8 B", "8 B", "order only"])
    dashed = [path for path in svg.iter(f"{SVG}path") if path.get("class") == "soft"]
    assert len(dashed) == 1


def dot_nodes(text):
    return re.findall(r'^ *n\d+ \[label="((?:[^"\\]|\\.)*)"', text, re.MULTILINE)


@settings(max_examples=40)
@given(data=st.data())
def test_dot_has_every_op_and_block_once(hierarchies, data):
    hierarchy = hierarchies(data)
    text = to_dot(hierarchy)
    graph = hierarchy.graph
    if graph.boundary_index:
        assert sorted(dot_nodes(text)) == sorted(
            op.name for op in graph.ops[: graph.boundary_index]
        )
        assert text.count("subgraph cluster_") == len(list(hierarchy.root.blocks()))
    assert text.count("{") == text.count("}")
    assert text.count(" -> ") == len(draw(hierarchy).arrows)


def test_dot_of_two_layers():
    text = to_dot(layers(4), fold=True)
    colour = colours(layers(4))["layer1"]
    head = f'subgraph cluster_4 {{\n      label="layer1 (2 ops)"\n      fillcolor="{colour}"'
    assert head in text
    assert f'    n7 [label="layer2 (2 ops)", fillcolor="{colour}", peripheries=2]' in text
    assert 'n7 -> n8 [penwidth=3.60, tooltip="8 B"]' in text
    assert "n2 -> n9 [penwidth=0.60, style=dashed]" in text


def test_any_name_can_be_drawn():
    names = ['"quoted"', "<a & b>", "back\\slash", "\x00\x1b\ud800", "line\nbreak", "]]>", "&lt;"]
    graph = Graph((), tuple(Op(name, (), (), 1.0) for name in names))
    hierarchy = Hierarchy(graph, Block("<root>", (names[0], Block(names[0], tuple(names[1:])))))
    found = rectangles(to_svg(hierarchy))
    assert {'"quoted"', "<a & b>", "back\\slash", '"quoted" · 6 ops', "]]>", "&lt;"} <= found.keys()
    to_svg(hierarchy).encode()
    dot = to_dot(hierarchy)
    dot.encode()
    odd = "\N{REPLACEMENT CHARACTER}"
    assert dot_nodes(dot) == [
        '\\"quoted\\"', "<a &amp; b>", "back\\\\slash", 3 * odd, f"line{odd}break",
        "]]>", "&amp;lt;",
    ]  # fmt: skip


def test_nothing_to_draw():
    empty = Hierarchy(Graph((), ()), Block("root", ()))
    assert list(rectangles(to_svg(empty))) == ["root · 0 ops"]
    assert dot_nodes(to_dot(empty)) == ["root (0 ops)"]


def test_a_long_chain_is_drawn_from_top_to_bottom():
    found = rectangles(to_svg(layers(60)))
    tops = [found[f"layer{i} · 2 ops"][1] for i in range(60)]
    assert tops == sorted(set(tops))


def test_many_independent_ops_stand_in_several_rows():
    graph = Graph((), tuple(Op(f"op{i}", (), (), 1.0) for i in range(40)))
    names = tuple(op.name for op in graph.ops)
    corners = rectangles(to_svg(Hierarchy(graph, Block("root", names))))
    rows = [top for text, (_, top, *_) in corners.items() if text.startswith("op")]
    assert max(rows.count(top) for top in rows) == 8


def test_bytes_are_readable():
    amounts = [0, 999, 1000, 5 * 2**20, 3 * 2**40]
    expected = ["0 B", "999 B", "0.977 KiB", "5 MiB", "3.07e+03 GiB"]
    assert [readable_bytes(amount) for amount in amounts] == expected


def test_the_time_of_a_block_is_that_of_its_ops():
    hierarchy = layers(2)
    slow = replace(hierarchy.graph.ops[0], time=4.0)
    graph = replace(hierarchy.graph, ops=(slow, *hierarchy.graph.ops[1:]))
    root = draw(Hierarchy(graph, hierarchy.root)).root
    assert [box.seconds for box in root.boxes()] == [8.0, 5.0, 4.0, 1.0, 2.0, 1.0, 1.0, 1.0]

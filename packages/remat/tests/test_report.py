"""The page of a plan: what it says, that it needs nothing else, and that it is readable."""

import html
import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import remat
from remat.command import app

EVIL = "<b>&amp;</b></script><script>pwned=1</script><img src=x onerror=pwned=1>"


class Net(nn.Module):
    """Its second layer has a name that would be code if it was not escaped."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.add_module(EVIL, nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1)))

    def forward(self, x):
        return getattr(self, EVIL)(self.first(x)).sum()


@pytest.fixture(scope="module")
def plan():
    return remat.plan(Net(), torch.ones(256, 32), budget=0.7, costs="estimate", limit_seconds=0.1)


@pytest.fixture(scope="module")
def page(plan, tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.html"
    curve = remat.tradeoff(plan.graph, points=2, limit_seconds=0.2)
    plan.report(file, curve=curve)
    return file


class Reader(HTMLParser):
    """Collects the tags of a page, the text of its table, and what it would load."""

    def __init__(self):
        super().__init__()
        self.tags, self.cells, self.loads, self._in_cell = [], [], [], False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        self._in_cell = tag in ("td", "small") or self._in_cell
        if tag in ("td", "small"):
            self.cells.append("")

    def handle_endtag(self, tag):
        self._in_cell = self._in_cell and tag != "td"

    def handle_data(self, data):
        if self._in_cell:
            self.cells[-1] += data


def test_the_page_tells_the_plan_and_loads_nothing(plan, page):
    text = page.read_text()
    reader = Reader()
    reader.feed(text)
    parts = [part for part in plan.explain().parts if part.kept_bytes or part.recomputed_bytes]
    assert len(parts) > 2
    for part in parts:
        assert part.label in reader.cells
        assert part.source in reader.cells
        assert part.why in reader.cells
    assert reader.loads == []
    assert "img" not in reader.tags
    assert text.count("Plotly.newPlot(") >= 3
    assert "default-src 'none'" in text


def test_no_name_becomes_code(page):
    text = page.read_text()
    assert "&lt;/script&gt;&lt;script&gt;pwned=1" in text  # of the table
    assert not re.search(r"<script>pwned|<img src=x", text)


def test_the_command_writes_the_same_page(plan, page, tmp_path):
    plan.save(tmp_path / "plan.json")
    words = ["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out.html")]
    told = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(told.stdout) == {"written": str(tmp_path / "out.html")}
    text = (tmp_path / "out.html").read_text()
    assert "By module and source line" in text
    assert "plan.json</h1>" in text
    assert f"torch {torch.__version__}" in text


def test_what_is_missing_is_said_before_any_work(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(remat.RematError, match=r"pip install 'remat\[report\]'"):
        plan.report(tmp_path / "report.html")


WATCH = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
console.error = (...words) => errors.push(words.join(" "));
</script>"""
LOOK = """<script>
addEventListener("load", () => setTimeout(() => {
  const all = (what) => [...document.querySelectorAll(what)];
  const kept = () => all("tbody tr").map((row) => +row.cells[1].dataset.figure);
  const head = document.querySelectorAll("th button")[1];
  head.click();
  const down = kept();
  head.click();
  parent.postMessage({
    errors, down, up: kept(), width: innerWidth, pwned: window.pwned ?? null,
    overflow: document.documentElement.scrollWidth - innerWidth,
    drawn: all(".plotly-graph-div .main-svg").length,
    colours: all(".plotly-graph-div").map((drawn) => drawn._fullLayout.font.color),
    names: all(".slicetext").map((name) => name.textContent),
  }, "*");
}, 500));
</script></body>"""
FRAME = '<iframe src="page.html" style="border:0; height:800px; width:{}px; color-scheme:{}">'
OUTER = """<!DOCTYPE html><pre id="found"></pre>{}<script>
const found = [];
addEventListener("message", (event) => {{
  found.push(event.data);
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


def test_a_browser_shows_it_small_and_large_light_and_dark(page, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("neither chromium nor google-chrome is there to look at the page with")
    text = page.read_text().replace("<head>", f"<head>{WATCH}").replace("</body>", LOOK)
    (tmp_path / "page.html").write_text(text)
    views = [(width, scheme) for width in (390, 1200) for scheme in ("light", "dark")]
    frames = "".join(FRAME.format(*view) + "</iframe>" for view in views)
    (tmp_path / "outer.html").write_text(OUTER.format(frames))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=20000"]
    command.append((tmp_path / "outer.html").as_uri())
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    told = re.search(r'<pre id="found">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert told is not None, ran.stderr
    found = json.loads(html.unescape(told[1]))
    assert sorted(view["width"] for view in found) == [390, 390, 1200, 1200]
    for view in found:
        assert view["errors"] == []
        assert view["pwned"] is None
        assert view["overflow"] <= 0
        assert view["drawn"] >= 3
        assert any(EVIL in name for name in view["names"])
        assert any("kept" in name for name in view["names"]) == (view["width"] > 640)
        assert view["down"] == sorted(view["down"], reverse=True) != view["up"]
        assert view["up"] == sorted(view["up"])
    colours = sorted({colour for view in found for colour in view["colours"]})
    assert colours == ["#1c2430", "#e6e9ed"]

"""The figures in README and docs are those of the files in benchmarks/results."""

import json

import pytest
import torch

import provenance
import tables
from page_tables import TABLES, reading, training

RESULTS = sorted(reading.RESULTS.glob("*.json"))


def test_every_page_is_up_to_date():
    stale = [str(page.relative_to(tables.ROOT)) for page, _ in tables.differing()]
    assert not stale, "run `hatch run tables`"


def test_every_table_stands_in_one_page():
    named = [name for page in tables.pages() for name in tables.named_in(page.read_text())]
    assert sorted(named) == sorted(TABLES)


def test_another_figure_in_the_page_or_in_the_results_is_noticed(monkeypatch):
    page = (tables.ROOT / "docs" / "figures.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| gradient accumulation"))
    changed = page.replace(row, row.replace("bitwise", "1e-03"))
    assert changed != page
    assert tables.renewed(changed) == page
    loops = reading.results("loops")
    loops["loops"][1]["difference"] = 1e-3
    monkeypatch.setattr(training, "results", lambda name: loops)
    assert tables.renewed("<!-- loops -->\n<!-- end of loops -->") not in page


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="none-such"):
        tables.renewed("<!-- none-such -->\n<!-- end of none-such -->")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_what_they_were_made_on(path):
    machine = json.loads(path.read_text())["machine"]
    assert {"commit", "date"} <= machine.keys()
    assert not {"host", "hostname", "node"} & machine.keys()


def test_results_name_files_as_on_any_machine():
    found = {"at": f"{torch.nn.functional.__file__}:7", "of ours": str(provenance.ROOT / "a.py")}
    written = json.loads(provenance.as_json(found))
    assert written == {"at": "torch/nn/functional.py:7", "of ours": "a.py"}

"""The table beside others: what is lost is told as plainly as what is won."""

import json

import pytest

from peer_table import Records, markdown, outcome

PAIR = {"one": {"peak_bytes": 50, "seconds": 1.0}, "model": "unet", "threads": 1, "rounds": 3,
        "commit": "c", "peak_ratio": 0.5}  # fmt: skip


def row(variant, against="plain", ratio=1.2, spread=0.01, **more):
    times = {"time_ratio": ratio, "quartiles": [ratio - spread, ratio + spread]}
    return PAIR | times | {"variant": variant, "against": against} | more


ROWS = [
    row("checkpoint per block"),
    row("remat", "checkpoint per block", ratio=0.8),
    row("inductor 0.5", ratio=0.9),
    row("remat", "inductor 0.5", ratio=1.25),
    row("inductor 0.1"),
    {**PAIR, "variant": "remat", "against": "inductor 0.1", "out_of_reach": "too small"},
    row("remat 0.6", ratio=1.1),
]


def test_the_markdown_is_that_of_the_rows():
    lines = markdown(ROWS).splitlines()
    assert lines[0] == "| peak / time of plain eager, one thread | U-Net |"
    assert lines[2] == "| checkpoint per block | 0.50 / 1.20; `remat` there faster 0.80 |"
    assert "0.50 / 0.90; `remat` there slower 1.25" in lines[3]
    assert "`remat` there out of reach" in lines[4]
    assert lines[5] == "| **`remat`**, budget 0.6 | 0.50 / 1.10 |"
    assert "1 of 3 faster, 1 of 3 slower, 1 of 3 out of reach" in lines[-1]
    assert "U-Net beside inductor 0.5 with 1 thread, slower 1.25" in lines[-1]
    assert "checkpoint" not in lines[-1]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (row("remat", "x", ratio=1.0), "level"),
        (row("remat", "x", ratio=0.9, spread=0.2), "level"),
        (row("remat", "x", ratio=0.9, peak_ratio=1.01), "out of reach"),
        ({"error": "crash"}, "failed"),
    ],
)
def test_a_doubtful_outcome_is_no_win(found, said):
    assert outcome(found) == said


def test_rows_of_another_commit_are_measured_again(tmp_path):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps({"rows": ROWS}))
    assert not Records(path, keep="of this commit").all()
    assert Records(path, keep="all").has(ROWS[0])
    records = Records(path, keep="none")
    records.add(row("remat 0.5"))
    assert Records(path, keep="of this commit").has(row("remat 0.5"))
    path.write_text("{}")
    with pytest.raises(SystemExit, match="--fresh"):
        Records(path, keep="all")

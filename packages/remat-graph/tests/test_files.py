import os
import stat
from pathlib import Path

import pytest

from remat_graph import write_atomically


@pytest.mark.parametrize("data", ["", "grüße\n\r\n", b"\xff\x00\n"])
@pytest.mark.parametrize("kind", [str, Path])
def test_the_file_has_what_was_given_and_nothing_is_left_beside_it(tmp_path, kind, data):
    path = tmp_path / "file"
    path.write_text("something longer than what comes now")
    write_atomically(kind(path), data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_it_has_the_permissions_of_any_new_file(tmp_path, mask):
    before = os.umask(mask)
    try:
        (tmp_path / "usual").touch()
        write_atomically(tmp_path / "written", "new")
    finally:
        os.umask(before)
    usual, written = (tmp_path / name for name in ("usual", "written"))
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


@pytest.mark.parametrize("old", ["old", None])
@pytest.mark.parametrize("broken", ["write", "fsync", "replace", "interrupt"])
def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch, broken, old):
    path = tmp_path / "file"
    if old is not None:
        path.write_text(old)
    error = KeyboardInterrupt if broken == "interrupt" else OSError

    def fail(*_):
        raise error("disk full")

    if broken == "write":
        real_open = Path.open

        def open_broken(self, *args):
            file = real_open(self, *args)
            file.raw.close()
            return file

        monkeypatch.setattr(Path, "open", open_broken)
    elif broken == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((error, ValueError)):
        write_atomically(path, "new")
    monkeypatch.undo()
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_a_missing_folder_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "file", "new")
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_one_and_what_is_no_file_stays_there(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    for folder in ("none", "file"):
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="directory") as raised:
            write_atomically(tmp_path / folder / "plan.json", "new")
        assert raised.value.filename == str(tmp_path / folder / "plan.json")

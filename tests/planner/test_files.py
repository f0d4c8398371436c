"""Atomic writes, and read errors in one line."""

import os
from functools import partial
from pathlib import Path

import pytest
from pydantic import PositiveInt

from omnibal.base.errors import UserError
from omnibal.base.files import (
    atomic,
    atomic_directory,
    read_json_model,
    read_text,
    read_toml_model,
    write_json_model,
)
from omnibal.base.frozen import Frozen
from omnibal.base.record_log import RecordLog
from omnibal.data.columns import Columns
from omnibal.families.folder import read_config_file

pytestmark = pytest.mark.quick


class Inner(Frozen):
    count: PositiveInt
    ratio: float = 1.0


class Outer(Frozen):
    inner: tuple[Inner, ...]


read_json = partial(read_json_model, Outer)
read_toml = partial(read_toml_model, Inner)


def test_a_finished_write_replaces_the_file(tmp_path):
    """Prevents readers from seeing partial new content."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic(path) as temporary:
        temporary.write_text("new")
        assert (path.read_text(), temporary.parent) == ("old", path.parent)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_write_keeps_the_old_file_and_no_other(tmp_path, error):
    """Prevents a partial file, or a leftover temporary file."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), atomic(path) as temporary:
        temporary.write_text("ne")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_cannot_be_written(tmp_path):
    """Prevents a result lost because its path is a folder, and a leftover temporary file."""
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: is a directory"), atomic(tmp_path / "out") as path:
        path.write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("folder", ["absent", "file"])
def test_the_error_of_the_write_is_the_one_raised(tmp_path, folder):
    """Prevents cleanup from hiding the write's error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"No such file|Not a directory") as raised:
        write_json_model(Inner(count=1), tmp_path / folder / "a.json")
    assert raised.value.__context__ is None


def test_models_come_back(tmp_path):
    """Prevents a model that cannot be read back, and bytes that differ between writes."""
    path, model = tmp_path / "a.json", Outer(inner=(Inner(count=2), Inner(count=3, ratio=0.5)))
    write_json_model(model, path)
    first, again = path.read_bytes(), read_json_model(Outer, path, "r")
    write_json_model(again, path)
    assert (again, path.read_bytes()) == (model, first)


@pytest.mark.parametrize(
    ("read", "content", "expected"),
    [
        (read_json, b"", "Invalid JSON"),
        (read_json, b"{", "Invalid JSON"),
        (read_json, b"\xff{}", "not UTF-8 text"),
        (read_json, b"[]", "valid dictionary|object"),
        (read_json, b"{}", "inner: Field required; mend it"),
        (read_json, b'{"inner": [], "x": 1}', r"x: Extra inputs are not permitted \(given: 1\)"),
        (read_json, b'{"inner": [{"count": 1}, {"count": 0}]}', r"inner: 1: count: .*\(given: 0\)"),
        (read_json, b'{"inner": [{"count": 1, "ratio": NaN}]}', r"ratio: .*finite.*\(given: nan\)"),
        (read_json, b'{"inner": "' + b"y" * 999 + b'"}', "inner: "),
        (read_toml, b"count = ", "not TOML: "),
        (read_toml, b"count = " + b"[" * 9999, "not TOML: "),
        (read_toml, b"count = " + b"9" * 5000, "not TOML: "),
        (read_toml, b"count = 1\nname = '\xff'", "not UTF-8"),
        (read_toml, b"count = 0", r"count: .*\(given: 0\)"),
        (read_toml, b"count = 1\nratio = nan", "ratio: .*finite"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, read, content, expected):
    """Prevents tracebacks, and pydantic messages of many lines."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=expected) as raised:
        read(tmp_path / "a", "mend it")
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'a'}: ") and message.endswith("; mend it")
    assert "\n" not in message and len(message) < len(str(tmp_path)) + 250


@pytest.mark.parametrize("read", [read_json, read_toml])
def test_what_is_no_file_is_named(tmp_path: Path, read):
    """Prevents a traceback for a wrong path."""
    with pytest.raises(UserError, match="absent: no such file; mend it"):
        read(tmp_path / "absent", "mend it")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\); mend it"):
        read(tmp_path, "mend it")


def test_a_finished_folder_gets_its_name(tmp_path):
    """Prevents a folder visible before it is complete, or accessible only to its owner."""
    path, other = tmp_path / "deep" / "out", tmp_path / "other"
    with atomic_directory(path) as temporary:
        (temporary / "a").write_text("a")
        assert not path.exists()
    other.mkdir()
    assert path.stat().st_mode == other.stat().st_mode
    assert set(path.parent.rglob("*")) == {path, path / "a"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_a_failed_folder_leaves_nothing_and_takes_nothing(tmp_path, error):
    """Prevents leftovers of a failed write, and deleting a user's folder."""
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "kept").write_text("kept")
    with pytest.raises(error), atomic_directory(tmp_path / "out") as temporary:
        (temporary / "a").write_text("a")
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["out.part"]
    assert (tmp_path / "out.part" / "kept").read_text() == "kept"


@pytest.mark.parametrize("leads_to", ["absent", "folder"])
def test_a_link_is_not_written_over(tmp_path, leads_to):
    """Prevents hours of writing that end in an error, as a folder cannot replace a link."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / leads_to)
    with pytest.raises(UserError, match="out: exists already"), atomic_directory(tmp_path / "out"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "out"}


def test_a_pipe_is_not_waited_for(tmp_path):
    """Prevents hanging on a pipe or device, or `--data-index /dev/null` deleting it."""
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path / "config.json", Path("/dev/zero")):
        with pytest.raises(UserError, match="is a pipe or a device"):
            read_text(path, "give a file")
        with pytest.raises(UserError, match="is a pipe or a device"):
            Columns.open(path, [], "give a file")
        with pytest.raises(UserError, match="is a pipe or a device"):
            RecordLog(path, b"title", b"key").read("a log")


@pytest.mark.parametrize("value", ['{"a":' * 9999 + "1" + "}" * 9999, "9" * 5000])
def test_odd_json_is_one_line(tmp_path, value):
    """Prevents a traceback for deeply nested JSON or a huge number."""
    path = tmp_path / "config.json"
    path.write_text(f'{{"a": {value}}}')
    with pytest.raises(UserError, match="Invalid JSON"):
        read_config_file(path)

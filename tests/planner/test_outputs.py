"""Outputs of commands never replace an input, another output or a device."""

import contextlib
import json
import os
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_cases import failure, run, words_of
from plan_cases import example_lengths, example_profile, request

from omnibal.base.errors import UserError
from omnibal.base.files import atomic, write_json_model
from omnibal.base.outputs import check_files, check_folder
from omnibal.data.lengths import write_lengths
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.packing.packs import read_packs
from tools.make_digits_dataset import make_dataset, train_tokenizer

PACK = "pack --max-tiles 8 --max-tokens 512 --dp 2 --no-bound"
DIGITS = "--model internvl-digits --cluster laptop-cpu"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_lengths(example_lengths(), folder / "l.parquet")
    write_json_model(example_profile(), folder / "profile.json")
    save_plan(make_plan(request()), folder / "plan")
    (folder / "tokenizer.model").write_bytes(train_tokenizer(iter(["abc 0123456789"])))
    sources = {"a": "annotations.jsonl", "b": "x.skipped.txt"}
    sources = {name: {"root": "", "annotation": path} for name, path in sources.items()}
    for name, text in {
        "l.json": '[{"vit_num": 1, "token_num": 99, "image_flags": 1}]',
        "meta.json": '{"a": {"token_lengths": "l.json"}}',
        "data.json": json.dumps(sources),
        **dict.fromkeys(("annotations.jsonl", "added_tokens.json", "x.skipped.txt"), "{}\n"),
        "run/run.jsonl": "\n",
        "replay/stage_1.json": "{}",
        "m.toml": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "linked").symlink_to(folder / "l.parquet")
    (folder / "linked_plan").symlink_to(folder / "plan")
    os.link(folder / "plan" / "plan.json", folder / "hard")
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SCANNED = ("data.json", "annotations.jsonl", "tokenizer.model", "added_tokens.json", "x")
SCAN = "lengths data.json --model internvl-digits --tokenizer-model tokenizer.model"


@pytest.mark.parametrize(
    "command",
    [
        *(f"{PACK} l.parquet -o {name}" for name in ("l.parquet", "./plan/../l.parquet", "linked")),
        f"{PACK} meta.json -o l.json",
        *(f"{PACK} l.parquet {option} m.toml -o m.toml" for option in ("--model", "--cluster")),
        "report plan -o plan/plan.json",
        "report linked_plan -o plan/packs.parquet",
        "report plan -o plan/profile.json",
        "report plan --run run -o run/run.jsonl",
        "report plan --replay replay -o replay/stage_1.json",
        "simulate plan --trace plan/plan.json",
        "simulate plan --trace hard",
        *(f"plan {DIGITS} --steps-of plan -o {name}" for name in ("plan", "linked_plan")),
        f"plan {DIGITS} --lengths plan/lengths.parquet -o plan",
        *(f"{SCAN} -o {name}" for name in SCANNED),
    ],
)
def test_no_output_replaces_an_input(capsys, root, monkeypatch, command):
    """Prevents overwriting an input, by any name of the output."""
    monkeypatch.chdir(root)
    before = contents(root)
    error = failure(capsys, command)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert "an input of this command" in error or "is not Parquet" in error
    assert contents(root) == before


def test_outputs_do_not_replace_each_other(capsys, root, monkeypatch, tmp_path):
    """Prevents two outputs overwriting each other without an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.svg").symlink_to("x.svg")
    for other in ("x.svg", "./x.svg", "link.svg"):
        error = failure(capsys, f"{PACK} {root / 'l.parquet'} -o x.svg --picture {other}")
        assert "are the same file" in error
    assert [path.name for path in tmp_path.iterdir()] == ["link.svg"]


def test_devices_and_pipes_are_written_to(capsys, root, tmp_path):
    """Prevents replacing /dev/null by a file, and a pipe's reader that waits forever."""
    run(f"{PACK} -o /dev/null", root / "l.parquet")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    pipe, came = tmp_path / "pipe", tmp_path / "came.parquet"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: came.write_bytes(pipe.read_bytes()), daemon=True)
    reader.start()
    run(f"{PACK} -o", pipe, root / "l.parquet")
    reader.join(10)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert read_packs(came).packs.offsets[-1] == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["came.parquet", "pipe"]


def test_standard_output_takes_the_file(tmp_path, root):
    """Prevents replacing the link /dev/stdout, or the file behind it."""
    into = tmp_path / "into"
    with into.open("wb") as file:
        subprocess.run(
            [sys.executable, "-m", "omnibal", "simulate", root / "plan", "--trace", "/dev/stdout"],
            stdout=file, check=True, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE,
        )  # fmt: skip
    assert Path("/dev/stdout").is_symlink()
    trace, _, table = into.read_text().partition("\n")
    assert json.loads(trace)["traceEvents"] and "busy" in table


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_that_takes_nothing_is_told_of(capsys, root):
    """Prevents a traceback, or success, although nothing was written."""
    assert "No space left" in failure(capsys, "simulate", root / "plan", "--trace", "/dev/full")


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (f"{SCAN} -o {{}}/new.parquet", "new.parquet.partial"),
        (f"{SCAN} -o /dev/null --data-index {{}}/index", "index"),
        (f"{PACK} l.parquet -o {{}}/packs.parquet", "packs.parquet"),
        ("report plan -o {}/r.html", "r.html"),
    ],
)
def test_a_full_disk_names_the_file(root, tmp_path, command, file):
    """Prevents a write error without path or remedy, or blaming an input."""
    make_dataset(tmp_path / "digits", 10, 10, 0)
    scanned = "lengths " + str(tmp_path / "digits" / "train" / "meta.json")
    words = words_of(command.replace("lengths data.json", scanned).format(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-m", "omnibal", *words],
        cwd=root,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8)),
    )
    assert ended.returncode == 2
    path = re.escape(str(tmp_path / file))
    expected = rf"error: {path}: cannot be written \(File too large\); make room.*"
    assert re.fullmatch(expected, ended.stderr.splitlines()[-1])


def test_other_kinds_of_file_are_refused(tmp_path, monkeypatch):
    """Prevents replacing a socket by a file."""
    path = tmp_path / "s"
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind("s")
        with pytest.raises(UserError, match="neither a regular file"):
            check_files({"-o": path}, [])
        assert stat.S_ISSOCK(path.stat().st_mode)
    with pytest.raises(UserError, match="is no Unicode text"):
        check_files({"-o": tmp_path / "\udcff"}, [])
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(UserError, match="leads nowhere"):
        check_folder("-o", tmp_path / "gone", [])


def test_a_link_stays_and_its_file_is_written(tmp_path):
    """Prevents replacing a link to a shared result by a separate file."""
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "file").write_text("old")
    (tmp_path / "link").symlink_to("far/file")
    (tmp_path / "link.part").write_text("the user's")
    with atomic(tmp_path / "link") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "file").read_text() == "new"
    assert (tmp_path / "link.part").read_text() == "the user's"


def test_scan_into_a_device_leaves_no_files_beside_it(tmp_path, monkeypatch):
    """Prevents creating `/dev/null.partial` and `/dev/null.skipped.txt`."""
    make_dataset(tmp_path / "digits", 10, 10, 0)
    monkeypatch.chdir(tmp_path / "digits" / "train")
    before = set(Path("/dev").iterdir())
    inputs = "lengths meta.json --model internvl-digits --tokenizer-model ../tokenizer.model"
    run(f"{inputs} --on-error skip -o /dev/null")
    assert set(Path("/dev").iterdir()) == before

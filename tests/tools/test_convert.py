"""The conversion command: exit codes, messages, full disks and peak memory."""

import contextlib
import io
import json
import math
import multiprocessing
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import REPOSITORY, launcher

from megatron.vlm.checkpoint.stored_blocks import StoredTensors
from megatron.vlm.conversion.config_files import configurations
from megatron.vlm.conversion.importing import ReleasedCheckpoint
from megatron.vlm.conversion.tensor_map import TensorLayout, find_released, parameters
from omnibal.model.config import load_model
from tools import convert

sys.path.insert(0, str(REPOSITORY / "tests" / "training"))
from released import KINDS, save_released, transformers_model, write_holes, write_tokenizer

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Read-only sharded checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("released") / "small"
    model = transformers_model(KINDS["6b-llama"])
    save_released(model, folder, "internlm2", torch.bfloat16, 20_000)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def commands(checkpoint, tmp_path_factory) -> dict[str, tuple[object, ...]]:
    """Arguments of the import and of two exports of the imported run."""
    run, imported = tmp_path_factory.mktemp("imported") / "run", ("import", checkpoint)
    assert run_in_child(run.with_suffix(".log"), *imported, "-o", run) == 0
    layout = ("export", run, "--layout", "transformers")
    return {"import": imported, "like": ("export", run, "--like", checkpoint), "layout": layout}


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def run_in_child(log: Path, *arguments: object, prepare: Callable[[], None] = lambda: None) -> int:
    """Exit code of the command in a forked process, without importing torch again."""
    process = multiprocessing.get_context("fork").Process(
        target=_child, args=(log, prepare, [str(argument) for argument in arguments])
    )
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def _child(log: Path, prepare: Callable[[], None], arguments: list[str]) -> None:
    torch.set_num_threads(1)  # a forked child cannot use its parent's threads
    sys.argv = ["convert.py", *arguments]
    error_output = io.StringIO()
    try:
        prepare()
        with contextlib.redirect_stderr(error_output), contextlib.redirect_stdout(io.StringIO()):
            convert.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        log.write_text(error_output.getvalue())


def test_round_trip_by_the_command(tmp_path, checkpoint):
    """Prevents a script that fails in a fresh Python, or an export unlike the imported files."""
    imported = subprocess.run(
        [sys.executable, "tools/convert.py", "import", checkpoint, "-o", tmp_path / "run"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert imported.returncode == 0, imported.stderr
    assert "layout internvl-internlm2" in imported.stdout
    assert str(tmp_path / "run" / "model.toml") in imported.stdout and "bfloat16" in imported.stdout
    out, convert = tmp_path / "deep" / "out", "tools/convert.py"
    exported = launcher().run(convert, "export", tmp_path / "run", "--like", checkpoint, "-o", out)
    assert exported.returncode == 0, exported.stderr
    assert f"wrote {out}" in exported.stdout and "step 0 of" in exported.stdout
    assert content(out) == content(checkpoint)
    assert "Warning" not in imported.stderr + exported.stderr
    refused = launcher().run(convert, "import", tmp_path / "run", "-o", tmp_path / "again")
    assert refused.returncode == 2 and refused.stdout == ""
    assert re.fullmatch(r"error: [^\n]*neither[^\n]*\n", refused.stderr)
    assert not (tmp_path / "again").exists()


# File size limits in bytes: below the first file's size, and below a later file's size.
LIMITS = {"import": (100, 15_000), "like": (1_500, 6_000), "layout": (100, 40_000)}


@pytest.mark.parametrize(
    ("way", "limit"), [(way, limit) for way, limits in LIMITS.items() for limit in limits]
)
def test_full_disk_leaves_nothing(tmp_path, commands, way, limit):
    """Prevents a traceback, or a partial conversion under its final name, on a full disk."""
    out, log = tmp_path / "out" / "target", tmp_path / "log"
    code = run_in_child(log, *commands[way], "-o", out, prepare=lambda: limit_files(limit))
    errors = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert code == 2 and len(errors) == 1, log.read_text()
    assert str(out) in errors[0] and "File too large" in errors[0]
    assert list(out.parent.iterdir()) == []


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("way", ["import", "layout"])
def test_terminated_command_leaves_nothing(tmp_path, commands, monkeypatch, way):
    """Prevents partial output or exit code 0 after SIGTERM."""
    for kind, method in (
        (ReleasedCheckpoint, "read_parameter"),
        (StoredTensors, "_read_item"),
    ):
        monkeypatch.setattr(kind, method, raise_sigterm_in(getattr(kind, method)))
    code = run_in_child(tmp_path / "log", *commands[way], "-o", tmp_path / "out" / "target")
    assert code == 128 + signal.SIGTERM, (tmp_path / "log").read_text()
    assert "error" not in (tmp_path / "log").read_text()
    assert list((tmp_path / "out").iterdir()) == []


def raise_sigterm_in(method: Callable) -> Callable:
    """Return the method with SIGTERM raised in its fifth call."""
    calls: list[int] = []

    def call(*arguments: object) -> object:
        calls.append(0)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        return method(*arguments)

    return call


def test_failure_without_a_file_is_told(monkeypatch, capsys):
    """Prevents "None: None" as the message of an OSError without a file."""

    def fail(source: Path) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(convert, "open_released", fail)
    monkeypatch.setattr(sys, "argv", ["convert.py", "import", "absent", "-o", "made"])
    with pytest.raises(SystemExit) as ended:
        convert.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: OSError: no more processes\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_tokenizer_of_the_run_goes_along(tmp_path, commands, capsys, monkeypatch):
    """Prevents an export without the image token id or the run's tokenizer."""
    run, bare = commands["layout"][1], tmp_path / "bare"
    shutil.copytree(run, bare)
    shutil.rmtree(bare / "tokenizer")
    for source, target, is_told in ((run, "with", True), (bare, "without", False)):
        target = tmp_path / target
        arguments = ("export", source, "--layout", "transformers", "-o", target)
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            convert.main()
        assert ended.value.code == 0
        config = json.loads((target / "config.json").read_text())
        assert ("image_token_id" in config) == (target / "tokenizer.json").is_file() == is_told
        assert ("image_token_id" in capsys.readouterr().out) != is_told


LARGE = {"layers": 36, "hidden_size": 512, "heads": 8, "kv_heads": 4, "ffn_hidden_size": 2048}
SHARDS = 12


def write_large(folder: Path) -> int:
    """Write a 300 MB checkpoint of sparse files; return the mean bytes per file."""
    small = load_model("internvl-digits")
    language = small.language.model_copy(update={**LARGE, "vocab_size": 8001})
    model = small.model_copy(update={"language": language})
    shapes = {}
    for parameter in parameters(model):
        made_of = find_released(parameter, model, TensorLayout.INTERNVL_INTERNLM2)
        shapes |= dict(zip(made_of.names, made_of.shapes, strict=True))
    made = configurations(model, TensorLayout.INTERNVL_INTERNLM2, "bfloat16", None)
    write_holes(folder, json.loads(made["config.json"]), shapes, SHARDS)
    return sum(2 * math.prod(shape) for shape in shapes.values()) // SHARDS


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def watch_memory(report: Path) -> None:
    """Start a thread that writes the process's peak memory growth in bytes to the report."""
    before = anonymous_bytes()
    report.write_text("0")

    def watch() -> None:
        most = 0
        while True:
            grown = anonymous_bytes() - before
            if grown > most:
                most = grown
                # The process may end at any moment.
                part = report.with_suffix(".part")
                part.write_text(str(most))
                part.replace(report)
            threading.Event().wait(0.001)

    threading.Thread(target=watch, daemon=True).start()


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Prevents a conversion that holds all weights in host memory."""
    shard = write_large(tmp_path / "large")
    report = tmp_path / "report"
    run, made = tmp_path / "run", ("--layout", "transformers", "--max-shard-size", "25MB")
    for arguments in (
        ("import", tmp_path / "large", "-o", run),
        ("export", run, "--like", tmp_path / "large", "-o", tmp_path / "like"),
        ("export", run, *made, "-o", tmp_path / "made"),
    ):
        log = tmp_path / "log"
        code = run_in_child(log, *arguments, prepare=lambda: watch_memory(report))
        assert code == 0, log.read_text()
        grown = int(report.read_text())
        # Includes the memory of first library calls, independent of the model.
        assert 0 < grown < 4 * shard, f"{arguments[0]}: {grown / MIB:.0f} MiB"
    written = sum(path.stat().st_size for path in (tmp_path / "made").iterdir())
    assert written > 0.95 * SHARDS * shard > 270 * MIB

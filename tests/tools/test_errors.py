"""Usage errors of the tools: one line, status 2, inputs unchanged."""

import json
import signal
import sys
from pathlib import Path

import pytest

from tools import chat, convert, import_rates, make_digits_dataset, make_lengths, replay

TOOLS = {
    "chat": chat.main,
    "convert": convert.main,
    "digits": make_digits_dataset.main,
    "lengths": make_lengths.main,
    "rates": import_rates.main,
    "replay": replay.main,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("junk").write_bytes(bytes(range(256)))
    Path("list.json").write_text("[[1]]")
    Path("real.json").write_text(json.dumps([{"vit_num": 1, "token_num": 9, "image_flags": 1}]))
    Path("kernels.json").write_text('{"source": "", "device": "x", "operations": {}}')
    Path("plan").mkdir()
    Path("plan/plan.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "chat --load absent --prompt x",
        "chat --load junk --prompt x",
        "chat --load folder --prompt x",
        "chat --load a\0b --prompt x",
        "chat --load folder --prompt x --max-new-tokens 100000000000000000000",
        "chat --prompt x",
        "convert import absent -o out",
        "convert import junk -o out",
        "convert import folder -o folder",
        "convert import folder -o folder/../folder",
        "convert import folder -o .",
        "convert import a\0b -o out",
        "convert import folder -o a\0b",
        "convert import folder -o junk/out",
        "convert export folder --layout transformers -o out",
        "convert export folder --like folder -o out",
        "convert export junk --like junk -o out",
        "convert export folder --layout other -o out",
        "convert export folder --layout transformers --max-shard-size 0GB -o out",
        "convert unknown",
        "digits --output junk",
        "digits --output folder",
        "digits --output junk/x",
        "digits --output a\0b",
        "digits --output out --samples 100000000000000000000",
        "digits --output out --samples -1",
        "digits --output out --heldout-samples 0",
        "digits --output out --seed 100000000000000000000",
        "digits --output out --samples many",
        "digits",
        "lengths -o folder",
        "lengths -o junk/x.parquet",
        "lengths -o a\0b.parquet",
        "lengths -o out.parquet --samples 100000000000000000000",
        "lengths -o out.parquet --samples 0",
        "lengths -o out.parquet --seed -1",
        "lengths -o out.parquet --mixture other",
        "lengths -o out.json",
        "rates absent --base h100-80g -o out",
        "rates junk --base h100-80g -o out",
        "rates list.json --base h100-80g -o out",
        "rates real.json --base h100-80g -o real.json",
        "rates real.json --base absent -o out",
        "rates kernels.json --base h100-80g -o out",
        "rates kernels.json --base h100-80g -o folder",
        "rates kernels.json -o out",
        "replay absent -o out",
        "replay junk -o out",
        "replay plan -o out",
        "replay plan -o junk",
        "replay plan -o plan",
        "replay plan -o .",
        "replay plan -o junk/out",
        "replay plan -o a\0b",
        "replay a\0b -o out",
        "replay plan -o out --steps 100000000000000000000",
        "replay plan",
    ],
)
def test_a_mistake_is_one_line(capfd, monkeypatch, folder, command):
    """Prevents tracebacks, other statuses, partial outputs and overwritten inputs."""
    name, *arguments = command.split(" ")
    before = sorted(folder.rglob("*")), Path("real.json").read_bytes()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        TOOLS[name]()
    assert ended.value.code == 2
    said = capfd.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("error: ") and line.isprintable()
    assert (sorted(folder.rglob("*")), Path("real.json").read_bytes()) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

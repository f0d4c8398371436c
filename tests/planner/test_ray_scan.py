"""Scans on a Ray cluster: the same bytes as in one process, whatever is killed meanwhile."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_cases import failure

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

ROOT = Path(__file__).parents[2]


def scan_arguments(digits: Path, output: Path) -> tuple[object, ...]:
    tokenizer = ("--tokenizer-model", digits / "tokenizer.model")
    return digits / "train/meta.json", *tokenizer, "--model", "internvl-digits", "-o", output


@needs_ray
def test_kills_lose_and_double_nothing():
    """Prevents a scan of hours from ending with a node, or from counting a sample twice or not at
    all where its task was worked on again."""
    command = [sys.executable, "benchmarks/scan_kills.py", "--kills", "3", "--samples", "3000"]
    finished = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    result = json.loads(finished.stdout)
    assert result["killed"] == {"worker": 1, "node": 1, "command": 1}
    assert result["finished"] >= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--engine ray --address 127.0.0.1:1", "--address 127.0.0.1:1: the Ray cluster cannot be"),
        ("--engine ray --processes 2", "--processes does not go with --engine ray"),
        ("--address 127.0.0.1:6379", "--address is of a Ray cluster: give --engine ray"),
    ],
)
def test_mistakes_about_the_cluster(digits, tmp_path, capsys, options, expected):
    """Prevents minutes of Ray's own attempts, and options that nothing reads."""
    arguments = scan_arguments(digits, tmp_path / "L.parquet")
    assert expected in failure(capsys, "lengths", *arguments, *options.split())
    assert list(tmp_path.iterdir()) == []

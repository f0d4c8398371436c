"""Training from object storage through a cache, also after SIGKILL."""

import os
import signal
import time
from pathlib import Path

import pytest
from commands import launcher
from end_to_end_cases import (
    MODEL,
    losses,
    pair_succeeds,
    plan_digits,
    ranks_start,
    ranks_succeed,
    training,
    wait_for_steps,
)
from s3_cases import needs_s3, started_s3

DATA = "s3://data/meta.json"


@pytest.fixture(scope="module")
def server(digits, tmp_path_factory):
    with started_s3(tmp_path_factory.mktemp("moto")) as server:
        server.put_folder(digits / "train")
        yield server


@needs_s3
def test_a_run_from_a_bucket_is_that_of_local_files(server, lengths, digits, tmp_path):
    """Prevents losses unlike local files', a cache over its limit or unread, a failing resume."""
    again, index = tmp_path / "again.parquet", tmp_path / "index"
    scan = ("-m", "omnibal", "lengths", DATA, *MODEL, "--data-index", index, "--processes", "1")
    scan += ("--tokenizer-model", digits / "tokenizer.model", "-o", again)
    scanned = launcher().run(*scan, **server.environment)
    assert scanned.returncode == 0, scanned.stderr
    assert again.read_bytes() == lengths.read_bytes()
    plan = plan_digits(again, tmp_path / "plan", "--pp", "2", "--epochs", "2")
    whole = tmp_path / "whole"
    pair_succeeds(*training(plan, digits, whole))

    def command(save: Path, cache: str, *more: object) -> list[object]:
        words = training(plan, digits, save, *more)
        words[words.index("--data") + 1] = DATA
        return [*words, "--data-index", index, "--data-cache", tmp_path / cache]

    killed, second, most_bytes = tmp_path / "killed", tmp_path / "second", 60_000
    with ranks_start(
        2, *command(killed, "large", "--save-interval", "1"), **server.environment
    ) as ranks:
        wait_for_steps(killed, 2)
        deadline, announced = time.monotonic() + 600, killed / "latest_checkpointed_iteration.txt"
        while not announced.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)
    assert len(losses(killed)) < len(losses(whole))
    small = ("--data-cache-gib", most_bytes / 2**30)  # half of all images
    ranks_succeed(2, *command(killed, "small", *small, "--load", killed), **server.environment)
    assert losses(killed) == losses(whole)
    held = sum(path.stat().st_size for path in (tmp_path / "small").glob("??/*"))
    assert most_bytes / 2 < held <= most_bytes
    before = server.reads_of(".png")
    ranks_succeed(2, *command(second, "large", "--train-iters", "2"), **server.environment)
    assert losses(second) == losses(whole)[:2]
    assert server.reads_of(".png") == before > 40

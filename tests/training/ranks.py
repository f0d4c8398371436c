"""Run a function on every rank of a forked world and collect the results."""

import faulthandler
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from megatron.vlm.run.launch import RankLaunch, initialize_distributed, shut_down_distributed
from omnibal.model.parallel import Parallel

TIMEOUT_S = 600
Work = Callable[..., Any]


def run_ranks(parallel: Parallel, work: Work, *arguments: Any, seed: int = 0) -> list[Any]:
    """Run `work(links, *arguments)` on every rank; return the results in rank order.

    A rank that fails or times out fails the calling test with its traceback.
    """
    ranks = range(parallel.world_size)
    return _run_forked([partial(_rank, rank, parallel, seed, work, arguments) for rank in ranks])


def run_alone(work: Work, arguments: dict[str, Any]) -> None:
    """Run `work(**arguments)` in one forked process; fails as `run_ranks` does."""
    _run_forked([lambda folder: work(**arguments)])


def _run_forked(works: list[Work]) -> list[Any]:
    """Return the results of works, each in its own process, with a shared folder."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(len(works))]
        processes = [
            context.Process(target=_save_result, args=(work, path))
            for work, path in zip(works, paths, strict=True)
        ]
        for process in processes:
            process.start()
        _wait(processes)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        # Other ranks just lost their connection to a rank ended by a signal.
        signals = [
            f"rank {rank} was ended by {signal.Signals(-process.exitcode).name}"
            for rank, process in enumerate(processes)
            if process.exitcode is not None and process.exitcode < 0
        ]
        for process in processes:
            process.kill()
        failures = signals + [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert not failures, "\n".join(failures)
        assert not hanging, f"ranks {hanging} did not end within {TIMEOUT_S} s"
        return [torch.load(path, weights_only=False) for path in paths]


def _save_result(work: Work, path: Path) -> None:
    faulthandler.enable()  # prints a crash's traceback to captured stderr
    try:
        torch.save(work(path.parent), path)
    except BaseException:
        path.with_suffix(".error").write_text(f"rank {path.name}: {traceback.format_exc()}")
        os._exit(1)


def _rank(rank: int, parallel: Parallel, seed: int, work: Work, arguments: tuple, folder: Path):
    launch = RankLaunch(rank=rank, world_size=parallel.world_size, local_rank=rank)
    store = torch.distributed.FileStore(str(folder / "store"), parallel.world_size)
    links = initialize_distributed(launch, parallel, seed, store)
    result = work(links, *arguments)
    shut_down_distributed()
    return result


def _wait(processes: list[Any]) -> None:
    """Wait until all processes have ended or one has failed, as others would wait for it."""
    deadline = time.monotonic() + TIMEOUT_S
    running = processes
    while running and time.monotonic() < deadline and not any(one.exitcode for one in processes):
        ended = connection.wait([process.sentinel for process in running], 1.0)
        for process in running:
            if process.sentinel in ended:
                process.join(1.0)  # its files are closed, it exits soon
        running = [process for process in running if process.is_alive()]


@contextmanager
def record_logs(name: str = "megatron.vlm") -> Iterator[list[str]]:
    """Capture the lines logged in this process, by default by the trainer."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)

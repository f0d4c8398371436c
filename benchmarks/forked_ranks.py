"""Ranks as forked processes of one benchmark: each leaves an outcome, or is one that torchrun would
start."""

import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def outcomes_of(run_rank: Callable[[int, int, Path], None], ranks: int, rounds: int) -> list[Any]:
    """Run all ranks; returns what each has saved by `save_outcome`, in their order.

    Args:
        run_rank: called with the rank, the rounds and the folder of outcomes, in a process each.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=run_rank, args=(rank, rounds, folder)) for rank in range(ranks)
        ]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
        assert not any(one.exitcode for one in processes), "a rank has failed"
        return [torch.load(folder / f"{rank}.outcome", weights_only=False) for rank in range(ranks)]


def save_outcome(outcome: object, rank: int, folder: Path) -> None:
    """Leave the outcome of a rank."""
    torch.save(outcome, folder / f"{rank}.outcome")


def fork_launched(be_rank: Callable[[], object], ranks: int, output: Path) -> list[int]:
    """Fork ranks in the environment that torchrun gives them; returns their process ids.

    Args:
        be_rank: called in each; its SystemExit is how the process ends.
        output: file to which what they say is added.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        pid = os.fork()
        if not pid:
            os.environ |= {name: str(value) for name, value in given.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            _become(be_rank, output)
        pids.append(pid)
    return pids


def _become(be_rank: Callable[[], object], output: Path) -> None:
    """Be a rank, and end as it does."""
    code = 1
    try:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        be_rank()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

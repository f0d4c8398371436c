"""Ranks as forked processes of one benchmark, each of which leaves an outcome."""

import multiprocessing
import tempfile
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

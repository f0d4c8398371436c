"""Log lines and progress of a run on its terminal."""

import errno
import logging
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn


def show_log(rank: int) -> None:
    """Print INFO, common to all ranks, on rank 0's stdout, and any rank's WARNING on stderr."""
    of_the_run, of_this_rank = _lines(sys.stdout), _lines(sys.stderr)
    of_the_run.addFilter(lambda record: rank == 0 and record.levelno < logging.WARNING)
    of_this_rank.setLevel(logging.WARNING)
    log = logging.getLogger("megatron.vlm")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [of_the_run, of_this_rank]


def _lines(stream: TextIO | None) -> logging.Handler:
    """Handler that writes to a stream, or a NullHandler for a daemon without a stream."""
    return logging.NullHandler() if stream is None else _Lines(stream)


class _Lines(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError) or error.errno != errno.EIO:
            # As `print` does: a run must end if its output is closed.
            raise
        # The terminal is gone, and SIGHUP asks for a save, which has lines to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def progress_of_rank(rank: int) -> Progress:
    """Progress bar with counts on rank 0's stderr."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=rank != 0)

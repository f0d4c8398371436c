"""Log lines and progress bars of a run."""

import errno
import logging
import os
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn


def show_log(rank: int) -> None:
    """Print rank 0's INFO on stdout (equal on all ranks), and every rank's WARNING on stderr."""
    common, own = _make_handler(sys.stdout), _make_handler(sys.stderr)
    common.addFilter(lambda record: rank == 0 and record.levelno < logging.WARNING)
    own.setLevel(logging.WARNING)
    log = logging.getLogger("megatron.vlm")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [common, own]


def _make_handler(stream: TextIO | None) -> logging.Handler:
    # A daemon may have no stream.
    return logging.NullHandler() if stream is None else _TerminalHandler(stream)


class _TerminalHandler(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError) or error.errno != errno.EIO:
            # As `print`: a run must end if its output is closed.
            raise
        # The terminal is gone, but the run must go on: SIGHUP requests a save, which logs.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def progress_of_rank(rank: int) -> Progress:
    """Return a progress bar with counts on stderr, disabled except on rank 0."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=rank != 0)

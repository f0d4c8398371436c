"""Log lines of a run on its terminal."""

import logging
import sys
from typing import TextIO


def show_log(rank: int) -> None:
    """Print `megatron.vlm` log lines immediately.

    Messages common to all ranks are INFO, printed by rank 0 on stdout. A single rank's messages are
    WARNING, printed on stderr.
    """
    of_the_run, of_this_rank = _lines(sys.stdout), _lines(sys.stderr)
    of_the_run.addFilter(lambda record: rank == 0 and record.levelno < logging.WARNING)
    of_this_rank.setLevel(logging.WARNING)
    log = logging.getLogger("megatron.vlm")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [of_the_run, of_this_rank]


def _lines(stream: TextIO | None) -> logging.Handler:
    """Handler that writes to a stream. None if a daemon has no stream."""
    return logging.NullHandler() if stream is None else _Lines(stream)


class _Lines(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        # As `print` does: a run whose output is closed must end.
        raise

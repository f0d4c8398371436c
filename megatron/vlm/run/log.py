"""Log lines of a run, as its terminal shows them; the modules that log know nothing of it."""

import logging
import sys
from typing import TextIO


def show_log(rank: int) -> None:
    """Print what `megatron.vlm` logs on this rank, a line each, as soon as it is logged.

    What all ranks know alike is logged as INFO, and rank 0 prints it on stdout. What a rank meets
    alone is a WARNING, which it prints on stderr.
    """
    of_the_run, of_this_rank = _lines(sys.stdout), _lines(sys.stderr)
    of_the_run.addFilter(lambda record: rank == 0 and record.levelno < logging.WARNING)
    of_this_rank.setLevel(logging.WARNING)
    log = logging.getLogger("megatron.vlm")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers = [of_the_run, of_this_rank]


def _lines(stream: TextIO | None) -> logging.Handler:
    """Handler that writes to a stream; to none where a daemon was started without one."""
    return logging.NullHandler() if stream is None else _Lines(stream)


class _Lines(logging.StreamHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        # As `print` does: a run whose output nobody can read ends.
        raise

"""Output of commands: a result on stdout, as tables or JSON; progress on stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from omnibal.base.printable import printable
from omnibal.report.table import Facts, Table


def print_notes(notes: Iterable[str], prefix: str = "note: ") -> None:
    """Write sentences to stderr, one per line."""
    for note in notes:
        sys.stderr.write(f"{prefix}{printable(note)}\n")


def print_result(as_json: bool, result: dict[str, Any], *readable: Table | Facts | str) -> None:
    """Print a result as a JSON object, or as tables and sentences."""
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    console = Console()
    for part in readable:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


_SECONDS_BETWEEN_LINES = 30.0  # progress without a terminal


_KNOWN_RATE = 0.2
"""Share of the work to be done before a remaining time is shown."""


class _RemainingColumn(bars.TimeRemainingColumn):
    def render(self, task: bars.Task) -> Text:
        is_known = task.total and task.completed >= _KNOWN_RATE * task.total
        return super().render(task) if is_known else Text("")


class _RateColumn(bars.ProgressColumn):
    def render(self, task: bars.Task) -> str:
        return f"{task.finished_speed or task.speed or 0:,.0f}/s"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to advance progress on stderr: a bar, or lines about every 30 seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines(title, total)
        return
    named = bars.TextColumn("{task.description}")
    counts = bars.MofNCompleteColumn(), _RateColumn(), _RemainingColumn()
    with bars.Progress(named, bars.BarColumn(), *counts, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


def progress_lines(
    title: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    """Return a function to call with the newly done amount, which logs to stderr now and then."""
    began = written = clock()
    done = 0

    def advance(newly: int) -> None:
        nonlocal done, written
        done += newly
        now = clock()
        if done == 0 or now - written < _SECONDS_BETWEEN_LINES:
            return
        written, rate = now, done / (now - began)
        line = f"{title}: {done:,} of {total:,} in {(now - began) / 60:.1f} min, {rate:,.1f}/s"
        if done >= _KNOWN_RATE * total:
            line += f", at this rate {max(0, total - done) / rate / 60:.1f} min more"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return advance


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show a spinner on stderr for work of unknown length."""
    with Console(stderr=True).status(what):
        yield


class ConsoleListener:
    progress = staticmethod(progress)
    status = staticmethod(status)

    def note(self, text: str) -> None:
        print_notes([text])

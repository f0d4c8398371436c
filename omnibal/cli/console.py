"""Output of commands: a result on stdout, as tables or JSON; progress on stderr."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic_core import to_jsonable_python
from rich import progress as bars
from rich.console import Console
from rich.text import Text

from omnibal.base.printable import printable
from omnibal.report.table import Facts, Table


def print_notes(notes: Iterable[str], prefix: str = "note: ") -> None:
    """Write sentences to stderr, one per line."""
    for note in notes:
        sys.stderr.write(f"{prefix}{printable(note)}\n")


def print_result(
    as_json: bool, result: dict[str, Any], *readable: Table | Facts | str | None
) -> None:
    """Print a result as a JSON object, or as tables and sentences. None is skipped.

    Values of `result` may be paths, enums, dataclasses and pydantic models.
    """
    if as_json:
        sys.stdout.write(json.dumps(to_jsonable_python(result)) + "\n")
        return
    console = Console()
    for part in filter(None, readable):
        # The terminal wraps sentences, tables fit its width; brackets are no markup.
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


_LINE_INTERVAL_S = 30.0  # of progress in a log file
_ESTIMATE_FROM = 0.2  # share of the work done before a remaining time is shown; rates vary before


class _RemainingColumn(bars.TimeRemainingColumn):
    def render(self, task: bars.Task) -> Text:
        is_known = task.total and task.completed >= _ESTIMATE_FROM * task.total
        return super().render(task) if is_known else Text("")


class _RateColumn(bars.ProgressColumn):
    def render(self, task: bars.Task) -> str:
        return f"{task.finished_speed or task.speed or 0:,.0f}/s"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield `advance(count)`: a progress bar on stderr, or a line every 30 s without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield progress_lines(title, total)
        return
    label = bars.TextColumn("{task.description}")
    counts = bars.MofNCompleteColumn(), _RateColumn(), _RemainingColumn()
    with bars.Progress(label, bars.BarColumn(), *counts, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


def progress_lines(
    title: str, total: int, clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    """Return `advance(count)`, which logs a line of progress to stderr every 30 s."""
    began = written = clock()
    done = 0

    def advance(newly: int) -> None:
        nonlocal done, written
        done += newly
        now = clock()
        if done == 0 or now - written < _LINE_INTERVAL_S:
            return
        written, rate = now, done / (now - began)
        line = f"{title}: {done:,} of {total:,} in {(now - began) / 60:.1f} min, {rate:,.1f}/s"
        if done >= _ESTIMATE_FROM * total:
            line += f", at this rate {max(0, total - done) / rate / 60:.1f} min more"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    return advance


@contextmanager
def status(title: str) -> Iterator[None]:
    """Show a spinner on stderr for work of unknown length."""
    with Console(stderr=True).status(title):
        yield


class ConsoleListener:
    """Listener of a plan search (`omnibal.search.goal.Listener`) that prints to stderr."""

    progress = staticmethod(progress)
    status = staticmethod(status)

    def note(self, text: str) -> None:
        print_notes([text])

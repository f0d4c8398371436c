"""Output of commands: a result on stdout, as tables or JSON; progress on stderr."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from omnibal.report.table import Facts, Table


def print_notes(notes: Iterable[str], prefix: str = "note: ") -> None:
    """Write sentences to stderr, a line each."""
    for note in notes:
        sys.stderr.write(f"{prefix}{note}\n")


def print_result(as_json: bool, result: dict[str, Any], *readable: Table | Facts | str) -> None:
    """Print a result as one JSON object, or else as tables and sentences."""
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    console = Console()
    for part in readable:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yields what to call with what is newly done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _RateColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show a spinner on stderr for work whose length is not known."""
    with Console(stderr=True).status(what):
        yield

"""Parallel trials of search choices, with results in a deterministic order."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import map_unordered

Task = TypeVar("Task", bound=Hashable)
Found = TypeVar("Found")


@contextmanager
def whole_progress(
    total: int, on_progress: Callable[[int], None]
) -> Iterator[Callable[[int], None]]:
    """Yield a wrapper of `on_progress` that stops at `total`, then report the rest of it unless the
    body raises."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        count = min(count, total - done)
        done += count
        on_progress(count)

    yield advance
    on_progress(total - done)


def try_all(
    work: Callable[[Task], tuple[Task, Found]],
    choices: Sequence[Task],
    processes: int,
    on_done: Callable[[int], None] = lambda done: None,
) -> dict[Task, Found]:
    """Return the result of `work` by choice, in the order of `choices`, which are distinct."""
    found = {}
    for choice, result in map_unordered(work, choices, max(min(processes, len(choices)), 1)):
        found[choice] = result
        on_done(1)
    return {choice: found[choice] for choice in choices}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trials(Generic[Task, Found]):
    """Results and errors of the choices tried so far; no choice is tried twice."""

    work: Callable[[Task], tuple[Task, Found | UserError]]
    """Picklable trial that returns its choice with a result, or with the error."""
    processes: int
    on_done: Callable[[int], None]  # called with the number of newly finished trials
    found: dict[Task, Found] = field(default_factory=dict)
    failed: dict[Task, UserError] = field(default_factory=dict)

    def run(self, choices: Iterable[Task]) -> None:
        """Add results of the choices that are not tried yet to `found` and `failed`."""
        # distinct, in order
        new = [c for c in dict.fromkeys(choices) if c not in self.found and c not in self.failed]
        for choice, result in try_all(self.work, new, self.processes, self.on_done).items():
            if isinstance(result, UserError):
                self.failed[choice] = result
            else:
                self.found[choice] = result

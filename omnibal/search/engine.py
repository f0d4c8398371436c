"""The engine of every search: choices are tried once each, in processes.

A search of caps, of levels, or of sizes with either brings its choices, what a trial is, and its
moves; the loop is here. Results depend on the choices alone, and on neither timing nor the number
of processes.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import map_unordered

Choice = TypeVar("Choice", bound=Hashable)
Found = TypeVar("Found")


def try_all(
    work: Callable[[Choice], tuple[Choice, Found]],
    choices: Sequence[Choice],
    processes: int,
    on_done: Callable[[int], None],
) -> dict[Choice, Found]:
    """Try choices in as many processes as are of use; results are in the order of the choices."""
    found = {}
    for choice, result in map_unordered(work, choices, max(min(processes, len(choices)), 1)):
        found[choice] = result
        on_done(1)
    return {choice: found[choice] for choice in choices}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trials(Generic[Choice, Found]):
    """Choices that were tried on the same samples."""

    work: Callable[[Choice], tuple[Choice, Found | UserError]]
    """A trial, which can be sent to another process: what is found, or why that cannot be used."""
    processes: int
    on_done: Callable[[int], None]
    """Called with the trials that are newly done."""
    found: dict[Choice, Found] = field(default_factory=dict)
    failed: dict[Choice, UserError] = field(default_factory=dict)

    def known(self, choice: Choice) -> UserError | None:
        """Why a choice fails untried; None where it is to be tried."""
        return None

    def run(self, choices: Iterable[Choice]) -> None:
        """Try choices that have not been tried."""
        untried = []
        for choice in dict.fromkeys(choices):
            if choice in self.found or choice in self.failed:
                continue
            reason = self.known(choice)
            if reason is None:
                untried.append(choice)
            else:
                self.failed[choice] = reason
        results = try_all(self.work, untried, self.processes, self.on_done)
        for choice, result in results.items():
            if isinstance(result, UserError):
                self.failed[choice] = result
            else:
                self.found[choice] = result

"""A rule of launch lines, and tables of rules."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Finding, Launcher, Severity
from omnibal.trainers.lint.line import Line

CORE = "megatron-core 0.16.1"
BRIDGE = "Megatron-Bridge@003e863"
SWIFT = "ms-swift 4.6.0"
LOONGFORGE = "LoongForge@130ff79"
"""Versions with checks covered here."""
VALIDATE_ARGS = "training/arguments.py, validate_args, Megatron-LM@000c4ac"

Problems = Iterator[tuple[str, str]]
"""Pairs of problem and fix if a line breaks a rule; only the first is reported."""
Check = Callable[[Line], Problems]
"""A check of a line. Its name and docstring are the rule's."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement on launch lines."""

    source: str
    """File, line and version of the trainer's own check."""
    check: Check
    severity: Severity
    launchers: frozenset[Launcher]
    """Trainers that check it."""

    @property
    def name(self) -> str:
        """Stable short name, such as `layers-divide-stages`."""
        return self.check.__name__.replace("_", "-")

    def finding(self, line: Line) -> Finding | None:
        """Return the line's violation of this rule, or None."""
        is_checked = line.launch.launcher in self.launchers
        problem = next(self.check(line), None) if is_checked else None
        if problem is None:
            return None
        # The requirement is part of a sentence: a first word such as "GPUs" keeps its capitals.
        first, others = " ".join((self.check.__doc__ or "").rstrip(".").split()).split(" ", 1)
        first = first.lower() if first[1:] == first[1:].lower() else first
        message = f"{problem[0]}; {first} {others}: {problem[1]}"
        return Finding(rule=self.name, severity=self.severity, message=message, source=self.source)


class Rules(list[Rule]):
    """Rules of one kind, in checking order."""

    def rule(
        self,
        source: str,
        *,
        severity: Severity = "refused",
        launchers: Iterable[Launcher] = MEGATRON,
    ) -> Callable[[Check], Check]:
        """Decorator: add a rule, from the function's name and docstring."""

        def add(check: Check) -> Check:
            self.append(Rule(source, check, severity, frozenset(launchers)))
            return check

        return add

    def core_config(self, lines: str, **more: Any) -> Callable[[Check], Check]:
        """Decorator: add a rule of core's configuration."""
        return self.rule(f"core/transformer/transformer_config.py:{lines}, {CORE}", **more)

    validate_args = partialmethod(rule, VALIDATE_ARGS, launchers=ARGPARSE)
    """Decorator: add a rule of Megatron-LM's `validate_args`."""

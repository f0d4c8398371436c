"""A rule of launch lines, and groups of rules per module."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

from omnibal.trainers.lint.launch import MEGATRON, Finding, Launcher, Severity
from omnibal.trainers.lint.line import ARGPARSE, Line

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
    """Check named as the rule, with the requirement as docstring."""
    severity: Severity
    launchers: frozenset[Launcher]
    """Trainers that check it."""

    @property
    def name(self) -> str:
        """Stable short name, such as `layers-divide-stages`."""
        return self.check.__name__.replace("_", "-")

    @property
    def holds(self) -> str:
        """Return the requirement, as a part of a sentence."""
        first, rest = " ".join((self.check.__doc__ or "").rstrip(".").split()).split(" ", 1)
        return f"{first.lower() if first[1:] == first[1:].lower() else first} {rest}"

    def finding(self, line: Line) -> Finding | None:
        """Return the line's violation of this rule, or None."""
        if line.launch.launcher not in self.launchers:
            return None
        for given, change in self.check(line):
            message = f"{given}; {self.holds}: {change}"
            return Finding(
                rule=self.name, severity=self.severity, message=message, source=self.source
            )
        return None


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules of one kind, in module order."""

    rules: list[Rule] = field(default_factory=list)

    def rule(
        self,
        source: str,
        *,
        severity: Severity = "refused",
        launchers: Iterable[Launcher] = MEGATRON,
    ) -> Callable[[Check], Check]:
        """Decorator: add a rule, from the function's name and docstring."""

        def add(check: Check) -> Check:
            self.rules.append(Rule(source, check, severity, frozenset(launchers)))
            return check

        return add

    def core_config(self, lines: str, **more: Any) -> Callable[[Check], Check]:
        """Decorator: add a rule of core's configuration."""
        return self.rule(f"core/transformer/transformer_config.py:{lines}, {CORE}", **more)

    validate_args = partialmethod(rule, VALIDATE_ARGS, launchers=ARGPARSE)
    """Decorator: add a rule of Megatron-LM's `validate_args`."""

"""Rules of launch lines, each a requirement of trainers, and decorators that declare them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Finding, Launcher, Severity
from omnibal.trainers.lint.line import LaunchLine

# Versions of the checks that rules repeat.
CORE = "megatron-core 0.16.1"
BRIDGE = "Megatron-Bridge@003e863"
SWIFT = "ms-swift 4.6.0"
LOONGFORGE = "LoongForge@130ff79"
VALIDATE_ARGS = "training/arguments.py, validate_args, Megatron-LM@000c4ac"
BLOCK = "core/transformer/transformer_block.py"

Problems = Iterator[tuple[str, str]]  # problem and fix; only the first pair is reported
Check = Callable[[LaunchLine], Problems]  # its name is the rule's, its docstring the requirement


@dataclass(frozen=True, slots=True)
class Rule:
    """A requirement on launch lines."""

    source: str  # file, line and version of the trainer's own check
    check: Check
    severity: Severity
    launchers: frozenset[Launcher]  # trainers that check it

    @property
    def name(self) -> str:
        """Stable short name, such as `layers-divide-stages`."""
        return self.check.__name__.replace("_", "-")

    def finding(self, line: LaunchLine) -> Finding | None:
        """Return a finding of the line's first problem. None if it has none or is not checked."""
        is_checked = line.launch.launcher in self.launchers
        problem = next(self.check(line), None) if is_checked else None
        if problem is None:
            return None
        # The docstring becomes part of a sentence: a first word such as "GPUs" keeps its capitals.
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
        """Return a decorator that adds a check as a rule."""

        def add(check: Check) -> Check:
            self.append(Rule(source, check, severity, frozenset(launchers)))
            return check

        return add

    def core_config(self, lines: str, **more: Any) -> Callable[[Check], Check]:
        """Return a decorator that adds a check in these lines of core's TransformerConfig."""
        return self.rule(f"core/transformer/transformer_config.py:{lines}, {CORE}", **more)

    validate_args = partialmethod(rule, VALIDATE_ARGS, launchers=ARGPARSE)

"""What a rule of a launch line is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from omnibal.lint.launch import Finding, Launcher, Severity
from omnibal.lint.line import Line

CORE = "megatron-core 0.16.1"
MEGATRON_LM = "Megatron-LM@000c4ac"
BRIDGE = "Megatron-Bridge@003e863"
SWIFT = "ms-swift 4.6.0"
LOONGFORGE = "LoongForge@130ff79"
"""Versions whose checks were read."""


class Broken(NamedTuple):
    """How a line breaks a rule."""

    given: str
    change: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that must hold for a launch line to start."""

    name: str
    holds: str
    """What must hold, as a part of a sentence."""
    source: str
    """File, line and version of the trainer's own check."""
    broken: Callable[[Line], Broken | None]
    """What is given and what to change, where the rule is broken."""
    severity: Severity = "refused"
    launchers: frozenset[Launcher] = frozenset(Launcher)
    """Trainers that check it."""

    def finding(self, line: Line) -> Finding | None:
        """What is wrong with a line by this rule; None where nothing is."""
        if line.launch.launcher not in self.launchers:
            return None
        broken = self.broken(line)
        if broken is None:
            return None
        return Finding(
            rule=self.name,
            severity=self.severity,
            message=f"{broken.given}; {self.holds}: {broken.change}",
            source=self.source,
        )

"""All rules of launch lines, and their findings."""

from collections.abc import Sequence

from omnibal.trainers.lint import (
    rules_grids,
    rules_layout,
    rules_loongforge,
    rules_model,
    rules_recompute,
    rules_split,
)
from omnibal.trainers.lint.launch import MEGATRON, Finding
from omnibal.trainers.lint.line import Line
from omnibal.trainers.lint.rule import RuleGroup

GROUPS: tuple[RuleGroup, ...] = (
    rules_grids.RULES,
    rules_split.RULES,
    rules_layout.RULES,
    rules_loongforge.RULES,
    rules_recompute.RULES,
    rules_model.RULES,
)
"""All rules, in checking order."""
_ORDER = ("refused", "refused-at-first-step", "ignored", "warning")


def findings_of(line: Line) -> list[Finding]:
    """Return a line's findings, refusals first."""
    found = (rule.finding(line) for group in GROUPS for rule in group.rules)
    return sorted(filter(None, found), key=lambda finding: _ORDER.index(finding.severity))


def can_start(line: Line, findings: Sequence[Finding]) -> bool | None:
    """Whether the line's findings let it start.

    None if a flag may be misspelled, or no rules of the trainer are known.
    """
    if any(finding.is_refusal for finding in findings):
        return False
    return None if line.near_names or line.launch.launcher not in MEGATRON else True

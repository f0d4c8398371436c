"""All rules of launch lines, and their findings."""

from collections.abc import Sequence

from omnibal.trainers.lint import rules_model, rules_recompute, rules_sizes, rules_split
from omnibal.trainers.lint.launch_settings import MEGATRON, Finding
from omnibal.trainers.lint.line import LaunchLine

RULES = (*rules_sizes.RULES, *rules_split.RULES, *rules_recompute.RULES, *rules_model.RULES)
_ORDER = ("refused", "refused-at-first-step", "ignored", "warning")


def findings_of(line: LaunchLine) -> list[Finding]:
    """Return the findings of all rules that a line breaks, sorted by severity, refusals first."""
    findings = filter(None, (rule.finding(line) for rule in RULES))
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def can_start(line: LaunchLine, findings: Sequence[Finding]) -> bool | None:
    """Return False if refused; None if flags may be misspelled or rules are unknown; else True."""
    if any(finding.is_refusal for finding in findings):
        return False
    return None if line.misspelled_flags or line.launch.launcher not in MEGATRON else True

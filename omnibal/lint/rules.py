"""All rules of launch lines, and what they find."""

from collections.abc import Sequence

from omnibal.config import ModelConfig
from omnibal.lint.launch import Finding, Launch, Launcher
from omnibal.lint.line import line_of
from omnibal.lint.rule import Rule
from omnibal.lint.rules_batch import BATCH_RULES
from omnibal.lint.rules_grids import GRID_RULES
from omnibal.lint.rules_layout import LAYOUT_RULES
from omnibal.lint.rules_loongforge import LOONGFORGE_RULES
from omnibal.lint.rules_model import MODEL_RULES
from omnibal.lint.rules_optimizer import OPTIMIZER_RULES
from omnibal.lint.rules_recompute import RECOMPUTE_RULES
from omnibal.lint.rules_router import ROUTER_RULES
from omnibal.lint.rules_split import SPLIT_RULES

GROUPS: dict[str, tuple[Rule, ...]] = {
    "GPUs and grids": GRID_RULES,
    "Batch and length": BATCH_RULES,
    "Layers of stages": SPLIT_RULES,
    "Layouts": LAYOUT_RULES,
    "LoongForge's lists": LOONGFORGE_RULES,
    "Recomputation": RECOMPUTE_RULES,
    "Tensor, sequence, context and expert ranks": MODEL_RULES,
    "Routers of experts": ROUTER_RULES,
    "Precision, optimizer and checkpoints": OPTIMIZER_RULES,
}
"""Rules by what they are of."""
_ORDER = ("refused", "refused-at-first-step", "ignored", "warning")


def findings_of(launch: Launch, model: ModelConfig) -> list[Finding]:
    """Find all that is wrong, or worth knowing, of a launch; refusals come first."""
    line = line_of(launch, model)
    rules = (rule for group in GROUPS.values() for rule in group)
    found = [finding for rule in rules if (finding := rule.finding(line)) is not None]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))


def rules_table() -> str:
    """All rules as tables of Markdown, a group after another."""
    parts = []
    for title, rules in GROUPS.items():
        cells = (
            (f"`{rule.name}`", rule.holds, rule.severity, _trainers(rule), rule.source)
            for rule in rules
        )
        rows = [f"| {' | '.join(row)} |" for row in cells]
        head = "| rule | what must hold | if not | of | check |\n|---|---|---|---|---|"
        parts.append(f"### {title}\n\n{head}\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _trainers(rule: Rule) -> str:
    if rule.launchers == frozenset(Launcher):
        return "all"
    return ", ".join(_in_order(rule.launchers))


def _in_order(launchers: frozenset[Launcher]) -> Sequence[str]:
    return [launcher.value for launcher in Launcher if launcher in launchers]

"""Rules of launch lines: each on a line that breaks it and on the line corrected."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from launch_cases import sized_model

from omnibal.families.named import named_model
from omnibal.lint.all_rules import GROUPS, findings_of
from omnibal.lint.command_line import read_launch
from omnibal.lint.launch import Finding, Launcher
from omnibal.model.config import ModelConfig

pytestmark = pytest.mark.quick

ROWS = "launch_rule_cases.json"
MODELS = {
    "dense": sized_model(12, 8, 4),
    "odd": sized_model(13, 8, 4),
    "experts": sized_model(12, 8, 4, experts=8),
    "latent": sized_model(12, 8, 4, latent=True),
    "delta": named_model("qwen3.5-35b-a3b"),
}
"""Models of 12 layers, 8 heads and 4 of k and v, and one of 40 layers with a gated delta net and
256 experts, one of them shared."""
LONG = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "MBS": "micro_batch_size",
    "GBS": "global_batch_size",
}


class Case(NamedTuple):
    """Flags that break a rule, and the same flags corrected."""

    rule: str
    broken: str
    right: str
    model: str = "dense"
    launcher: str = "megatron-lm"
    gpus: int | None = 8


def line_of_flags(case: Case, flags: str) -> str:
    """Flags such as `TP=2 --bf16` as a line of the case's trainer."""
    words = ["run"]
    if case.launcher in ("megatron-lm", "loongforge") and "MBS" not in flags:
        words.append("--micro-batch-size 1")
    for word in flags.split():
        name, _, value = word.partition("=")
        long = LONG.get(name)
        if long is None:
            words.append(word)
        elif case.launcher == "megatron-bridge":
            words.append(f"{'train' if 'BS' in name else 'model'}.{long}={value}")
        else:
            dashed = long if case.launcher == "ms-swift" else long.replace("_", "-")
            words.append(f"--{dashed} {value}")
    return " ".join(words)


def found(case: Case, flags: str) -> list[Finding]:
    launcher = Launcher(case.launcher)
    launch = read_launch(line_of_flags(case, flags), {}, launcher, case.gpus)
    model: ModelConfig = MODELS[case.model]
    return findings_of(launch, model)


CASES = [Case(**row) for row in json.loads(Path(__file__).with_name(ROWS).read_text())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_is_broken_and_kept(case: Case):
    """Prevents: a rule that never speaks, one that always does, and advice that does not help."""
    broken = found(case, case.broken)
    assert case.rule in [one.rule for one in broken]
    message = next(one.message for one in broken if one.rule == case.rule)
    assert "; " in message and ": " in message and "None" not in message
    right = found(case, case.right)
    assert case.rule not in [one.rule for one in right]
    assert [one.message for one in right if one.is_refusal] == []


def test_every_rule_is_tried():
    """Prevents: a rule without a line that breaks it."""
    names = [rule.name for group in GROUPS for rule in group.rules]
    assert len(names) == len(set(names))
    assert {case.rule for case in CASES} | {"one-connection"} == set(names)


@pytest.mark.parametrize(("value", "is_told"), [("8", True), ("1", False), (None, False)])
def test_connections_are_judged_by_the_environment(value: str | None, is_told: bool):
    """Prevents: a rule of a variable that is looked for among the flags."""
    before = "" if value is None else f"CUDA_DEVICE_MAX_CONNECTIONS={value} "
    launch = read_launch(f"{before}run --tensor-model-parallel-size 2 --micro-batch-size 1", {})
    rules = [one.rule for one in findings_of(launch, MODELS["dense"])]
    assert ("one-connection" in rules) == is_told


@pytest.mark.parametrize(
    ("launcher", "ranks", "is_refused"),
    [("megatron-lm", 4, True), ("megatron-bridge", 4, True), ("ms-swift", 4, False)],
)
def test_expert_tensor_size_has_each_trainers_default(launcher: str, ranks: int, is_refused: bool):
    """Prevents: the most frequent refusal, of an expert tensor size that nobody gave, missed."""
    case = Case("gpus-divide-expert-grid", "", "", "experts", launcher)
    rules = [one.rule for one in found(case, f"TP={ranks} EP=8 MBS=1")]
    assert ("gpus-divide-expert-grid" in rules) == is_refused


def test_refusals_come_first():
    """Prevents: the reason for a refusal below a screen of warnings."""
    case = Case("", "", "", "experts")
    flags = "TP=2 EP=2 PP=2 --num-virtual-stages-per-pipeline-rank 1 GBS=8 "
    flags += "--decoder-first-pipeline-num-layers 0"
    severities = [one.severity for one in found(case, flags)]
    order = ("refused", "refused-at-first-step", "ignored", "warning")
    assert severities == sorted(severities, key=order.index)
    assert severities[0] == "refused" and severities[-1] == "warning"

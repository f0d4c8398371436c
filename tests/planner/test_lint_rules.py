"""Rules of launch lines: on published lines, good and broken, and on lines made to break a rule."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from launch_cases import BROKEN, GOOD, LINES, PublishedLine, model_of, sized_model

from omnibal.families.named import named_model
from omnibal.model.levels import ContextExchange
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.launch_settings import Finding, Launcher
from omnibal.trainers.lint.line import layers_by_chunk, line_of
from omnibal.trainers.lint.rule import RULES
from omnibal.trainers.lint.rules import findings_of

pytestmark = pytest.mark.quick

each_good = pytest.mark.parametrize("published", GOOD, ids=lambda one: one.id)
each_broken = pytest.mark.parametrize("published", BROKEN, ids=lambda one: one.id)


def refusals(published: PublishedLine, line: str | None = None) -> list[Finding]:
    launch = read_launch(line or published.line, {})
    assert launch.launcher == published.launcher
    rule_findings = findings_of(line_of(launch, model_of(published.model)))
    return [finding for finding in rule_findings if finding.is_refusal]


@each_good
def test_a_line_that_runs_is_not_refused(published: PublishedLine):
    """Prevents refusing a line that runs, and a cost or picture of a split without a layer."""
    assert refusals(published) == []
    model, launch = model_of(published.model), read_launch(published.line, {})
    layers = layers_by_chunk(line_of(launch, model))
    assert len(layers) == launch.pipeline
    assert sum(map(sum, layers)) == model.language.layers


@each_broken
def test_a_broken_line_is_refused_by_its_rule(published: PublishedLine):
    """Prevents a launch that fails an assertion after the GPUs were allocated."""
    rule_findings = refusals(published)
    assert published.rule in [finding.rule for finding in rule_findings]
    assert all(finding.source and finding.message.count("; ") >= 1 for finding in rule_findings)


def test_a_name_that_is_nearly_a_flags_is_told():
    """Prevents a misspelled size read as absent, and questions about correct flags."""
    for one in LINES:
        assert not line_of(read_launch(one.line, {}), model_of(one.model)).misspelled_flags
    line = "run --num-layer 4 --pipeline-model-parallel 2 --micro-batch-size 1"
    near = line_of(read_launch(line, {}), model_of(LINES[0].model)).misspelled_flags
    assert list(near.values()) == ["num-layers", "pipeline-model-parallel-size"]


@pytest.mark.parametrize(
    ("words", "exchange", "is_ring"),
    [
        ("", ContextExchange.GATHER, True),
        ("--cp-comm-type a2a+p2p", ContextExchange.GATHER, True),
        ("--cp-comm-type all_gather", ContextExchange.GATHER, False),
        ("--cp-comm-type a2a", ContextExchange.HEADS, False),
        ("--cp-comm-type a2a a2a", ContextExchange.HEADS, False),
        ("--cp-comm-type p2p p2p", ContextExchange.GATHER, True),
        ("--cp-comm-type p2p a2a", ContextExchange.GATHER, False),
    ],
)
def test_a_word_a_layer_is_read_as_one_for_all(
    words: str, exchange: ContextExchange, is_ring: bool
):
    """Prevents a level that exchanges heads combined with kernels that run a ring."""
    launch = read_launch(f"run --context-parallel-size 2 --micro-batch-size 1 {words}", {})
    line = line_of(launch, model_of(LINES[0].model))
    assert (line.exchange, line.is_ring) == (exchange, is_ring)


@each_good
def test_one_gpu_more_is_refused_where_sizes_do_not_divide_it(published: PublishedLine):
    """Prevents a world size that no rule checks because no trainer flag sets it."""
    launch, model = read_launch(published.line, {}), model_of(published.model)
    line = line_of(launch, model)
    gpus = launch.gpus + 1
    more = read_launch(published.line, {}, gpus=gpus)
    rules = {one.rule for one in findings_of(line_of(more, model))}
    has_experts = launch.expert > 1 or launch.expert_tensor is not None
    expected = {
        "gpus-divide-grid": gpus % line.grid != 0,
        "gpus-divide-expert-grid": gpus % line.expert_grid != 0 and has_experts,
    }
    for rule, is_broken in expected.items():
        assert (rule in rules) == is_broken


MODELS = {
    "dense": sized_model(12, 8, 4),
    "odd": sized_model(13, 8, 4),
    "experts": sized_model(12, 8, 4, experts=8),
    "latent": sized_model(12, 8, 4, latent=True),
    "delta": named_model("qwen3.5-35b-a3b"),
}
"""Models of 12 layers with 8 heads and 4 KV heads, and a model of 40 layers with gated delta nets
and 256 experts, including a shared expert."""
LONG = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "MBS": "micro_batch_size",
    "GBS": "global_batch_size",
}


ROWS = Path(__file__).with_name("launch_rule_cases.json")


class Case(NamedTuple):
    """Flags that break a rule, and the corrected flags."""

    rule: str
    broken: str
    right: str
    model: str = "dense"
    launcher: str = "megatron-lm"
    gpus: int | None = 8


def line_of_flags(launcher: str, flags: str) -> str:
    """Return a trainer's line from flags such as `TP=2 --bf16`."""
    words = ["run"]
    if launcher in ("megatron-lm", "loongforge") and "MBS" not in flags:
        words.append("--micro-batch-size 1")
    for word in flags.split():
        name, _, value = word.partition("=")
        long = LONG.get(name)
        if long is None:
            words.append(word)
        elif launcher == "megatron-bridge":
            words.append(f"{'train' if 'BS' in name else 'model'}.{long}={value}")
        else:
            words.append(f"--{long if launcher == 'ms-swift' else long.replace('_', '-')} {value}")
    return " ".join(words)


def rule_findings(case: Case, flags: str) -> list[Finding]:
    line = line_of_flags(case.launcher, flags)
    launch = read_launch(line, {}, Launcher(case.launcher), case.gpus)
    return findings_of(line_of(launch, MODELS[case.model]))


CASES = [Case(**row) for row in json.loads(ROWS.read_text())]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_is_broken_and_kept(case: Case):
    """Prevents a rule that never or always fires, and advice that does not help."""
    broken = rule_findings(case, case.broken)
    assert case.rule in [one.rule for one in broken]
    message = next(one.message for one in broken if one.rule == case.rule)
    assert "; " in message and "None" not in message
    right = rule_findings(case, case.right)
    assert case.rule not in [one.rule for one in right]
    assert [one.message for one in right if one.is_refusal] == []


def test_every_rule_is_tried():
    """Prevents a rule without a line that breaks it."""
    assert {case.rule for case in CASES} | {"one-connection"} == set(RULES)


@pytest.mark.parametrize(("value", "is_told"), [("8", True), ("1", False), (None, False)])
def test_connections_are_judged_by_the_environment(value: str | None, is_told: bool):
    """Prevents looking for an environment variable among the flags."""
    before = "" if value is None else f"CUDA_DEVICE_MAX_CONNECTIONS={value} "
    launch = read_launch(f"{before}run --tensor-model-parallel-size 2 --micro-batch-size 1", {})
    rules = [one.rule for one in findings_of(line_of(launch, MODELS["dense"]))]
    assert ("one-connection" in rules) == is_told


@pytest.mark.parametrize(
    ("launcher", "ranks", "is_refused"),
    [("megatron-lm", 4, True), ("megatron-bridge", 4, True), ("ms-swift", 4, False)],
)
def test_expert_tensor_size_has_each_trainers_default(launcher: str, ranks: int, is_refused: bool):
    """Prevents missing the most frequent refusal, of a default expert tensor size."""
    case = Case("gpus-divide-expert-grid", "", "", "experts", launcher)
    rules = [one.rule for one in rule_findings(case, f"TP={ranks} EP=8 MBS=1")]
    assert ("gpus-divide-expert-grid" in rules) == is_refused


def test_refusals_come_first():
    """Prevents the reason for a refusal below a screen of warnings."""
    case = Case("", "", "", "experts")
    flags = "TP=2 EP=2 PP=2 --num-virtual-stages-per-pipeline-rank 1 GBS=8 "
    flags += "--decoder-first-pipeline-num-layers 0"
    severities = [one.severity for one in rule_findings(case, flags)]
    order = ("refused", "refused-at-first-step", "ignored", "warning")
    assert severities == sorted(severities, key=order.index)
    assert severities[0] == "refused" and severities[-1] == "warning"

"""Findings of all rules on a launch line; checks of recomputation and of the model's sizes."""

from collections.abc import Sequence
from typing import get_args

from omnibal.model.runtime import RecomputedModule
from omnibal.trainers.lint import rules_sizes
from omnibal.trainers.lint.flags import flag_of
from omnibal.trainers.lint.launch_settings import MEGATRON, Finding
from omnibal.trainers.lint.line import LaunchLine
from omnibal.trainers.lint.rule import RULES, Problems

_MODULES = ("core_attn", *get_args(RecomputedModule))
_ORDER = ("refused", "refused-at-first-step", "ignored", "warning")


def check_recompute(line: LaunchLine) -> Problems:
    """Yield problems of flags of recomputation that are wrong, missing or too many."""
    launch, number = line.launch, line.launch.recompute_layers
    granularity, method = (line.text(f"recompute-{name}") for name in ("granularity", "method"))
    if granularity not in (None, "full", "selective"):
        yield "recompute-words", f"recompute granularity {granularity}", "use full or selective"
    if method not in (None, "block", "uniform"):
        yield "recompute-words", f"recompute method {method}", "use block or uniform"
    if launch.recompute == "full" and method is None:
        yield "recompute-needs-method", "full recomputation needs a method", "give block or uniform"
    if launch.recompute == "full" and number is None and launch.recompute_by_stage is None:
        change = f"give {flag_of(launch, 'recompute-num-layers')}"
        yield "recompute-needs-number", "full recomputation needs a number of layers", change
    if launch.recompute == "selective" and number is not None:
        given = f"a number of layers ({number}) is for full recomputation, not for selective"
        yield "selective-without-number", given, "leave the number out, or use full"
    if launch.recompute == "selective" and method is not None:
        given = f"a method ({method}) is for full recomputation, not for selective"
        yield "selective-without-method", given, "leave it out, or use full"


def check_recomputed_layers(line: LaunchLine) -> Problems:
    """Yield problems of the number of layers of full recomputation."""
    launch, number = line.launch, line.launch.recompute_layers
    if number is None:
        return
    method = launch.recompute_method if launch.recompute == "full" else "none"
    if method in ("uniform", None) and number <= 0:
        given = f"uniform recomputation of {number} layers at a time never ends"
        yield "recompute-number-positive", given, "use 1 or more"
    if method == "block" and number <= 0 and launch.recompute_by_stage is None:
        given = f"block recomputation of {number} layers recomputes nothing"
        yield "recompute-recomputes", given, "give 1 or more, or leave it out"
    if method == "uniform" and launch.prediction_layers and number != 1:
        given = "multi-token prediction is recomputed one layer at a time, and uniform "
        yield "prediction-recompute", f"{given}recomputation has {number}", "use 1, or block"
    limit = -(-line.sizes.layers // launch.pipeline // (line.virtual or 1))
    is_block = launch.recompute_method == "block" and not launch.recompute_by_stage
    if is_block and line.has_even_split and number > limit:
        given = f"{number} recomputed layers are more than the {limit} of a chunk"
        yield "recompute-within-stage", given, f"give {limit}, the same"


def check_recomputed_modules(line: LaunchLine) -> Problems:
    modules = line.launch.recompute_modules if line.launch.recompute == "selective" else ()
    wrong = [module for module in modules if module not in _MODULES]
    if wrong:
        given = f"modules {', '.join(wrong)} are not known to selective recomputation"
        yield "recompute-modules-known", given, f"choose from {', '.join(_MODULES)}"
    if "mla_up_proj" in modules and not line.is_latent:
        given = "module mla_up_proj is of multi-latent attention, which the model does not have"
        yield "recompute-latent", given, "leave it out"


def check_heads(line: LaunchLine) -> Problems:
    sizes, tensor, linear = line.sizes, line.launch.tensor, line.linear
    heads, groups = sizes.heads, sizes.query_groups
    given = [
        f"{name.replace('_', ' ')} {ours} (model: {theirs})"
        for name, (ours, theirs) in line.changed_sizes.items()
    ]
    if given:
        problem = f"flags give other sizes than the named model's: {', '.join(given)}"
        yield "sizes-are-the-models", problem, "check --model; the flags' sizes are checked"
    if heads % tensor:
        problem = f"{heads} heads are no multiple of TP {tensor}"
        yield "heads-divide-tensor", problem, "choose a TP that divides them"
    if groups % tensor and tensor % groups:
        problem = f"{groups} heads of k and v are neither multiple nor divisor of TP {tensor}"
        yield "query-groups-divide-tensor", problem, "choose another TP"
    if line.language.output_gate and groups < tensor:
        problem = (
            f"with output gates, TP must be at most the {groups} heads of k and v, not {tensor}"
        )
        yield "gates-have-heads", problem, f"use TP {groups} or less"
    if linear is not None and (linear.key_heads % tensor or linear.value_heads % tensor):
        problem = f"{linear.key_heads} key and {linear.value_heads} value heads of the "
        problem += f"gated delta net are no multiples of TP {tensor}"
        yield "delta-heads-divide-tensor", problem, "choose a TP that divides both"
    if linear is not None and line.launch.context > 1:
        problem = f"core 0.16.1 cannot divide a gated delta net by CP {line.launch.context}"
        for rule in ("delta-net-without-context", "delta-net-and-core"):
            yield rule, problem, "use CP 1, or a newer core"


def check_experts(line: LaunchLine) -> Problems:
    launch, experts = line.launch, line.sizes.experts
    if launch.sequence_parallel and launch.tensor == 1:
        given, change = "sequence parallelism needs TP above 1", "leave it out, or raise TP"
        for rule in ("sequence-needs-tensor", "sequence-dropped"):
            yield rule, given, change
    if launch.expert > 1 and not experts:
        given = f"EP {launch.expert} needs experts, which the model does not have"
        yield "expert-size-needs-experts", given, "leave it out"
    if experts % launch.expert:
        given = f"{experts} experts are no multiple of EP {launch.expert}"
        yield "experts-divide", given, "choose an EP that divides them"
    if launch.expert > 1 and launch.tensor > 1 and not launch.sequence_parallel:
        given = f"TP {launch.tensor} with EP {launch.expert} should have sequence parallelism"
        yield "experts-want-sequence", given, f"give {flag_of(launch, 'sequence-parallel')}"
    is_flex = line.text("moe-token-dispatcher-type") == "flex"
    if experts and is_flex and line.expert_tensor * launch.expert == 1:
        given = "the dispatcher flex needs several ranks, not ETP 1 and EP 1"
        yield "flex-needs-ranks", given, "use alltoall, or raise EP"


def check_environment(line: LaunchLine) -> Problems:
    given = line.launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    is_divided = line.launch.tensor > 1 or line.launch.context > 1
    is_sharded = line.on("use-torch-fsdp2") or line.on("use-megatron-fsdp")
    if is_divided and not is_sharded and given not in (None, "1"):
        problem = "before Blackwell, TP or CP above 1 needs one connection a device, and "
        problem += f"CUDA_DEVICE_MAX_CONNECTIONS is {given}"
        yield "one-connection", problem, "set it to 1"


_CHECKS = (
    *rules_sizes.CHECKS,
    check_recompute,
    check_recomputed_layers,
    check_recomputed_modules,
    check_heads,
    check_experts,
    check_environment,
)


def findings_of(line: LaunchLine) -> list[Finding]:
    """Return the findings of all rules that a line breaks, sorted by severity, refusals first."""
    problems = [problem for check in _CHECKS for problem in check(line)]
    # The first problem of each rule, as dictionaries keep the last.
    texts = {name: f"{given}; {change}" for name, given, change in reversed(problems)}
    findings = [
        Finding(rule=name, severity=rule.severity, message=texts[name], source=rule.source)
        for name, rule in RULES.items()
        if name in texts and line.launch.launcher in rule.launchers
    ]
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def can_start(line: LaunchLine, findings: Sequence[Finding]) -> bool | None:
    """Return False if refused; None if flags may be misspelled or rules are unknown; else True."""
    if any(finding.is_refusal for finding in findings):
        return False
    return None if line.misspelled_flags or line.launch.launcher not in MEGATRON else True

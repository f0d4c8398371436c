"""All rules of launch lines; this file adds rules of recomputation and the model's sizes."""

from collections.abc import Sequence
from typing import get_args

from omnibal.model.runtime import RecomputedModule
from omnibal.trainers.lint import rules_sizes
from omnibal.trainers.lint.flags import flag_of
from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Finding, Launcher
from omnibal.trainers.lint.line import LaunchLine
from omnibal.trainers.lint.rule import BLOCK, CORE, SWIFT, VALIDATE_ARGS, Problems, Rules

RULES = Rules(rules_sizes.RULES)
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_PARALLEL = "core/model_parallel_config.py"
_MODULES = ("core_attn", *get_args(RecomputedModule))
_ORDER = ("refused", "refused-at-first-step", "ignored", "warning")


@core_config("1155-1161", launchers=MEGATRON - {Launcher.MS_SWIFT})
def recompute_words(line: LaunchLine) -> Problems:
    """Granularity must be full or selective, and the method block or uniform."""
    granularity, method = (line.text(f"recompute-{name}") for name in ("granularity", "method"))
    if granularity not in (None, "full", "selective"):
        yield f"recompute granularity {granularity}", "use full or selective"
    if method not in (None, "block", "uniform"):
        yield f"recompute method {method}", "use block or uniform"


@core_config("1166")
def recompute_needs_method(line: LaunchLine) -> Problems:
    """Full recomputation needs a method."""
    if line.launch.recompute == "full" and line.text("recompute-method") is None:
        yield "full recomputation without a method", "give block or uniform"


@core_config("1172")
def recompute_needs_number(line: LaunchLine) -> Problems:
    """Full recomputation needs a number of layers."""
    launch = line.launch
    has_number = launch.recompute_layers is not None or launch.recompute_by_stage is not None
    if launch.recompute == "full" and not has_number:
        change = f"give {flag_of(launch, 'recompute-num-layers')}"
        yield "full recomputation without a number of layers", change


def _full_layers(line: LaunchLine, *methods: str | None) -> int | None:
    """Return `recompute_layers` of full recomputation by one of these methods, else None."""
    launch = line.launch
    is_by_method = launch.recompute == "full" and launch.recompute_method in methods
    return launch.recompute_layers if is_by_method else None


@rule(f"{BLOCK}:532, {CORE}", severity="refused-at-first-step")
def recompute_number_positive(line: LaunchLine) -> Problems:
    """The loop over a stage's layers advances by that number, and never ends with 0."""
    number = _full_layers(line, "uniform", None)
    if number is not None and number <= 0:
        yield f"uniform recomputation of {number} layers at a time", "use 1 or more"


@rule(f"{BLOCK}:560-570, {CORE}", severity="ignored")
def recompute_recomputes(line: LaunchLine) -> Problems:
    """A stage recomputes layers with an index below the number: none if it is 0 or less."""
    number = _full_layers(line, "block")
    if number is not None and number <= 0 and line.launch.recompute_by_stage is None:
        yield f"block recomputation of {number} layers", "give 1 or more, or leave it out"


@core_config("1179")
def selective_without_number(line: LaunchLine) -> Problems:
    """A number of layers is for full recomputation."""
    number = line.launch.recompute_layers
    if line.launch.recompute == "selective" and number is not None:
        yield f"selective recomputation with {number} layers", "leave the number out, or use full"


@rule(f"{VALIDATE_ARGS}; megatron_args.py:849, {SWIFT}", launchers=ARGPARSE | {Launcher.MS_SWIFT})
def selective_without_method(line: LaunchLine) -> Problems:
    """A method is for full recomputation."""
    method = line.text("recompute-method")
    if line.launch.recompute == "selective" and method is not None:
        yield f"selective recomputation with method {method}", "leave it out, or use full"


def _selected_modules(line: LaunchLine) -> tuple[str, ...]:
    return line.launch.recompute_modules if line.launch.recompute == "selective" else ()


@core_config("1196-1211")
def recompute_modules_known(line: LaunchLine) -> Problems:
    """Modules must be known to selective recomputation."""
    wrong = [module for module in _selected_modules(line) if module not in _MODULES]
    if wrong:
        yield f"modules {', '.join(wrong)}", f"choose from {', '.join(_MODULES)}"


@core_config("1218")
def recompute_latent(line: LaunchLine) -> Problems:
    """mla_up_proj is a module of multi-latent attention."""
    if "mla_up_proj" in _selected_modules(line) and not line.is_latent:
        yield "module mla_up_proj of a model without latent attention", "leave it out"


@rule(f"core/transformer/multi_token_prediction.py:846, {CORE}", severity="refused-at-first-step")
def prediction_recompute(line: LaunchLine) -> Problems:
    """Multi-token prediction is recomputed one layer at a time."""
    number = _full_layers(line, "uniform")
    if line.launch.prediction_layers and number not in (None, 1):
        given = f"uniform recomputation of {number} layers at a time"
        yield f"{given} with multi-token prediction", "use 1, or block"


@rule(f"{BLOCK}:532-560, {CORE}", severity="warning")
def recompute_within_stage(line: LaunchLine) -> Problems:
    """A stage recomputes no more layers than it has."""
    launch, number = line.launch, line.launch.recompute_layers
    limit = -(-line.sizes.layers // launch.pipeline // (line.virtual or 1))
    is_block = launch.recompute_method == "block" and not launch.recompute_by_stage
    if is_block and line.has_even_split and number is not None and number > limit:
        yield f"{number} recomputed layers for chunks of {limit}", f"give {limit}, the same"


@rule("this command, --model", severity="warning")
def sizes_are_the_models(line: LaunchLine) -> Problems:
    """Flags should give the sizes of the model that is named."""
    given = [
        f"{name.replace('_', ' ')} {ours} (model: {theirs})"
        for name, (ours, theirs) in line.changed_sizes.items()
    ]
    if given:
        yield f"flags give {', '.join(given)}", "check --model; the flags' sizes are checked"


@core_config("924")
def heads_divide_tensor(line: LaunchLine) -> Problems:
    """Heads must be a multiple of the tensor size."""
    heads, tensor = line.sizes.heads, line.launch.tensor
    if heads % tensor:
        yield f"{heads} heads and TP {tensor}", "choose a TP that divides them"


@core_config("939")
def query_groups_divide_tensor(line: LaunchLine) -> Problems:
    """Heads of k and v must be a multiple or a divisor of the tensor size."""
    groups, tensor = line.sizes.query_groups, line.launch.tensor
    if groups % tensor and tensor % groups:
        yield f"{groups} heads of k and v and TP {tensor}", "choose another TP"


@rule(
    f"core/transformer/attention.py:1218, {CORE}",
    severity="refused-at-first-step",
    launchers=set(Launcher) - {Launcher.LOONGFORGE},
)
def gates_have_heads(line: LaunchLine) -> Problems:
    """With output gates, TP must be at most the heads of k and v."""
    groups, tensor = line.sizes.query_groups, line.launch.tensor
    if line.language.output_gate and groups < tensor:
        yield f"{groups} heads of k and v, output gates and TP {tensor}", f"use TP {groups} or less"


@core_config("975-980")
def delta_heads_divide_tensor(line: LaunchLine) -> Problems:
    """Both must be multiples of the tensor size."""
    linear, tensor = line.linear, line.launch.tensor
    if linear is not None and (linear.key_heads % tensor or linear.value_heads % tensor):
        heads = f"{linear.key_heads} key and {linear.value_heads} value heads"
        yield f"{heads} of the gated delta net and TP {tensor}", "choose a TP that divides both"


@core_config("983", launchers={Launcher.MEGATRON_LM})
def delta_net_without_context(line: LaunchLine) -> Problems:
    """This core's gated delta net cannot be divided over context ranks."""
    if line.linear is not None and line.launch.context > 1:
        yield f"a gated delta net and CP {line.launch.context}", "use CP 1, or a newer core"


@core_config("983", severity="warning", launchers={Launcher.MEGATRON_BRIDGE, Launcher.LOONGFORGE})
def delta_net_and_core(line: LaunchLine) -> Problems:
    """Core 0.16.1 refuses this and newer versions do not."""
    return delta_net_without_context(line)


@rule(f"{_PARALLEL}:409, {CORE}", launchers={Launcher.MEGATRON_BRIDGE})
def sequence_needs_tensor(line: LaunchLine) -> Problems:
    """Sequence parallelism needs tensor parallelism."""
    if line.launch.sequence_parallel and line.launch.tensor == 1:
        yield "sequence parallelism with TP 1", "leave it out, or raise TP"


@rule(
    f"{VALIDATE_ARGS}; megatron_args.py:943, {SWIFT}",
    severity="ignored",
    launchers=ARGPARSE | {Launcher.MS_SWIFT},
)
def sequence_dropped(line: LaunchLine) -> Problems:
    """Sequence parallelism is switched off without tensor parallelism."""
    return sequence_needs_tensor(line)


@core_config("1048")
def expert_size_needs_experts(line: LaunchLine) -> Problems:
    """Expert parallelism needs experts."""
    if line.launch.expert > 1 and not line.sizes.experts:
        yield f"EP {line.launch.expert} of a model without experts", "leave it out"


@rule(f"core/transformer/moe/moe_layer.py:101, {CORE}")
def experts_divide(line: LaunchLine) -> Problems:
    """Experts must be a multiple of the expert size."""
    experts, size = line.sizes.experts, line.launch.expert
    if experts % size:
        yield f"{experts} experts and EP {size}", "choose an EP that divides them"


@rule(f"{_PARALLEL}:440, {CORE}", severity="warning")
def experts_want_sequence(line: LaunchLine) -> Problems:
    """Tensor and expert parallelism should train with sequence parallelism."""
    launch = line.launch
    if launch.expert > 1 and launch.tensor > 1 and not launch.sequence_parallel:
        given = f"TP {launch.tensor} and EP {launch.expert} without it"
        yield given, f"give {flag_of(launch, 'sequence-parallel')}"


@rule(f"core/transformer/moe/token_dispatcher.py:1346, {CORE}")
def flex_needs_ranks(line: LaunchLine) -> Problems:
    """The dispatcher flex needs several ranks."""
    is_alone = line.expert_tensor * line.launch.expert == 1
    if line.sizes.experts and is_alone and line.text("moe-token-dispatcher-type") == "flex":
        yield "dispatcher flex with ETP 1 and EP 1", "use alltoall, or raise EP"


@validate_args(severity="warning")
def one_connection(line: LaunchLine) -> Problems:
    """Before Blackwell, TP or CP above 1 needs one connection a device."""
    given = line.launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    is_divided = line.launch.tensor > 1 or line.launch.context > 1
    is_sharded = line.on("use-torch-fsdp2") or line.on("use-megatron-fsdp")
    if is_divided and not is_sharded and given not in (None, "1"):
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={given}", "set it to 1"


def findings_of(line: LaunchLine) -> list[Finding]:
    """Return the findings of all rules that a line breaks, sorted by severity, refusals first."""
    findings = filter(None, (rule.finding(line) for rule in RULES))
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def can_start(line: LaunchLine, findings: Sequence[Finding]) -> bool | None:
    """Return False if refused; None if flags may be misspelled or rules are unknown; else True."""
    if any(finding.is_refusal for finding in findings):
        return False
    return None if line.misspelled_flags or line.launch.launcher not in MEGATRON else True

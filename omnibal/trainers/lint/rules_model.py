"""Rules: tensor, sequence, context and expert parallelism divide the model."""

from omnibal.trainers.lint.flags import flag_of
from omnibal.trainers.lint.launch_settings import ARGPARSE, Launcher
from omnibal.trainers.lint.line import LaunchLine
from omnibal.trainers.lint.rule import CORE, SWIFT, VALIDATE_ARGS, Problems, Rules

RULES = Rules()
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_PARALLEL = "core/model_parallel_config.py"


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

"""Rules of how tensor, sequence, context and expert ranks divide the model."""

from omnibal.lint.flags import words_of
from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, MEGATRON_LM, SWIFT, Broken, Rule

_CONFIG = "core/transformer/transformer_config.py"
_PARALLEL = "core/model_parallel_config.py"
_VALIDATE = f"training/arguments.py, validate_args, {MEGATRON_LM}"
_MEGATRON_LM = frozenset((Launcher.MEGATRON_LM,))
_DISPATCHER = {
    Launcher.MEGATRON_LM: "allgather",
    Launcher.MS_SWIFT: "alltoall",
}
"""Default of how tokens travel to experts; recipes of Megatron-Bridge and
configurations of LoongForge have their own."""


def _other_sizes(line: Line) -> Broken | None:
    given = [
        f"{name.replace('_', ' ')} {ours} (model: {theirs})"
        for name, (ours, theirs) in line.other_sizes.items()
    ]
    if not given:
        return None
    return Broken(f"flags give {', '.join(given)}", "check --model; the flags' sizes are judged")


def _heads(line: Line) -> Broken | None:
    heads, tensor = line.sizes.heads, line.launch.tensor
    if heads % tensor == 0:
        return None
    return Broken(f"{heads} heads and TP {tensor}", "choose a TP that divides them")


def _groups(line: Line) -> Broken | None:
    groups, tensor = line.sizes.query_groups, line.launch.tensor
    if groups % tensor == 0 or tensor % groups == 0:
        return None
    return Broken(f"{groups} heads of k and v and TP {tensor}", "choose another TP")


def _linear_heads(line: Line) -> Broken | None:
    linear, tensor = line.sizes.linear, line.launch.tensor
    if linear is None or not (linear.key_heads % tensor or linear.value_heads % tensor):
        return None
    return Broken(
        f"{linear.key_heads} key and {linear.value_heads} value heads of the gated delta net and "
        f"TP {tensor}",
        "choose a TP that divides both",
    )


def _linear_context(line: Line) -> Broken | None:
    if line.sizes.linear is None or line.launch.context == 1:
        return None
    return Broken(f"a gated delta net and CP {line.launch.context}", "use CP 1, or a newer core")


def _sequence(line: Line) -> Broken | None:
    if not line.launch.sequence_parallel or line.launch.tensor > 1:
        return None
    return Broken("sequence parallelism with TP 1", "leave it out, or raise TP")


def _overlap(line: Line) -> Broken | None:
    launch = line.launch
    divides = launch.sequence_parallel and launch.tensor > 1
    if not line.on("tp-comm-overlap") or divides:
        return None
    return Broken(
        "overlapped tensor exchange without it", "give --sequence-parallel with TP above 1"
    )


def _deferred(line: Line) -> Broken | None:
    if not line.on("defer-embedding-wgrad-compute") or line.launch.pipeline > 1:
        return None
    return Broken("the embedding's gradient deferred with PP 1", "leave it out")


def _head_size(line: Line) -> Broken | None:
    sizes = line.sizes
    is_given = sizes.has_head_size or sizes.is_latent or "kv-channels" in line.flags
    if is_given or sizes.hidden % sizes.heads == 0:
        return None
    return Broken(f"hidden size {sizes.hidden} and {sizes.heads} heads", "give --kv-channels")


def _experts(line: Line) -> Broken | None:
    if line.launch.expert == 1 or line.sizes.experts:
        return None
    return Broken(f"EP {line.launch.expert} of a model without experts", "leave it out")


def _experts_divide(line: Line) -> Broken | None:
    experts, size = line.sizes.experts, line.launch.expert
    if experts % size == 0:
        return None
    return Broken(f"{experts} experts and EP {size}", "choose an EP that divides them")


def _experts_fp16(line: Line) -> Broken | None:
    if line.launch.expert == 1 or not line.on("fp16"):
        return None
    return Broken(f"EP {line.launch.expert} with fp16", "train in bf16")


def _experts_sequence(line: Line) -> Broken | None:
    launch = line.launch
    if launch.expert == 1 or launch.tensor == 1 or launch.sequence_parallel:
        return None
    return Broken(
        f"TP {launch.tensor} and EP {launch.expert} without it", "give --sequence-parallel"
    )


def _experts_spec(line: Line) -> Broken | None:
    if not line.sizes.experts or "num-experts" not in line.flags or "spec" not in line.flags:
        return None
    return Broken("--spec with --num-experts", "leave --spec out")


def _dispatcher(line: Line) -> str | None:
    given = line.text("moe-token-dispatcher-type")
    return given or _DISPATCHER.get(line.launch.launcher)


def _deep(line: Line) -> Broken | None:
    dispatcher = _dispatcher(line)
    if not line.on("moe-enable-deepep") or dispatcher in (None, "flex"):
        return None
    return Broken(
        f"--moe-enable-deepep with dispatcher {dispatcher}", "give --moe-token-dispatcher-type flex"
    )


def _flexible(line: Line) -> Broken | None:
    ranks = line.expert_tensor * line.launch.expert
    if line.text("moe-token-dispatcher-type") != "flex" or ranks > 1 or not line.sizes.experts:
        return None
    return Broken("dispatcher flex with ETP 1 and EP 1", "use alltoall, or raise EP")


def _shared_overlap(line: Line) -> Broken | None:
    dispatcher = _dispatcher(line)
    is_asked = line.on("moe-shared-expert-overlap") and line.sizes.has_shared_experts
    if not is_asked or dispatcher in (None, "alltoall"):
        return None
    return Broken(f"overlapped shared experts with dispatcher {dispatcher}", "use alltoall")


def _gathered(line: Line) -> Broken | None:
    if line.text("moe-token-dispatcher-type") != "allgather" or not line.sizes.experts:
        return None
    return Broken("dispatcher allgather", "use alltoall")


def _grouped(line: Line) -> Broken | None:
    if not line.on("moe-grouped-gemm") or line.on("bf16"):
        return None
    return Broken("--moe-grouped-gemm without --bf16", "give --bf16")


def _expert_overlap(line: Line) -> Broken | None:
    if not line.on("overlap-moe-expert-parallel-comm"):
        return None
    launch = line.launch
    against = {
        f"PP {launch.pipeline} without chunks": launch.pipeline > 1 and line.virtual is None,
        "EP 1": launch.expert == 1,
        f"dispatcher {_dispatcher(line)}": _dispatcher(line) not in (None, "alltoall", "flex"),
        "full recomputation": launch.recompute == "full",
        "overlapped shared experts": line.on("moe-shared-expert-overlap"),
        "several layers of multi-token prediction": (launch.prediction_layers or 0) > 1,
        "multi-token prediction with PP 1": launch.prediction_layers == 1 and launch.pipeline == 1,
    }
    given = [words for words, holds in against.items() if holds]
    if not given:
        return None
    return Broken(f"overlapped expert exchange with {', '.join(given)}", "leave one of them out")


def _delayed(line: Line) -> Broken | None:
    if not line.on("delay-wgrad-compute") or line.on("overlap-moe-expert-parallel-comm"):
        return None
    return Broken(
        "--delay-wgrad-compute without it",
        "give --overlap-moe-expert-parallel-comm, or leave it out",
    )


def _connections(line: Line) -> Broken | None:
    launch = line.launch
    given = launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    is_divided = launch.tensor > 1 or launch.context > 1
    is_sharded = line.on("use-torch-fsdp2") or line.on("use-megatron-fsdp")
    if not is_divided or is_sharded or given in (None, "1"):
        return None
    return Broken(f"CUDA_DEVICE_MAX_CONNECTIONS={given}", "set it to 1")


def _exchange_list(line: Line) -> Broken | None:
    kinds = words_of(line.text("cp-comm-type"))
    if line.launch.context == 1 or len(kinds) in (0, 1, line.sizes.layers):
        return None
    return Broken(f"{len(kinds)} words for {line.sizes.layers} layers", "give one, or one a layer")


def _rotary_sections(line: Line) -> Broken | None:
    if line.text("position-embedding-type") != "mrope" or "mrope-section" in line.flags:
        return None
    return Broken("--position-embedding-type mrope alone", "give --mrope-section")


def _prediction_positions(line: Line) -> Broken | None:
    kind = line.text("position-embedding-type")
    is_rotary = kind in (None, "rope", "none") or line.on("use-rotary-position-embeddings")
    if not line.launch.prediction_layers or is_rotary:
        return None
    return Broken(f"multi-token prediction with positions {kind}", "use rope or none")


MODEL_RULES = (
    Rule(
        name="sizes-are-the-models",
        holds="flags should give the sizes of the model that is named",
        source="this command, --model",
        broken=_other_sizes,
        severity="warning",
    ),
    Rule(
        name="heads-divide-tensor",
        holds="heads must be a multiple of the tensor size",
        source=f"{_CONFIG}:924, {CORE}",
        broken=_heads,
    ),
    Rule(
        name="query-groups-divide-tensor",
        holds="heads of k and v must be a multiple or a divisor of the tensor size",
        source=f"{_CONFIG}:939, {CORE}",
        broken=_groups,
    ),
    Rule(
        name="delta-heads-divide-tensor",
        holds="both must be multiples of the tensor size",
        source=f"{_CONFIG}:975-980, {CORE}",
        broken=_linear_heads,
    ),
    Rule(
        name="delta-net-without-context",
        holds="this core's gated delta net cannot be divided over context ranks",
        source=f"{_CONFIG}:983, {CORE}",
        broken=_linear_context,
        launchers=_MEGATRON_LM,
    ),
    Rule(
        name="delta-net-and-core",
        holds="core 0.16.1 refuses this and newer ones do not",
        source=f"{_CONFIG}:983, {CORE}",
        broken=_linear_context,
        severity="warning",
        launchers=frozenset((Launcher.MEGATRON_BRIDGE, Launcher.LOONGFORGE)),
    ),
    Rule(
        name="sequence-needs-tensor",
        holds="sequence parallelism needs tensor parallelism",
        source=f"{_PARALLEL}:409, {CORE}",
        broken=_sequence,
        launchers=frozenset((Launcher.MEGATRON_BRIDGE,)),
    ),
    Rule(
        name="sequence-dropped",
        holds="sequence parallelism is switched off without tensor parallelism",
        source=f"{_VALIDATE}; megatron_args.py:943, {SWIFT}",
        broken=_sequence,
        severity="ignored",
        launchers=ARGPARSE | {Launcher.MS_SWIFT},
    ),
    Rule(
        name="tensor-overlap-needs-sequence",
        holds="tensor exchange is overlapped only with sequence parallelism",
        source=f"{_VALIDATE}; megatron_args.py:949, {SWIFT}",
        broken=_overlap,
    ),
    Rule(
        name="deferred-embedding-needs-stages",
        holds="the embedding's gradient is deferred only in a pipeline",
        source=f"{_PARALLEL}:425, {CORE}",
        broken=_deferred,
    ),
    Rule(
        name="hidden-divides-heads",
        holds="the hidden size must be a multiple of the heads, or a head's size given",
        source=_VALIDATE,
        broken=_head_size,
        launchers=_MEGATRON_LM,
    ),
    Rule(
        name="expert-size-needs-experts",
        holds="expert parallelism needs experts",
        source=f"{_CONFIG}:1048, {CORE}",
        broken=_experts,
    ),
    Rule(
        name="experts-divide",
        holds="experts must be a multiple of the expert size",
        source=f"core/transformer/moe/moe_layer.py:101, {CORE}",
        broken=_experts_divide,
    ),
    Rule(
        name="experts-not-fp16",
        holds="expert parallelism does not train in fp16",
        source=_VALIDATE,
        broken=_experts_fp16,
        launchers=ARGPARSE,
    ),
    Rule(
        name="experts-want-sequence",
        holds="tensor and expert parallelism should train with sequence parallelism",
        source=f"{_PARALLEL}:440, {CORE}",
        broken=_experts_sequence,
        severity="warning",
    ),
    Rule(
        name="experts-without-spec",
        holds="experts exclude a model's own specification",
        source=_VALIDATE,
        broken=_experts_spec,
        launchers=ARGPARSE,
    ),
    Rule(
        name="deepep-needs-flex",
        holds="DeepEP needs the dispatcher flex",
        source=f"{_CONFIG}:1063, {CORE}",
        broken=_deep,
    ),
    Rule(
        name="flex-needs-ranks",
        holds="the dispatcher flex needs several ranks",
        source=f"core/transformer/moe/token_dispatcher.py:1346, {CORE}",
        broken=_flexible,
    ),
    Rule(
        name="shared-overlap-needs-alltoall",
        holds="shared experts are overlapped only with the dispatcher alltoall",
        source=f"{_CONFIG}:1090, {CORE}",
        broken=_shared_overlap,
    ),
    Rule(
        name="lengths-need-alltoall",
        holds="packs of different lengths need the dispatcher alltoall or flex",
        source=f"{_CONFIG}:1827, {CORE}",
        broken=_gathered,
        launchers=frozenset((Launcher.MS_SWIFT,)),
    ),
    Rule(
        name="grouped-products-need-bf16",
        holds="grouped products of experts are in bf16",
        source=_VALIDATE,
        broken=_grouped,
        launchers=_MEGATRON_LM,
    ),
    Rule(
        name="expert-overlap-allows",
        holds="overlapped expert exchange needs EP, chunks where there are stages, alltoall or "
        "flex, and no full recomputation",
        source=f"{_CONFIG}:1852-1896, {CORE}",
        broken=_expert_overlap,
    ),
    Rule(
        name="delayed-gradients-need-overlap",
        holds="weight gradients are delayed only with overlapped expert exchange",
        source=f"{_CONFIG}:1909, {CORE}",
        broken=_delayed,
    ),
    Rule(
        name="one-connection",
        holds="before Blackwell, TP or CP above 1 needs one connection a device",
        source=_VALIDATE,
        broken=_connections,
        severity="warning",
        launchers=ARGPARSE,
    ),
    Rule(
        name="context-exchange-for-layers",
        holds="a list of context exchanges has a word for every layer",
        source=f"{_CONFIG}:1928, {CORE}",
        broken=_exchange_list,
    ),
    Rule(
        name="rotary-sections",
        holds="rotary positions of several axes need their sections",
        source=_VALIDATE,
        broken=_rotary_sections,
        launchers=_MEGATRON_LM,
    ),
    Rule(
        name="prediction-positions",
        holds="multi-token prediction needs rotary positions or none",
        source=_VALIDATE,
        broken=_prediction_positions,
        launchers=_MEGATRON_LM,
    ),
)

"""Rules of how tensor, sequence, context and expert ranks divide the model."""

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, SWIFT, VALIDATE_ARGS, Problems, RuleGroup, true_of

RULES = RuleGroup("Tensor, sequence, context and expert ranks")
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_PARALLEL = "core/model_parallel_config.py"
_MEGATRON_LM = frozenset((Launcher.MEGATRON_LM,))
_OF_RECIPES = frozenset((Launcher.MEGATRON_BRIDGE,))
_DISPATCHER = {Launcher.MEGATRON_LM: "allgather", Launcher.MS_SWIFT: "alltoall"}
"""How tokens travel to experts by default; recipes of Megatron-Bridge and configurations of
LoongForge have their own."""


def _dispatcher(line: Line) -> str | None:
    return line.text("moe-token-dispatcher-type") or _DISPATCHER.get(line.launch.launcher)


@rule("this command, --model", severity="warning")
def sizes_are_the_models(line: Line) -> Problems:
    """Flags should give the sizes of the model that is named."""
    given = [
        f"{name.replace('_', ' ')} {ours} (model: {theirs})"
        for name, (ours, theirs) in line.other_sizes.items()
    ]
    if given:
        yield f"flags give {', '.join(given)}", "check --model; the flags' sizes are judged"


@core_config("924")
def heads_divide_tensor(line: Line) -> Problems:
    """Heads must be a multiple of the tensor size."""
    heads, tensor = line.sizes.heads, line.launch.tensor
    if heads % tensor:
        yield f"{heads} heads and TP {tensor}", "choose a TP that divides them"


@core_config("939")
def query_groups_divide_tensor(line: Line) -> Problems:
    """Heads of k and v must be a multiple or a divisor of the tensor size."""
    groups, tensor = line.sizes.query_groups, line.launch.tensor
    if groups % tensor and tensor % groups:
        yield f"{groups} heads of k and v and TP {tensor}", "choose another TP"


@core_config("975-980")
def delta_heads_divide_tensor(line: Line) -> Problems:
    """Both must be multiples of the tensor size."""
    linear, tensor = line.sizes.linear, line.launch.tensor
    if linear is not None and (linear.key_heads % tensor or linear.value_heads % tensor):
        heads = f"{linear.key_heads} key and {linear.value_heads} value heads"
        yield f"{heads} of the gated delta net and TP {tensor}", "choose a TP that divides both"


def _linear_context(line: Line) -> Problems:
    if line.sizes.linear is not None and line.launch.context > 1:
        yield f"a gated delta net and CP {line.launch.context}", "use CP 1, or a newer core"


@core_config("983", launchers=_MEGATRON_LM)
def delta_net_without_context(line: Line) -> Problems:
    """This core's gated delta net cannot be divided over context ranks."""
    return _linear_context(line)


@core_config("983", severity="warning", launchers=_OF_RECIPES | {Launcher.LOONGFORGE})
def delta_net_and_core(line: Line) -> Problems:
    """Core 0.16.1 refuses this and newer ones do not."""
    return _linear_context(line)


def _sequence(line: Line) -> Problems:
    if line.launch.sequence_parallel and line.launch.tensor == 1:
        yield "sequence parallelism with TP 1", "leave it out, or raise TP"


@rule(f"{_PARALLEL}:409, {CORE}", launchers=_OF_RECIPES)
def sequence_needs_tensor(line: Line) -> Problems:
    """Sequence parallelism needs tensor parallelism."""
    return _sequence(line)


@rule(
    f"{VALIDATE_ARGS}; megatron_args.py:943, {SWIFT}",
    severity="ignored",
    launchers=ARGPARSE | {Launcher.MS_SWIFT},
)
def sequence_dropped(line: Line) -> Problems:
    """Sequence parallelism is switched off without tensor parallelism."""
    return _sequence(line)


@rule(f"{VALIDATE_ARGS}; megatron_args.py:949, {SWIFT}")
def tensor_overlap_needs_sequence(line: Line) -> Problems:
    """Tensor exchange is overlapped only with sequence parallelism."""
    if line.on("tp-comm-overlap") and not line.is_sequence_parallel:
        yield "overlapped tensor exchange without it", "give --sequence-parallel with TP above 1"


@rule(f"{_PARALLEL}:425, {CORE}")
def deferred_embedding_needs_stages(line: Line) -> Problems:
    """The embedding's gradient is deferred only in a pipeline."""
    if line.on("defer-embedding-wgrad-compute") and line.launch.pipeline == 1:
        yield "the embedding's gradient deferred with PP 1", "leave it out"


@validate_args(launchers=_MEGATRON_LM)
def hidden_divides_heads(line: Line) -> Problems:
    """The hidden size must be a multiple of the heads, or a head's size given."""
    sizes = line.sizes
    is_given = sizes.has_head_size or sizes.is_latent or "kv-channels" in line.flags
    if not is_given and sizes.hidden % sizes.heads:
        yield f"hidden size {sizes.hidden} and {sizes.heads} heads", "give --kv-channels"


@core_config("1048")
def expert_size_needs_experts(line: Line) -> Problems:
    """Expert parallelism needs experts."""
    if line.launch.expert > 1 and not line.sizes.experts:
        yield f"EP {line.launch.expert} of a model without experts", "leave it out"


@rule(f"core/transformer/moe/moe_layer.py:101, {CORE}")
def experts_divide(line: Line) -> Problems:
    """Experts must be a multiple of the expert size."""
    experts, size = line.sizes.experts, line.launch.expert
    if experts % size:
        yield f"{experts} experts and EP {size}", "choose an EP that divides them"


@validate_args()
def experts_not_fp16(line: Line) -> Problems:
    """Expert parallelism does not train in fp16."""
    if line.launch.expert > 1 and line.on("fp16"):
        yield f"EP {line.launch.expert} with fp16", "train in bf16"


@rule(f"{_PARALLEL}:440, {CORE}", severity="warning")
def experts_want_sequence(line: Line) -> Problems:
    """Tensor and expert parallelism should train with sequence parallelism."""
    launch = line.launch
    if launch.expert > 1 and launch.tensor > 1 and not launch.sequence_parallel:
        given = f"TP {launch.tensor} and EP {launch.expert} without it"
        yield given, "give --sequence-parallel"


@validate_args()
def experts_without_spec(line: Line) -> Problems:
    """Experts exclude a model's own specification."""
    if line.sizes.experts and {"num-experts", "spec"} <= line.flags.keys():
        yield "--spec with --num-experts", "leave --spec out"


@core_config("1063")
def deepep_needs_flex(line: Line) -> Problems:
    """DeepEP needs the dispatcher flex."""
    dispatcher, flag = _dispatcher(line), "moe-enable-deepep"
    if line.on(flag) and dispatcher not in (None, "flex"):
        yield f"--{flag} with dispatcher {dispatcher}", "give --moe-token-dispatcher-type flex"


@rule(f"core/transformer/moe/token_dispatcher.py:1346, {CORE}")
def flex_needs_ranks(line: Line) -> Problems:
    """The dispatcher flex needs several ranks."""
    is_alone = line.expert_tensor * line.launch.expert == 1
    if line.sizes.experts and is_alone and line.text("moe-token-dispatcher-type") == "flex":
        yield "dispatcher flex with ETP 1 and EP 1", "use alltoall, or raise EP"


@core_config("1090")
def shared_overlap_needs_alltoall(line: Line) -> Problems:
    """Shared experts are overlapped only with the dispatcher alltoall."""
    dispatcher = _dispatcher(line)
    is_asked = line.on("moe-shared-expert-overlap") and line.sizes.has_shared_experts
    if is_asked and dispatcher not in (None, "alltoall"):
        yield f"overlapped shared experts with dispatcher {dispatcher}", "use alltoall"


@core_config("1827", launchers=frozenset((Launcher.MS_SWIFT,)))
def lengths_need_alltoall(line: Line) -> Problems:
    """Packs of different lengths need the dispatcher alltoall or flex."""
    if line.sizes.experts and line.text("moe-token-dispatcher-type") == "allgather":
        yield "dispatcher allgather", "use alltoall"


@validate_args(launchers=_MEGATRON_LM)
def grouped_products_need_bf16(line: Line) -> Problems:
    """Grouped products of experts are in bf16."""
    if line.on("moe-grouped-gemm") and not line.on("bf16"):
        yield "--moe-grouped-gemm without --bf16", "give --bf16"


@core_config("1852-1896")
def expert_overlap_allows(line: Line) -> Problems:
    """Overlapped expert exchange needs EP, chunks where there are stages, alltoall or flex, and no
    full recomputation."""
    launch, dispatcher = line.launch, _dispatcher(line)
    against = {
        f"PP {launch.pipeline} without chunks": launch.pipeline > 1 and line.virtual is None,
        "EP 1": launch.expert == 1,
        f"dispatcher {dispatcher}": dispatcher not in (None, "alltoall", "flex"),
        "full recomputation": launch.recompute == "full",
        "overlapped shared experts": line.on("moe-shared-expert-overlap"),
        "several layers of multi-token prediction": (launch.prediction_layers or 0) > 1,
        "multi-token prediction with PP 1": launch.prediction_layers == 1 and launch.pipeline == 1,
    }
    if line.on("overlap-moe-expert-parallel-comm") and any(against.values()):
        given = f"overlapped expert exchange with {', '.join(true_of(against))}"
        yield given, "leave one of them out"


@core_config("1909")
def delayed_gradients_need_overlap(line: Line) -> Problems:
    """Weight gradients are delayed only with overlapped expert exchange."""
    overlap = "overlap-moe-expert-parallel-comm"
    if line.on("delay-wgrad-compute") and not line.on(overlap):
        yield "--delay-wgrad-compute without it", f"give --{overlap}, or leave it out"


@validate_args(severity="warning")
def one_connection(line: Line) -> Problems:
    """Before Blackwell, TP or CP above 1 needs one connection a device."""
    given = line.launch.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    is_divided = line.launch.tensor > 1 or line.launch.context > 1
    is_sharded = line.on("use-torch-fsdp2") or line.on("use-megatron-fsdp")
    if is_divided and not is_sharded and given not in (None, "1"):
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={given}", "set it to 1"


@core_config("1928")
def context_exchange_for_layers(line: Line) -> Problems:
    """A list of context exchanges has a word for every layer."""
    count, layers = len(line.exchanges), line.sizes.layers
    if line.launch.context > 1 and count not in (1, layers):
        yield f"{count} words for {layers} layers", "give one, or one a layer"


@validate_args(launchers=_MEGATRON_LM)
def rotary_sections(line: Line) -> Problems:
    """Rotary positions of several axes need their sections."""
    if line.text("position-embedding-type") == "mrope" and "mrope-section" not in line.flags:
        yield "--position-embedding-type mrope alone", "give --mrope-section"


@validate_args(launchers=_MEGATRON_LM)
def prediction_positions(line: Line) -> Problems:
    """Multi-token prediction needs rotary positions or none."""
    kind = line.text("position-embedding-type")
    is_rotary = kind in (None, "rope", "none") or line.on("use-rotary-position-embeddings")
    if line.launch.prediction_layers and not is_rotary:
        yield f"multi-token prediction with positions {kind}", "use rope or none"

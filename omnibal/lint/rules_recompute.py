"""Rules of recomputation and offloading."""

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, MEGATRON_LM, SWIFT, Broken, Rule

_CONFIG = "core/transformer/transformer_config.py"
_BLOCK = "core/transformer/transformer_block.py"
_VALIDATE = f"training/arguments.py, validate_args, {MEGATRON_LM}"
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def _words(line: Line) -> Broken | None:
    granularity, method = (line.text(f"recompute-{name}") for name in ("granularity", "method"))
    if granularity not in (None, "full", "selective"):
        return Broken(f"recompute granularity {granularity}", "use full or selective")
    if method not in (None, "block", "uniform"):
        return Broken(f"recompute method {method}", "use block or uniform")
    return None


def _method(line: Line) -> Broken | None:
    if line.launch.recompute != "full" or line.text("recompute-method") is not None:
        return None
    return Broken("full recomputation without a method", "give block or uniform")


def _number(line: Line) -> Broken | None:
    launch = line.launch
    has_number = launch.recompute_layers is not None or launch.recompute_by_stage is not None
    if launch.recompute != "full" or has_number:
        return None
    return Broken("full recomputation without a number of layers", "give --recompute-num-layers")


def _positive(line: Line) -> Broken | None:
    launch = line.launch
    number = launch.recompute_layers
    if launch.recompute != "full" or number is None or number > 0:
        return None
    if launch.recompute_method == "block":
        return None
    return Broken(f"uniform recomputation of {number} layers at a time", "use 1 or more")


def _none(line: Line) -> Broken | None:
    launch = line.launch
    number = launch.recompute_layers
    if launch.recompute != "full" or launch.recompute_method != "block" or number is None:
        return None
    if number > 0 or launch.recompute_by_stage is not None:
        return None
    return Broken(
        f"block recomputation of {number} layers", "give 1 or more, or leave recomputation out"
    )


def _selective_number(line: Line) -> Broken | None:
    launch = line.launch
    if launch.recompute != "selective" or launch.recompute_layers is None:
        return None
    return Broken(
        f"selective recomputation with a number of layers, {launch.recompute_layers}",
        "leave the number out, or recompute whole layers with full",
    )


def _selective_method(line: Line) -> Broken | None:
    method = line.text("recompute-method")
    if line.launch.recompute != "selective" or method is None:
        return None
    return Broken(
        f"selective recomputation with method {method}",
        "leave the method out, or recompute whole layers with full",
    )


def _distributed(line: Line) -> Broken | None:
    if not line.on("distribute-saved-activations"):
        return None
    launch = line.launch
    if launch.sequence_parallel and launch.tensor > 1:
        return Broken("both are given", "leave one of them out")
    return None


def _distributed_full(line: Line) -> Broken | None:
    launch = line.launch
    if not line.on("distribute-saved-activations"):
        return None
    if launch.tensor > 1 and launch.recompute == "full" and launch.recompute_method is not None:
        return None
    return Broken(
        f"--distribute-saved-activations with TP {launch.tensor} and granularity "
        f"{launch.recompute or 'not given'}",
        "leave it out, or recompute whole layers",
    )


def _modules(line: Line) -> tuple[str, ...]:
    return line.launch.recompute_modules if line.launch.recompute == "selective" else ()


def _known_modules(line: Line) -> Broken | None:
    wrong = [module for module in _modules(line) if module not in _MODULES]
    if not wrong:
        return None
    return Broken(f"modules {', '.join(wrong)}", f"choose of {', '.join(_MODULES)}")


def _grouped(line: Line) -> Broken | None:
    if "moe_act" not in _modules(line) or line.on("moe-grouped-gemm"):
        return None
    return Broken("module moe_act without grouped products", "give --moe-grouped-gemm")


def _latent(line: Line) -> Broken | None:
    if "mla_up_proj" not in _modules(line) or line.sizes.is_latent:
        return None
    return Broken("module mla_up_proj of a model without latent attention", "leave it out")


def _shared(line: Line) -> Broken | None:
    both = "shared_experts" in _modules(line) and line.on("moe-shared-expert-overlap")
    if not both or not line.sizes.has_shared_experts:
        return None
    return Broken("both are given", "leave one of them out")


def _delayed(line: Line) -> Broken | None:
    recipe = line.text("fp8-recipe") or "delayed"
    wrong = [module for module in _modules(line) if module in ("moe_act", "layernorm")]
    if not wrong or recipe != "delayed" or line.text("fp8-format") is None:
        return None
    return Broken(f"modules {', '.join(wrong)} with fp8 recipe delayed", "use another recipe")


def _layer_flag(line: Line) -> Broken | None:
    if not line.on("moe-layer-recompute") or line.launch.recompute != "full":
        return None
    return Broken("--moe-layer-recompute with full recomputation", "leave it out")


def _offloading(line: Line) -> Broken | None:
    number, launch = line.number("cpu-offloading-num-layers"), line.launch
    if not (number or line.on("cpu-offloading")):
        return None
    if launch.recompute is not None or launch.pipeline > 1:
        return Broken(
            f"activations offloaded with PP {launch.pipeline} and recomputation "
            f"{launch.recompute or 'not given'}",
            "leave the offloading out, or use one stage and no recomputation",
        )
    if number is not None and not 0 <= number < line.sizes.layers:
        return Broken(f"{number} of {line.sizes.layers} layers offloaded", "offload fewer")
    return None


def _graphs(line: Line) -> Broken | None:
    graphs = line.text("cuda-graph-impl") or "none"
    is_whole = line.text("cuda-graph-scope") == "full_iteration"
    if line.launch.recompute != "full" or graphs == "none" or is_whole:
        return None
    return Broken(f"full recomputation with CUDA graphs ({graphs})", "leave one of them out")


def _prediction(line: Line) -> Broken | None:
    launch = line.launch
    number = launch.recompute_layers
    is_uniform = launch.recompute == "full" and launch.recompute_method == "uniform"
    if not launch.prediction_layers or not is_uniform or number in (None, 1):
        return None
    return Broken(
        f"uniform recomputation of {number} layers at a time with multi-token prediction",
        "use 1, or block",
    )


def _beyond(line: Line) -> Broken | None:
    launch = line.launch
    number = launch.recompute_layers
    if launch.recompute_method != "block" or number is None or launch.recompute_by_stage:
        return None
    most = -(-line.sizes.layers // launch.pipeline // (line.virtual or 1))
    if not line.is_plain or number <= most:
        return None
    return Broken(
        f"{number} recomputed layers for chunks of at most {most}",
        f"give {most}, which is the same",
    )


RECOMPUTE_RULES = (
    Rule(
        name="recompute-words",
        holds="granularity is full or selective, and the method block or uniform",
        source=f"{_CONFIG}:1155-1161, {CORE}",
        broken=_words,
        launchers=frozenset(Launcher) - {Launcher.MS_SWIFT},
    ),
    Rule(
        name="recompute-needs-method",
        holds="whole layers are recomputed by a method",
        source=f"{_CONFIG}:1166, {CORE}",
        broken=_method,
    ),
    Rule(
        name="recompute-needs-number",
        holds="recomputation of whole layers needs a number of them",
        source=f"{_CONFIG}:1172, {CORE}",
        broken=_number,
    ),
    Rule(
        name="recompute-number-positive",
        holds="the loop over a stage's layers goes on by that number, and never ends with none",
        source=f"{_BLOCK}:532, {CORE}",
        broken=_positive,
        severity="refused-at-first-step",
    ),
    Rule(
        name="recompute-recomputes",
        holds="a stage recomputes layers whose index is below the number, so that 0 or less "
        "recomputes none",
        source=f"{_BLOCK}:560-570, {CORE}",
        broken=_none,
        severity="ignored",
    ),
    Rule(
        name="selective-without-number",
        holds="a number of layers is for full recomputation",
        source=f"{_CONFIG}:1179, {CORE}",
        broken=_selective_number,
    ),
    Rule(
        name="selective-without-method",
        holds="a method is for full recomputation",
        source=f"{_VALIDATE}; megatron_args.py:849, {SWIFT}",
        broken=_selective_method,
        launchers=ARGPARSE | {Launcher.MS_SWIFT},
    ),
    Rule(
        name="saved-activations-or-sequence",
        holds="saved activations are divided by --distribute-saved-activations or by sequence "
        "parallelism",
        source=f"{_CONFIG}:1187, {CORE}",
        broken=_distributed,
    ),
    Rule(
        name="saved-activations-of-layers",
        holds="saved activations are divided with tensor parallelism and full recomputation",
        source=_VALIDATE,
        broken=_distributed_full,
        launchers=ARGPARSE,
    ),
    Rule(
        name="recompute-modules-known",
        holds="modules must be those that can be recomputed",
        source=f"{_CONFIG}:1196-1211, {CORE}",
        broken=_known_modules,
    ),
    Rule(
        name="recompute-moe-act",
        holds="the experts' activation is recomputed with grouped products",
        source=f"{_CONFIG}:1213, {CORE}",
        broken=_grouped,
        launchers=frozenset((Launcher.MEGATRON_LM,)),
    ),
    Rule(
        name="recompute-latent",
        holds="mla_up_proj is of multi-latent attention",
        source=f"{_CONFIG}:1218, {CORE}",
        broken=_latent,
    ),
    Rule(
        name="recompute-shared-experts",
        holds="shared experts are recomputed or overlapped",
        source=f"{_CONFIG}:1232, {CORE}",
        broken=_shared,
    ),
    Rule(
        name="recompute-with-fp8",
        holds="delayed scaling cannot recompute these modules",
        source=f"{_CONFIG}:1241, {CORE}",
        broken=_delayed,
        launchers=ARGPARSE | {Launcher.MS_SWIFT},
    ),
    Rule(
        name="expert-layers-or-all",
        holds="expert layers are recomputed by themselves or with all others",
        source=f"{_CONFIG}:1260, {CORE}",
        broken=_layer_flag,
    ),
    Rule(
        name="offloading-alone",
        holds="activations are offloaded in one stage, without recomputation, not of all layers",
        source=f"{_CONFIG}:1137-1149, {CORE}",
        broken=_offloading,
    ),
    Rule(
        name="recompute-or-graphs",
        holds="full recomputation needs CUDA graphs of whole iterations, or none",
        source=f"{_CONFIG}:1781, {CORE}",
        broken=_graphs,
    ),
    Rule(
        name="prediction-recompute",
        holds="multi-token prediction is recomputed one layer at a time",
        source=f"core/transformer/multi_token_prediction.py:846, {CORE}",
        broken=_prediction,
        severity="refused-at-first-step",
    ),
    Rule(
        name="recompute-within-stage",
        holds="a stage recomputes no more layers than it has",
        source=f"{_BLOCK}:532-560, {CORE}",
        broken=_beyond,
        severity="warning",
    ),
)

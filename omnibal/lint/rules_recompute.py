"""Rules of recomputation and offloading."""

from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import CORE, SWIFT, VALIDATE_ARGS, Problems, RuleGroup

RULES = RuleGroup("Recomputation")
rule, core_config, validate_args = RULES.rule, RULES.core_config, RULES.validate_args
_BLOCK = "core/transformer/transformer_block.py"
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


@core_config(
    "recompute-words",
    "1155-1161",
    holds="granularity is full or selective, and the method block or uniform",
    launchers=frozenset(Launcher) - {Launcher.MS_SWIFT},
)
def _words(line: Line) -> Problems:
    granularity, method = (line.text(f"recompute-{name}") for name in ("granularity", "method"))
    if granularity not in (None, "full", "selective"):
        yield f"recompute granularity {granularity}", "use full or selective"
    if method not in (None, "block", "uniform"):
        yield f"recompute method {method}", "use block or uniform"


@core_config("recompute-needs-method", "1166", holds="whole layers are recomputed by a method")
def _method(line: Line) -> Problems:
    if line.launch.recompute == "full" and line.text("recompute-method") is None:
        yield "full recomputation without a method", "give block or uniform"


@core_config(
    "recompute-needs-number", "1172", holds="recomputation of whole layers needs a number of them"
)
def _number(line: Line) -> Problems:
    launch = line.launch
    has_number = launch.recompute_layers is not None or launch.recompute_by_stage is not None
    if launch.recompute == "full" and not has_number:
        yield "full recomputation without a number of layers", "give --recompute-num-layers"


@rule(
    "recompute-number-positive",
    holds="the loop over a stage's layers goes on by that number, and never ends with none",
    source=f"{_BLOCK}:532, {CORE}",
    severity="refused-at-first-step",
)
def _positive(line: Line) -> Problems:
    launch, number = line.launch, line.launch.recompute_layers
    if launch.recompute != "full" or launch.recompute_method == "block":
        return
    if number is not None and number <= 0:
        yield f"uniform recomputation of {number} layers at a time", "use 1 or more"


@rule(
    "recompute-recomputes",
    holds="a stage recomputes layers whose index is below the number, so that 0 or less recomputes "
    "none",
    source=f"{_BLOCK}:560-570, {CORE}",
    severity="ignored",
)
def _none(line: Line) -> Problems:
    launch, number = line.launch, line.launch.recompute_layers
    is_block = launch.recompute == "full" and launch.recompute_method == "block"
    if is_block and number is not None and number <= 0 and launch.recompute_by_stage is None:
        given = f"block recomputation of {number} layers"
        yield given, "give 1 or more, or leave recomputation out"


@core_config(
    "selective-without-number", "1179", holds="a number of layers is for full recomputation"
)
def _selective_number(line: Line) -> Problems:
    number = line.launch.recompute_layers
    if line.launch.recompute == "selective" and number is not None:
        change = "leave the number out, or recompute whole layers with full"
        yield f"selective recomputation with a number of layers, {number}", change


@rule(
    "selective-without-method",
    holds="a method is for full recomputation",
    source=f"{VALIDATE_ARGS}; megatron_args.py:849, {SWIFT}",
    launchers=ARGPARSE | {Launcher.MS_SWIFT},
)
def _selective_method(line: Line) -> Problems:
    method = line.text("recompute-method")
    if line.launch.recompute == "selective" and method is not None:
        change = "leave the method out, or recompute whole layers with full"
        yield f"selective recomputation with method {method}", change


@core_config(
    "saved-activations-or-sequence",
    "1187",
    holds="saved activations are divided by --distribute-saved-activations or by sequence "
    "parallelism",
)
def _distributed(line: Line) -> Problems:
    if line.on("distribute-saved-activations") and line.is_sequence_parallel:
        yield "both are given", "leave one of them out"


@validate_args(
    "saved-activations-of-layers",
    holds="saved activations are divided with tensor parallelism and full recomputation",
)
def _distributed_full(line: Line) -> Problems:
    launch, flag = line.launch, "distribute-saved-activations"
    is_full = launch.recompute == "full" and launch.recompute_method is not None
    if line.on(flag) and not (launch.tensor > 1 and is_full):
        yield (
            f"--{flag} with TP {launch.tensor} and granularity {launch.recompute or 'not given'}",
            "leave it out, or recompute whole layers",
        )


def _modules(line: Line, *names: str) -> list[str]:
    """Modules that are recomputed selectively, of those named, or all."""
    modules = line.launch.recompute_modules if line.launch.recompute == "selective" else ()
    return [module for module in modules if not names or module in names]


@core_config(
    "recompute-modules-known", "1196-1211", holds="modules must be those that can be recomputed"
)
def _known_modules(line: Line) -> Problems:
    wrong = [module for module in _modules(line) if module not in _MODULES]
    if wrong:
        yield f"modules {', '.join(wrong)}", f"choose of {', '.join(_MODULES)}"


@core_config(
    "recompute-moe-act",
    "1213",
    holds="the experts' activation is recomputed with grouped products",
    launchers=frozenset((Launcher.MEGATRON_LM,)),
)
def _grouped(line: Line) -> Problems:
    if _modules(line, "moe_act") and not line.on("moe-grouped-gemm"):
        yield "module moe_act without grouped products", "give --moe-grouped-gemm"


@core_config("recompute-latent", "1218", holds="mla_up_proj is of multi-latent attention")
def _latent(line: Line) -> Problems:
    if _modules(line, "mla_up_proj") and not line.sizes.is_latent:
        yield "module mla_up_proj of a model without latent attention", "leave it out"


@core_config(
    "recompute-shared-experts", "1232", holds="shared experts are recomputed or overlapped"
)
def _shared(line: Line) -> Problems:
    is_overlapped = line.sizes.has_shared_experts and line.on("moe-shared-expert-overlap")
    if _modules(line, "shared_experts") and is_overlapped:
        yield "both are given", "leave one of them out"


@core_config(
    "recompute-with-fp8",
    "1241",
    holds="delayed scaling cannot recompute these modules",
    launchers=ARGPARSE | {Launcher.MS_SWIFT},
)
def _delayed(line: Line) -> Problems:
    wrong = _modules(line, "moe_act", "layernorm")
    if wrong and line.has_delayed_scaling:
        yield f"modules {', '.join(wrong)} with fp8 recipe delayed", "use another recipe"


@core_config(
    "expert-layers-or-all",
    "1260",
    holds="expert layers are recomputed by themselves or with all others",
)
def _layer_flag(line: Line) -> Problems:
    if line.on("moe-layer-recompute") and line.launch.recompute == "full":
        yield "--moe-layer-recompute with full recomputation", "leave it out"


@core_config(
    "offloading-alone",
    "1137-1149",
    holds="activations are offloaded in one stage, without recomputation, not of all layers",
)
def _offloading(line: Line) -> Problems:
    number, launch = line.number("cpu-offloading-num-layers"), line.launch
    if not number and not line.on("cpu-offloading"):
        return
    if launch.recompute is not None or launch.pipeline > 1:
        given = f"PP {launch.pipeline} and recomputation {launch.recompute or 'not given'}"
        change = "leave the offloading out, or use one stage and no recomputation"
        yield f"activations offloaded with {given}", change
    if number is not None and not 0 <= number < line.sizes.layers:
        yield f"{number} of {line.sizes.layers} layers offloaded", "offload fewer"


@core_config(
    "recompute-or-graphs",
    "1781",
    holds="full recomputation needs CUDA graphs of whole iterations, or none",
)
def _graphs(line: Line) -> Problems:
    graphs = line.text("cuda-graph-impl") or "none"
    is_whole = line.text("cuda-graph-scope") == "full_iteration"
    if line.launch.recompute == "full" and graphs != "none" and not is_whole:
        yield f"full recomputation with CUDA graphs ({graphs})", "leave one of them out"


@rule(
    "prediction-recompute",
    holds="multi-token prediction is recomputed one layer at a time",
    source=f"core/transformer/multi_token_prediction.py:846, {CORE}",
    severity="refused-at-first-step",
)
def _prediction(line: Line) -> Problems:
    launch, number = line.launch, line.launch.recompute_layers
    is_uniform = launch.recompute == "full" and launch.recompute_method == "uniform"
    if launch.prediction_layers and is_uniform and number not in (None, 1):
        yield (
            f"uniform recomputation of {number} layers at a time with multi-token prediction",
            "use 1, or block",
        )


@rule(
    "recompute-within-stage",
    holds="a stage recomputes no more layers than it has",
    source=f"{_BLOCK}:532-560, {CORE}",
    severity="warning",
)
def _beyond(line: Line) -> Problems:
    launch, number = line.launch, line.launch.recompute_layers
    most = -(-line.sizes.layers // launch.pipeline // (line.virtual or 1))
    is_block = launch.recompute_method == "block" and not launch.recompute_by_stage
    if is_block and line.is_plain and number is not None and number > most:
        given = f"{number} recomputed layers for chunks of at most {most}"
        yield given, f"give {most}, which is the same"

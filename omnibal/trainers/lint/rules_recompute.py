"""Rules of recomputation."""

from typing import get_args

from omnibal.model.runtime import RecomputedModule
from omnibal.trainers.lint.flags import flag_of
from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Launcher
from omnibal.trainers.lint.line import LaunchLine
from omnibal.trainers.lint.rule import BLOCK, CORE, SWIFT, VALIDATE_ARGS, Problems, Rules

RULES = Rules()
rule, core_config = RULES.rule, RULES.core_config
_MODULES = ("core_attn", *get_args(RecomputedModule))


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
        given = f"block recomputation of {number} layers"
        yield given, "give 1 or more, or leave recomputation out"


@core_config("1179")
def selective_without_number(line: LaunchLine) -> Problems:
    """A number of layers is for full recomputation."""
    number = line.launch.recompute_layers
    if line.launch.recompute == "selective" and number is not None:
        change = "leave the number out, or use full"
        yield f"selective recomputation with a number of layers, {number}", change


@rule(f"{VALIDATE_ARGS}; megatron_args.py:849, {SWIFT}", launchers=ARGPARSE | {Launcher.MS_SWIFT})
def selective_without_method(line: LaunchLine) -> Problems:
    """A method is for full recomputation."""
    method = line.text("recompute-method")
    if line.launch.recompute == "selective" and method is not None:
        change = "leave the method out, or use full"
        yield f"selective recomputation with method {method}", change


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
        given = f"{number} recomputed layers for chunks of at most {limit}"
        yield given, f"give {limit}, which is the same"

"""Rules of launch lines by stable name: source of the check, severity and trainers."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from omnibal.trainers.lint.launch_settings import ARGPARSE, MEGATRON, Launcher, Severity

# Yielded by checks of a line: a rule's name, the problem with what must hold, and the fix. Of a
# rule's problems the first is reported, and none if the line's trainer does not check it.
Problems = Iterator[tuple[str, str, str]]


class Rule(NamedTuple):
    """A requirement on launch lines."""

    source: str  # file, line and version of the trainer's own check
    severity: Severity = "refused"
    launchers: frozenset[Launcher] = MEGATRON  # trainers that check it


def _core(
    place: str, severity: Severity = "refused", launchers: frozenset[Launcher] = MEGATRON
) -> Rule:
    """Return a rule of megatron-core, by the place of its check."""
    return Rule(f"core/{place}, megatron-core 0.16.1", severity, launchers)


def _swift(place: str, severity: Severity = "refused") -> Rule:
    return Rule(f"{place}, {_SWIFT}", severity, _ONLY_SWIFT)


_SWIFT, _SWIFT_ARGS = "ms-swift 4.6.0", "megatron_args.py"
_ARGS = "training/arguments.py, validate_args, Megatron-LM@000c4ac"
_LISTS = "loongforge/train/arguments.py, {}, LoongForge@130ff79"
_CONFIG, _BLOCK = "transformer/transformer_config.py", "transformer/transformer_block.py"
_LAYOUT = "transformer/pipeline_parallel_layer_layout.py"
_ONLY_BRIDGE, _ONLY_SWIFT = frozenset({Launcher.MEGATRON_BRIDGE}), frozenset({Launcher.MS_SWIFT})
_ONLY_LOONGFORGE = frozenset({Launcher.LOONGFORGE})
_LEGACY_LISTS = Rule(_LISTS.format("_validate_legacy_pipeline_args"), launchers=_ONLY_LOONGFORGE)
_FIRST_STEP: Severity = "refused-at-first-step"

RULES: Mapping[str, Rule] = {
    # Sizes and batches.
    "gpus-known": Rule("this command, --gpus", "warning"),
    "recipe-settings": Rule("this command", "warning", _ONLY_BRIDGE),
    "gpus-divide-grid": _core("parallel_state.py:740"),
    "gpus-divide-expert-grid": _core("parallel_state.py:793"),
    "virtual-needs-stages": _core("parallel_state.py:746"),
    "rank-order": _core("parallel_state.py:808", launchers=ARGPARSE),
    "batch-divides": Rule(
        "core/num_microbatches_calculator.py:340, megatron-core 0.16.1; "
        f"{_SWIFT_ARGS}:1003, {_SWIFT}"
    ),
    "rampup-by-samples": Rule(_ARGS, launchers=ARGPARSE),
    "interleaved-groups": _core("pipeline_parallel/schedules.py:995-1003", _FIRST_STEP),
    "interleaved-remainder": _core("pipeline_parallel/schedules.py:1007-1015", _FIRST_STEP),
    "context-divides-sequence": Rule(_ARGS, launchers=ARGPARSE | _ONLY_BRIDGE),
    "packing-and-micro-batch": Rule(
        "training/config.py, validate, Megatron-Bridge@003e863", launchers=_ONLY_BRIDGE
    ),
    # Layers by flags.
    "layers-divide-stages": _core(f"{_BLOCK}:155, transformer_config.py:1447-1460"),
    "layers-divide-chunks": _core(f"{_BLOCK}:174, transformer_config.py:1470"),
    "end-stages-hold-layers": _core(f"{_CONFIG}:1368, :1387"),
    "end-stages-divide-chunks": _core(f"{_CONFIG}:1371, :1390"),
    "middle-stages-and-layers": _core(f"{_CONFIG}:1406"),
    "middle-stages-hold-layers": Rule(
        "only this command: megatron-core 0.16.1 builds middle stages with a negative number of "
        "layers as empty, so the model gets too many layers"
    ),
    "middle-layers-divide-stages": _core(f"{_CONFIG}:1414"),
    "middle-layers-divide-chunks": _core(f"{_CONFIG}:1422"),
    "end-stages-or-counted": _core(f"{_CONFIG}:1294"),
    "end-stages-need-pipeline": _swift(f"{_SWIFT_ARGS}:885"),
    "one-way-of-chunks": Rule(_ARGS, launchers=ARGPARSE),
    "sized-chunks-exclude-ends": Rule(_ARGS, launchers=ARGPARSE),
    "sized-chunks-divide-stage": Rule(_ARGS, launchers=ARGPARSE),
    "one-chunk": Rule(_ARGS, "ignored", ARGPARSE | _ONLY_SWIFT),
    # Layouts and lists.
    "layout-form": _core(f"{_LAYOUT}:282-321"),
    "layout-divides-stages": _core(f"{_LAYOUT}:40"),
    "layout-chunks": _core(f"{_CONFIG}:1344", launchers=MEGATRON - _ONLY_SWIFT),
    "layout-over-virtual-size": _swift(f"{_SWIFT_ARGS}:1096-1117", "ignored"),
    "layout-alone": _core(f"{_CONFIG}:1307-1324"),
    "layout-ends": _core(f"{_LAYOUT}:94-105"),
    "layout-layers": _core(f"{_LAYOUT}:106"),
    "layout-prediction-layers": _core(f"{_LAYOUT}:111"),
    "layout-prediction-place": _core(f"{_LAYOUT}:116-135"),
    "layout-encoders": _core(f"{_LAYOUT}:147"),
    "listed-layers-for-stages": _LEGACY_LISTS,
    "listed-layers-add-up": _LEGACY_LISTS,
    "listed-layers-fill-chunks": _LEGACY_LISTS,
    "listed-recompute-for-stages": Rule(
        _LISTS.format("_validate_custom_model_args"), launchers=_ONLY_LOONGFORGE
    ),
    # Recomputation.
    "recompute-words": _core(f"{_CONFIG}:1155-1161", launchers=MEGATRON - _ONLY_SWIFT),
    "recompute-needs-method": _core(f"{_CONFIG}:1166"),
    "recompute-needs-number": _core(f"{_CONFIG}:1172"),
    "recompute-number-positive": _core(f"{_BLOCK}:532", _FIRST_STEP),
    "recompute-recomputes": _core(f"{_BLOCK}:560-570", "ignored"),
    "selective-without-number": _core(f"{_CONFIG}:1179"),
    "selective-without-method": Rule(
        f"{_ARGS}; {_SWIFT_ARGS}:849, {_SWIFT}", launchers=ARGPARSE | _ONLY_SWIFT
    ),
    "recompute-modules-known": _core(f"{_CONFIG}:1196-1211"),
    "recompute-latent": _core(f"{_CONFIG}:1218"),
    "prediction-recompute": _core("transformer/multi_token_prediction.py:846", _FIRST_STEP),
    "recompute-within-stage": _core(f"{_BLOCK}:532-560", "warning"),
    # The model.
    "sizes-are-the-models": Rule("this command, --model", "warning"),
    "heads-divide-tensor": _core(f"{_CONFIG}:924"),
    "query-groups-divide-tensor": _core(f"{_CONFIG}:939"),
    "gates-have-heads": _core(
        "transformer/attention.py:1218", _FIRST_STEP, frozenset(Launcher) - _ONLY_LOONGFORGE
    ),
    "delta-heads-divide-tensor": _core(f"{_CONFIG}:975-980"),
    "delta-net-without-context": _core(
        f"{_CONFIG}:983", launchers=frozenset({Launcher.MEGATRON_LM})
    ),
    "delta-net-and-core": _core(f"{_CONFIG}:983", "warning", _ONLY_BRIDGE | _ONLY_LOONGFORGE),
    "sequence-needs-tensor": _core("model_parallel_config.py:409", launchers=_ONLY_BRIDGE),
    "sequence-dropped": Rule(
        f"{_ARGS}; {_SWIFT_ARGS}:943, {_SWIFT}", "ignored", ARGPARSE | _ONLY_SWIFT
    ),
    "expert-size-needs-experts": _core(f"{_CONFIG}:1048"),
    "experts-divide": _core("transformer/moe/moe_layer.py:101"),
    "experts-want-sequence": _core("model_parallel_config.py:440", "warning"),
    "flex-needs-ranks": _core("transformer/moe/token_dispatcher.py:1346"),
    "one-connection": Rule(_ARGS, "warning", ARGPARSE),
}

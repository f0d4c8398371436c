"""Flags of Megatron trainers by normalised name, and the launch fields they set.

`--micro-batch-size`, `--micro_batch_size` and `train.micro_batch_size=` are one flag.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omnibal.base.errors import UserError
from omnibal.base.frozen import MAX_COUNT
from omnibal.trainers.lint.launch_settings import Launch, Launcher
from omnibal.trainers.lint.other_trainers import NAMES, PLAIN, PROGRAMS
from omnibal.trainers.lint.script import UNKNOWN

# Long names by short flag of Megatron-Bridge's recipe runner.
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "et": "expert_tensor_parallel_size",
    "mb": "micro_batch_size",
    "gb": "global_batch_size",
    "sl": "seq_length",
    "ng": "num_gpus",
}
_BRIDGE_SECTIONS = frozenset(  # of a recipe's configuration
    "model train dataset ddp optimizer checkpoint scheduler mixed_precision comm_overlap".split()
)
_OVERRIDE = re.compile(
    r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+|mixed_precision|peft|"
    rf"{PLAIN.pattern})=(.*)",
    re.DOTALL,
)
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


def canonical(name: str) -> str:
    """Return a flag's name as Megatron-LM spells it: long, with dashes, without Bridge section."""
    name = NAMES.get(name, name)
    section, _, field = name.partition(".")
    if section in _BRIDGE_SECTIONS and field and "." not in field:
        name = field
    return SHORT.get(name, name).replace("_", "-")


def read_flags(words: Sequence[str]) -> dict[str, str | None]:
    """Return values by flag or override, None without a value. Other words join the last flag's."""
    flags: dict[str, str | None] = {}
    last: str | None = None
    for word in words:
        override, flag = _OVERRIDE.fullmatch(word), _FLAG.fullmatch(word)
        if override is not None:
            flags[override[1]], last = override[2], None
        elif flag is not None:
            flags[flag[1]] = flag[2]
            last = None if flag[2] is not None else flag[1]
        # An unknown variable behind a value may hold further flags: it is dropped.
        elif last is not None and not (UNKNOWN.fullmatch(word) and flags[last] is not None):
            before = flags[last]
            if before is not None and word.endswith(".py"):  # torchrun's flags end at the program
                last = None
            else:
                flags[last] = word if before is None else f"{before} {word}"
    return flags


def flag_of(launch: Launch, name: str) -> str:
    """Return a Megatron-LM flag, such as `seq-length`, as typed for the line's trainer."""
    if launch.launcher is Launcher.MS_SWIFT:
        name = name.replace("seq-length", "max-length").replace("-", "_")
        return f"--{name}{' true' if name == 'sequence_parallel' else ''}"
    if launch.launcher is not Launcher.MEGATRON_BRIDGE:
        return f"--{name}"
    field = name.replace("-", "_")
    is_short = SHORT.keys() & launch.flags.keys() or not any(map(is_override, launch.flags))
    short = next((short for short, long in SHORT.items() if is_short and long == field), None)
    if short is not None:
        return f"-{short}"
    section = "train" if "batch" in name else "model"
    return f"{section}.{field}={'True' if field == 'sequence_parallel' else 'N'}"


def is_override(name: str) -> bool:
    """Return whether the name is an override of a Bridge recipe, such as `model.x`."""
    return name.partition(".")[0] in _BRIDGE_SECTIONS and "." in name


def whole_number(text: str) -> int | None:
    """Return the integer of at most 12 digits, signed or not, or None for other text."""
    return int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,12}\s*", text) else None


def _read_whole(name: str, text: str | None) -> int:
    number = None if text is None else whole_number(text)
    if number is None:
        raise UserError(f"{name} must be a whole number, got {text or 'no value'}; correct it")
    return number


def read_positive(name: str, text: str | None) -> int:
    """Return an integer from 1 to MAX_COUNT. Raises UserError for other text."""
    value = _read_whole(name, text)
    if not 1 <= value <= MAX_COUNT:
        raise UserError(f"{name} must be from 1 to {MAX_COUNT:,}, got {value}; correct it")
    return value


def is_on(text: str | None) -> bool:
    """Return whether a switch is on: its value is absent or not false, 0, no, off, none or null."""
    return text is None or text.strip().lower() not in ("false", "0", "no", "off", "none", "null")


def _read_switch(name: str, text: str | None) -> bool:
    return is_on(text)


def read_numbers(name: str, text: str | None) -> tuple[int, ...]:
    """Return the integers separated by commas. Raises UserError for other text."""
    return tuple(_read_whole(name, part) for part in (text or "").split(",") if part.strip())


def _read_one_of(*words: str) -> Callable[[str, str | None], str | None]:
    # None for other words: a rule reports them.
    return lambda name, text: text if text in words else None


def split_words(text: str | None) -> tuple[str, ...]:
    """Return the words of a list value: `a b`, `a,b` or `[a,b]`."""
    return tuple(re.findall(r"[^\s,\[\]'\"]+", text or ""))


def _read_layout(name: str, text: str | None) -> str | tuple[tuple[str, ...], ...] | None:
    if text is None or not text.strip().startswith("["):
        return text
    return tuple(split_words(inner) for inner in re.findall(r"\[([^\[\]]*)\]", text))


SPLIT_BY_CHUNK = "custom-virtual-pipeline-layers"
Read = Callable[[str, str | None], Any]
# Field of `Launch` and reader of each flag.
FIELDS: Mapping[str, tuple[str, Read]] = {
    "tensor-model-parallel-size": ("tensor", read_positive),
    "pipeline-model-parallel-size": ("pipeline", read_positive),
    "context-parallel-size": ("context", read_positive),
    "expert-model-parallel-size": ("expert", read_positive),
    "expert-tensor-parallel-size": ("expert_tensor", read_positive),
    "num-virtual-stages-per-pipeline-rank": ("virtual", read_positive),
    "virtual-pipeline-model-parallel-size": ("virtual", read_positive),
    "num-layers-per-virtual-pipeline-stage": ("layers_per_virtual_stage", read_positive),
    "sequence-parallel": ("sequence_parallel", _read_switch),
    "decoder-first-pipeline-num-layers": ("first_layers", _read_whole),
    "decoder-last-pipeline-num-layers": ("last_layers", _read_whole),
    "num-layers-in-first-pipeline-stage": ("first_layers", _read_whole),
    "num-layers-in-last-pipeline-stage": ("last_layers", _read_whole),
    "pipeline-model-parallel-layout": ("layout", _read_layout),
    "custom-pipeline-layers": ("layers_by_stage", read_numbers),
    SPLIT_BY_CHUNK: ("layers_by_stage", read_numbers),
    "account-for-embedding-in-pipeline-split": ("account_for_embedding", _read_switch),
    "account-for-loss-in-pipeline-split": ("account_for_loss", _read_switch),
    "recompute-granularity": ("recompute", _read_one_of("full", "selective")),
    "recompute-method": ("recompute_method", _read_one_of("block", "uniform")),
    "recompute-num-layers": ("recompute_layers", _read_whole),
    "custom-pipeline-recompute-layers": ("recompute_by_stage", read_numbers),
    "recompute-modules": ("recompute_modules", lambda _, text: split_words(text)),
    "recompute-vision": ("recompute_encoders", _read_switch),
    "vit-gradient-checkpointing": ("recompute_encoders", _read_switch),
    "micro-batch-size": ("micro_batch", read_positive),
    "global-batch-size": ("global_batch", read_positive),
    "mtp-num-layers": ("prediction_layers", _read_whole),
}
SWITCHES = frozenset(name for name, (_, read) in FIELDS.items() if read is _read_switch)
# Flags for the tokens of a sample or a pack; the first given is used.
LENGTHS = ("packing-length", "packing-seq-length", "decoder-seq-length", "seq-length", "max-length")
_SWITCHES_THAT_FREEZE = {
    "language": "freeze-llm freeze-LM freeze-language-model model.foundation.freeze",
    "vision": "freeze-vit freeze-ViT freeze-vision-model model.image-encoder.freeze",
    "projector": "freeze-aligner freeze-vision-projection model.image-projector.freeze",
}
# Frozen part by switch.
FROZEN = {name: part for part, names in _SWITCHES_THAT_FREEZE.items() for name in names.split()}
DEFAULTS: Mapping[Launcher, Mapping[str, str | None]] = {
    # ms-swift 4.6.0, megatron_args.py:470-504.
    Launcher.MS_SWIFT: {
        "micro-batch-size": "1",
        "global-batch-size": "16",
        "recompute-granularity": "selective",
        "freeze-vit": "true",
        "freeze-aligner": "true",
    },
    **{name: {"sequence-parallel": "true", "recompute-method": "uniform"} for name in PROGRAMS},
}


def is_nothing(text: str | None) -> bool:
    """Return whether a value, as of an override, means None: none, null or empty."""
    return text is not None and text.strip().lower() in ("none", "null", "")

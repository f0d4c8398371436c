"""Flags of a launch line that predictions do not model, each in a sentence."""

import re
from collections.abc import Iterator
from typing import get_args

from omnibal.model.adapters import ALL_LINEAR, AdapterConfig, adapter_mistake
from omnibal.model.config import ModelConfig
from omnibal.model.runtime import RecomputedModule
from omnibal.trainers.lint.launch import Launcher
from omnibal.trainers.lint.line import ARGPARSE, Line
from omnibal.trainers.lint.low_precision import notes_on_precision

_ADAPTERS = ("lora", "longlora", "adalora", "dora", "peft")
_NAMES_OF_ADAPTERS = ("tuner-type", "train-type", "peft-scheme", "task", "finetuning", "peft")
"""Flags for adapters: of ms-swift, recipes and their performance scripts."""
_NAMES_OF_RANK = ("lora-rank", "peft.dim", "lora-dim")
_NAMES_OF_TARGETS = ("target-modules", "peft.target_modules", "lora-target-modules")
_NAME = re.compile(r"[\w.-]+")
_BRIDGES = (Launcher.MEGATRON_BRIDGE,)
_DEFAULT_RANK = {False: 8, True: 32}
"""LoRA rank by default: ms-swift 4.6.0 (`swift/arguments/tuner_args.py`), Bridge if True."""


def is_adapter(line: Line) -> bool:
    """Whether the line trains adapters of a frozen model."""
    given = (line.text(name) for name in _NAMES_OF_ADAPTERS)
    is_named = any(text is not None and text.lower() in _ADAPTERS for text in given)
    return is_named or any(name.startswith("peft.") for name in line.flags)


def adapters_of_line(line: Line, model: ModelConfig) -> AdapterConfig | None:
    """Return the line's language model adapters, or None; unknown modules mean all linears."""
    if not is_adapter(line):
        return None
    ranks = (number for number in map(line.number, _NAMES_OF_RANK) if number and number > 0)
    rank = next(ranks, _DEFAULT_RANK[line.launch.launcher in _BRIDGES])
    adapters = AdapterConfig(rank=rank, alpha=rank, experts=True)
    given = next(filter(None, (line.text(name) for name in _NAMES_OF_TARGETS)), "")
    names = tuple(_NAME.findall(given))
    if names and ALL_LINEAR not in names:
        named = adapters.model_copy(update={"targets": names, "experts": False})
        if adapter_mistake(model, (), named) is None:
            return named
    return adapters


def cuts_samples(line: Line) -> bool:
    """Whether CP is predicted as shorter samples: linear attention, or sizes no power of two."""
    context = line.launch.context
    return context > 1 and (line.sizes.linear is not None or bool(context & (context - 1)))


def has_engine(line: Line) -> bool:
    """Whether language layers use Transformer Engine, trainers' default."""
    return line.text("transformer-impl") != "local"


def accumulates_in_products(line: Line) -> bool:
    """Whether weight gradient accumulation is fused, trainers' default."""
    fusion = "gradient-accumulation-fusion"
    return has_engine(line) and line.on(fusion, default=True) and not line.on(f"no-{fusion}")


def notes_on(line: Line, *, chunks_are_simulated: bool) -> Iterator[str]:
    """Yield notes on flags approximated or not counted."""
    if line.virtual is not None and not chunks_are_simulated:
        yield (
            f"{line.virtual} chunks a stage are predicted as one run of layers, by 1F1B: with "
            "interleaving stages wait less and keep more"
        )
    elif line.virtual is not None and line.chunk_group != line.launch.pipeline:
        yield (
            f"groups of {line.chunk_group} micro-batches are predicted as groups of as many as "
            f"there are stages, {line.launch.pipeline}: larger ones keep more"
        )
    yield from _on_recompute(line)
    yield from _on_sizes(line)
    yield from notes_on_precision(line)
    yield from _on_state(line)


def recomputed_modules(line: Line) -> tuple[RecomputedModule, ...]:
    """Return modules of the language model that backward recomputes."""
    if line.launch.recompute != "selective":
        return ()
    given = line.launch.recompute_modules
    return tuple(name for name in get_args(RecomputedModule) if name in given)


def _on_recompute(line: Line) -> Iterator[str]:
    launch = line.launch
    if launch.recompute == "full" and launch.recompute_method == "uniform":
        unit = launch.recompute_layers or 1
        if unit > 1:
            yield (
                f"uniform recomputation in units of {unit} layers keeps one input a unit; the "
                "prediction keeps one a layer, so memory is somewhat above what is needed"
            )
    if launch.launcher is Launcher.LOONGFORGE and launch.recompute == "full":
        yield (
            "that LoongForge's numbers of recomputed layers are of the encoders too is read from "
            "its scripts, and was not found in its code"
        )


def _on_sizes(line: Line) -> Iterator[str]:
    launch = line.launch
    if cuts_samples(line):
        yield (
            f"{launch.context} context-parallel ranks are predicted as if each had samples of its "
            "own, so much shorter: attention and what the ranks exchange are counted too low"
        )
    elif launch.context > 1:
        yield (
            f"{launch.context} context-parallel ranks exchange as --cp-comm-type "
            f"{' '.join(line.exchanges)} says, a2a+p2p as a ring alone. Encoders are "
            "divided over them too, which not every trainer does"
        )
    if launch.launcher in ARGPARSE and not (line.on("bf16") or line.on("fp16")):
        yield (
            "the line has neither --bf16 nor --fp16, and is predicted in bf16; Megatron would "
            "train it in fp32"
        )


def _on_state(line: Line) -> Iterator[str]:
    if is_adapter(line):
        yield (
            "the line trains adapters, which are predicted beside linears of the language model "
            "alone, as this project's trainer runs them; all else is predicted as frozen"
        )
    if line.on("overlap-moe-expert-parallel-comm"):
        yield (
            "with --overlap-moe-expert-parallel-comm a tenth of the exchange of tokens is "
            "predicted as waited for, and memory without the micro-batch that runs ahead"
        )
    moved = [name for name in ("optimizer-cpu-offload", "cpu-offloading") if line.on(name)]
    if moved:
        yield f"--{moved[0]} is not counted: state and activations are predicted on the device"

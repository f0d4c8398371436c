"""Flags of a launch line that predictions do not model, each in a sentence."""

from collections.abc import Iterator

from omnibal.model.config import ModelConfig
from omnibal.model.parallel import expert_counts
from omnibal.trainers.lint.adapter_flags import is_adapter
from omnibal.trainers.lint.launch_settings import ARGPARSE, Launcher
from omnibal.trainers.lint.line import Line
from omnibal.trainers.lint.low_precision import notes_on_precision


def cuts_samples(line: Line) -> bool:
    """Return whether CP is predicted as shorter samples: linear attention, or no power of two."""
    context = line.launch.context
    return context > 1 and (line.linear is not None or bool(context & (context - 1)))


def notes_on(line: Line, model: ModelConfig, *, chunks_are_simulated: bool) -> Iterator[str]:
    """Yield notes on flags approximated or not counted."""
    if line.expert_tensor > 1 and expert_counts(model):
        ranks = line.launch.expert * line.expert_tensor
        yield (
            f"expert tensor size {line.expert_tensor} is predicted as {ranks} expert-parallel "
            "ranks with whole experts, which hold as many bytes: --expert-tensor-parallel-size "
            "1 with that --expert-model-parallel-size is what is predicted"
        )
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
    yield from _notes_on_recompute(line)
    yield from _notes_on_sizes(line)
    yield from notes_on_precision(line)
    yield from _notes_on_state(line)


def _notes_on_recompute(line: Line) -> Iterator[str]:
    launch = line.launch
    if launch.recompute != "full":
        return
    unit = launch.recompute_layers or 1
    if launch.recompute_method == "uniform" and unit > 1:
        yield (
            f"uniform recomputation in units of {unit} layers keeps one input a unit; the "
            "prediction keeps one a layer, so memory is somewhat above what is needed"
        )
    if launch.launcher is Launcher.LOONGFORGE:
        yield (
            "that LoongForge's numbers of recomputed layers are of the encoders too is read from "
            "its scripts, and was not found in its code"
        )


def _notes_on_sizes(line: Line) -> Iterator[str]:
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


def _notes_on_state(line: Line) -> Iterator[str]:
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
    moved = next(filter(line.on, ("optimizer-cpu-offload", "cpu-offloading")), None)
    if moved:
        yield f"--{moved} is not counted: state and activations are predicted on the device"

"""Notes on flags of a launch line that predictions approximate or ignore."""

from collections.abc import Iterator

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.parallel import expert_counts
from omnibal.trainers.lint.launch_settings import ARGPARSE, Launcher
from omnibal.trainers.lint.line import LaunchLine
from omnibal.trainers.lint.weights import is_adapter, notes_on_precision


def cuts_samples(line: LaunchLine) -> bool:
    """Return whether CP is predicted as shorter samples: linear attention, or no power of two."""
    context = line.launch.context
    return context > 1 and (line.linear is not None or bool(context & (context - 1)))


def notes_on(
    line: LaunchLine, job: JobSpec, samples: Lengths | None, *, chunks_are_simulated: bool
) -> Iterator[str]:
    """Yield notes on flags that the prediction approximates or ignores; mock data if no samples."""
    launch = line.launch
    if line.expert_tensor > 1 and expert_counts(job.model):
        ranks = launch.expert * line.expert_tensor
        yield f"expert tensor size {line.expert_tensor} is predicted as expert size {ranks}"
    if line.virtual is not None and not chunks_are_simulated:
        yield f"{line.virtual} chunks a stage are predicted as one, with more idle and less memory"
    elif line.virtual is not None and line.chunk_group != launch.pipeline:
        yield f"groups of {line.chunk_group} micro-batches are predicted as {launch.pipeline}"
    is_full, unit = launch.recompute == "full", launch.recompute_layers or 1
    if is_full and launch.recompute_method == "uniform" and unit > 1:
        yield f"uniform recomputation by {unit} layers is predicted per layer, with more memory"
    if is_full and launch.launcher is Launcher.LOONGFORGE:
        yield "LoongForge's numbers of recomputed layers are assumed to hold for encoders too"
    yield from _notes_on_ranks(line)
    if samples is None and line.sizes.experts:
        yield "mock samples are routed evenly over expert-parallel ranks; --lengths has real ones"
    is_swift = launch.launcher is Launcher.MS_SWIFT
    if is_swift and samples is not None and not line.on("packing"):
        yield "the line does not pack samples (--packing true), and is predicted as if it did"
    if job.precision == "fp8" and job.model.encoders:
        yield "layers of encoders are predicted in bf16, even if the line has them in FP8"


def _notes_on_ranks(line: LaunchLine) -> Iterator[str]:
    """Yield notes on context parallelism, precision, adapters, overlap and offloading."""
    launch = line.launch
    if cuts_samples(line):
        yield (
            f"{launch.context} context-parallel ranks are predicted as if every rank had shorter "
            "samples of its own: attention and its exchange are underestimated"
        )
    elif launch.context > 1:
        yield (
            f"{launch.context} context-parallel ranks exchange by --cp-comm-type "
            f"{' '.join(line.exchanges)}, a2a+p2p predicted as a ring, and encoders as divided"
        )
    if launch.launcher in ARGPARSE and not (line.on("bf16") or line.on("fp16")):
        yield "the line has neither --bf16 nor --fp16: it trains in fp32, predicted is bf16"
    yield from notes_on_precision(line)
    if is_adapter(line):
        yield "the line trains adapters, predicted on language linears with all else frozen"
    if line.on("overlap-moe-expert-parallel-comm"):
        yield (
            "with --overlap-moe-expert-parallel-comm a tenth of the exchange of tokens is "
            "predicted as exposed, and memory without the micro-batch that runs ahead"
        )
    moved = next(filter(line.on, ("optimizer-cpu-offload", "cpu-offloading")), None)
    if moved:
        yield f"--{moved} is ignored: state and activations are predicted on the device"

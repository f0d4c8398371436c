"""Rules of micro-batches, steps and the length of samples."""

from functools import partial

from omnibal.lint.flags import FIELDS, canonical, whole_number
from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import BRIDGE, CORE, MEGATRON_LM, SWIFT, Problems, RuleGroup

RULES = RuleGroup("Batch and length")
rule, validate_args = RULES.rule, RULES.validate_args
_OF_BRIDGE = frozenset((Launcher.MEGATRON_BRIDGE,))
_OF_SWIFT = frozenset((Launcher.MS_SWIFT,))
validate_bridge = partial(
    rule, source=f"training/config.py, validate, {BRIDGE}", launchers=_OF_BRIDGE
)
_RENAMED = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-granularity",
}


@validate_args("micro-batch-given", holds="a micro-batch size is needed")
def _micro_batch(line: Line) -> Problems:
    if line.launch.micro_batch is None:
        yield "the line has no micro-batch size", "give --micro-batch-size"


@rule(
    "batch-divides",
    holds="the global batch must be a multiple of micro-batch x data-parallel size",
    source=f"core/num_microbatches_calculator.py:340, {CORE}; megatron_args.py:1003, {SWIFT}",
)
def _batch(line: Line) -> Problems:
    launch, data = line.launch, line.data
    if data is None or launch.micro_batch is None or launch.global_batch is None:
        return
    at_once = launch.micro_batch * data
    if launch.global_batch % at_once and not line.on("decrease-batch-size-if-needed"):
        nearest = max(at_once, round(launch.global_batch / at_once) * at_once)
        batches = f"global batch {launch.global_batch:,}, micro-batch {launch.micro_batch}"
        yield (
            f"{batches} and data-parallel size {data:,} ({launch.gpus:,} GPUs / {line.grid})",
            f"use a multiple of {at_once:,}, such as {nearest:,}",
        )


@rule(
    "rampup-has-three-numbers",
    holds="a ramp-up of the batch is three numbers",
    source=f"core/num_microbatches_calculator.py:233, {CORE}",
    launchers=ARGPARSE,
)
def _rampup_form(line: Line) -> Problems:
    given = line.text("rampup-batch-size")
    if given is not None and len(line.words("rampup-batch-size")) != 3:
        yield f"--rampup-batch-size {given}", "give START INCREMENT SAMPLES"


@rule(
    "rampup-reaches-batch",
    holds="a ramp-up must lead to the global batch in whole increments",
    source=f"core/num_microbatches_calculator.py:429, {CORE}",
    launchers=ARGPARSE,
)
def _rampup_steps(line: Line) -> Problems:
    given = [whole_number(word) for word in line.words("rampup-batch-size")]
    whole = line.launch.global_batch
    if len(given) != 3 or whole is None or given[0] is None or given[1] is None:
        return
    start, increment = given[0], given[1]
    if increment <= 0 or whole < start or (whole - start) % increment:
        change = "choose a start and an increment that lead to the global batch"
        yield f"ramp-up from {start} by {increment} to global batch {whole}", change


@validate_args("rampup-by-samples", holds="the batch ramps up only in training by samples")
def _rampup_iterations(line: Line) -> Problems:
    if line.number("train-iters") and "rampup-batch-size" in line.flags:
        change = "train by --train-samples, or leave the ramp-up out"
        yield "--rampup-batch-size beside --train-iters", change


@validate_args(
    "iterations-or-samples", holds="a run is measured in iterations or in samples, not in both"
)
def _one_measure(line: Line) -> Problems:
    by_samples = ("train-samples", "lr-decay-samples", "lr-warmup-samples")
    by_iterations = ("train-iters", "lr-decay-iters", "lr-warmup-iters")
    for measure, others in (("train-iters", by_samples), ("train-samples", by_iterations)):
        against = [f"--{name}" for name in others if line.number(name)]
        if line.number(measure) and against:
            yield f"--{measure} beside {', '.join(against)}", "leave those out"


@validate_args("one-warmup", holds="warm-up is given as a fraction or as a number")
def _one_warmup(line: Line) -> Problems:
    others = [f"--{name}" for name in ("lr-warmup-iters", "lr-warmup-samples") if line.number(name)]
    if "lr-warmup-fraction" in line.flags and others:
        yield f"--lr-warmup-fraction beside {', '.join(others)}", "give one of them"


@validate_args("learning-rates-in-order", holds="the least learning rate must not exceed the rate")
def _rates(line: Line) -> Problems:
    texts = line.text("lr"), line.text("min-lr")
    try:
        rate, least = (None if text is None else float(text) for text in texts)
    except ValueError:
        return
    if rate is not None and least is not None and least > rate:
        yield f"--min-lr {least:g} above --lr {rate:g}", "lower it"


@rule(
    "interleaved-groups",
    holds="chunks of stages need groups of at least as many micro-batches as stages, and no fewer "
    "micro-batches than a group",
    source=f"core/pipeline_parallel/schedules.py:995-1003, {CORE}",
    severity="refused-at-first-step",
)
def _interleaved(line: Line) -> Problems:
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is not None and count is not None and not stages <= group <= count:
        change = "leave the group size out, or raise it"
        if group >= stages:
            change = f"use a global batch with at least {group} micro-batches"
        groups = f"{count} micro-batches in groups of {group}"
        yield f"{groups} on {stages} stages of {line.virtual} chunks", change


@rule(
    "interleaved-remainder",
    holds="the last group of micro-batches must be empty or at least as large as the stages",
    source=f"core/pipeline_parallel/schedules.py:1007-1015, {CORE}",
    severity="refused-at-first-step",
)
def _interleaved_rest(line: Line) -> Problems:
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is not None and count is not None and group >= stages > count % group > 0:
        yield (
            f"{count} micro-batches in groups of {group} leave {count % group} on {stages} stages",
            f"use a multiple of {group} micro-batches",
        )


@validate_args(
    "context-divides-sequence",
    holds="the sequence must be a multiple of twice the context size",
    launchers=ARGPARSE | _OF_BRIDGE,
)
def _context(line: Line) -> Problems:
    length = line.number("seq-length") or line.launch.sequence_length
    context = line.launch.context
    if context > 1 and length is not None and length % (2 * context):
        yield f"{length:,} tokens and CP {context}", f"use a multiple of {2 * context} tokens"


@validate_args("positions-hold-sequence", holds="there must be a position for every token")
def _positions(line: Line) -> Problems:
    most = line.number("max-position-embeddings")
    longest = max(line.number(name) or 0 for name in ("seq-length", "decoder-seq-length"))
    if most is not None and longest > most:
        change = f"raise it to {longest:,}"
        yield f"{longest:,} tokens and --max-position-embeddings {most:,}", change


@validate_bridge("one-packing", holds="data are packed in one way")
def _one_packing(line: Line) -> Problems:
    if line.on("enable-offline-packing") and line.on("enable-in-batch-packing"):
        yield "packing before training and in the batch at once", "leave one of them out"


@validate_bridge(
    "packing-and-micro-batch",
    holds="a packed data set needs micro-batch 1, and packing in the batch more than 1",
)
def _packed_samples(line: Line) -> Problems:
    size = line.launch.micro_batch
    if size is not None and size > 1 and line.on("enable-offline-packing"):
        yield f"a packed data set and micro-batch {size}", "use micro-batch 1"
    if size == 1 and line.on("enable-in-batch-packing"):
        yield "packing in the batch and micro-batch 1", "raise the micro-batch"


@validate_bridge(
    "energon-packing", holds="Energon's own packing works with one stage and micro-batch 1"
)
def _energon(line: Line) -> Problems:
    size, stages = line.launch.micro_batch or 1, line.launch.pipeline
    if line.text("packing-buffer-size") is not None and (stages > 1 or size > 1):
        change = "use PP 1 and micro-batch 1, or packs made before training"
        yield f"Energon's own packing with PP {stages} and micro-batch {size}", change


@validate_bridge("lengths-agree", holds="the model's and the data's sequence length must be equal")
def _data_length(line: Line) -> Problems:
    model, data = (line.launch.flags.get(f"{part}.seq_length") for part in ("model", "dataset"))
    if model is not None and data is not None and model != data:
        yield f"model.seq_length={model} and dataset.seq_length={data}", "make them equal"


@rule(
    "grouped-lengths-or-padding-free",
    holds="samples are grouped by length or joined without padding",
    source=f"megatron_args.py:852, {SWIFT}",
    launchers=_OF_SWIFT,
)
def _grouped_lengths(line: Line) -> Problems:
    if line.on("group-by-length") and line.on("padding-free", default=True):
        change = "leave it out, or give --padding_free false"
        yield "--group_by_length beside padding_free, which is the default", change


@rule(
    "packing-not-lazy",
    holds="packing needs all lengths before training",
    source=f"base_args.py:165, {SWIFT}",
    launchers=_OF_SWIFT,
)
def _lazy(line: Line) -> Problems:
    if line.on("packing") and line.on("lazy-tokenize"):
        yield "--packing beside --lazy_tokenize", "leave the second out"


@validate_args("renamed-flags", holds="these flags are of older versions and end the program")
def _renamed(line: Line) -> Problems:
    given = {name: new for name, new in _RENAMED.items() if name in line.flags}
    if given:
        yield ", ".join(f"--{name}" for name in given), f"use {', '.join(given.values())}"


@rule(
    "flag-spelling",
    holds="names must be written in full and with dashes",
    source=f"training/arguments.py, parse_args (allow_abbrev=False), {MEGATRON_LM}",
    launchers=frozenset((Launcher.MEGATRON_LM,)),
)
def _spelling(line: Line) -> Problems:
    wrong = [name for name in line.launch.flags if "_" in name and canonical(name) in FIELDS]
    if wrong:
        right = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        yield ", ".join(f"--{name}" for name in wrong), f"write {right}"

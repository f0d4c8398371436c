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
validate_bridge = partial(rule, f"training/config.py, validate, {BRIDGE}", launchers=_OF_BRIDGE)
_RENAMED = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-granularity",
}


@validate_args()
def micro_batch_given(line: Line) -> Problems:
    """A micro-batch size is needed."""
    if line.launch.micro_batch is None:
        yield "the line has no micro-batch size", "give --micro-batch-size"


@rule(f"core/num_microbatches_calculator.py:340, {CORE}; megatron_args.py:1003, {SWIFT}")
def batch_divides(line: Line) -> Problems:
    """The global batch must be a multiple of micro-batch x data-parallel size."""
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


@rule(f"core/num_microbatches_calculator.py:233, {CORE}", launchers=ARGPARSE)
def rampup_has_three_numbers(line: Line) -> Problems:
    """A ramp-up of the batch is three numbers."""
    given = line.text("rampup-batch-size")
    if given is not None and len(line.words("rampup-batch-size")) != 3:
        yield f"--rampup-batch-size {given}", "give START INCREMENT SAMPLES"


@rule(f"core/num_microbatches_calculator.py:429, {CORE}", launchers=ARGPARSE)
def rampup_reaches_batch(line: Line) -> Problems:
    """A ramp-up must lead to the global batch in whole increments."""
    given = [whole_number(word) for word in line.words("rampup-batch-size")]
    whole = line.launch.global_batch
    if len(given) != 3 or whole is None or given[0] is None or given[1] is None:
        return
    start, increment = given[0], given[1]
    if increment <= 0 or whole < start or (whole - start) % increment:
        change = "choose a start and an increment that lead to the global batch"
        yield f"ramp-up from {start} by {increment} to global batch {whole}", change


@validate_args()
def rampup_by_samples(line: Line) -> Problems:
    """The batch ramps up only in training by samples."""
    if line.number("train-iters") and "rampup-batch-size" in line.flags:
        change = "train by --train-samples, or leave the ramp-up out"
        yield "--rampup-batch-size beside --train-iters", change


@validate_args()
def iterations_or_samples(line: Line) -> Problems:
    """A run is measured in iterations or in samples, not in both."""
    by_samples = ("train-samples", "lr-decay-samples", "lr-warmup-samples")
    by_iterations = ("train-iters", "lr-decay-iters", "lr-warmup-iters")
    for measure, others in (("train-iters", by_samples), ("train-samples", by_iterations)):
        against = [f"--{name}" for name in others if line.number(name)]
        if line.number(measure) and against:
            yield f"--{measure} beside {', '.join(against)}", "leave those out"


@validate_args()
def one_warmup(line: Line) -> Problems:
    """Warm-up is given as a fraction or as a number."""
    others = [f"--{name}" for name in ("lr-warmup-iters", "lr-warmup-samples") if line.number(name)]
    if "lr-warmup-fraction" in line.flags and others:
        yield f"--lr-warmup-fraction beside {', '.join(others)}", "give one of them"


@validate_args()
def learning_rates_in_order(line: Line) -> Problems:
    """The least learning rate must not exceed the rate."""
    texts = line.text("lr"), line.text("min-lr")
    try:
        rate, least = (None if text is None else float(text) for text in texts)
    except ValueError:
        return
    if rate is not None and least is not None and least > rate:
        yield f"--min-lr {least:g} above --lr {rate:g}", "lower it"


@rule(f"core/pipeline_parallel/schedules.py:995-1003, {CORE}", severity="refused-at-first-step")
def interleaved_groups(line: Line) -> Problems:
    """Chunks of stages need groups of at least as many micro-batches as stages, and no fewer
    micro-batches than a group."""
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is not None and count is not None and not stages <= group <= count:
        change = "leave the group size out, or raise it"
        if group >= stages:
            change = f"use a global batch with at least {group} micro-batches"
        groups = f"{count} micro-batches in groups of {group}"
        yield f"{groups} on {stages} stages of {line.virtual} chunks", change


@rule(f"core/pipeline_parallel/schedules.py:1007-1015, {CORE}", severity="refused-at-first-step")
def interleaved_remainder(line: Line) -> Problems:
    """The last group of micro-batches must be empty or at least as large as the stages."""
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is not None and count is not None and group >= stages > count % group > 0:
        yield (
            f"{count} micro-batches in groups of {group} leave {count % group} on {stages} stages",
            f"use a multiple of {group} micro-batches",
        )


@validate_args(launchers=ARGPARSE | _OF_BRIDGE)
def context_divides_sequence(line: Line) -> Problems:
    """The sequence must be a multiple of twice the context size."""
    length = line.number("seq-length") or line.launch.sequence_length
    context = line.launch.context
    if context > 1 and length is not None and length % (2 * context):
        yield f"{length:,} tokens and CP {context}", f"use a multiple of {2 * context} tokens"


@validate_args()
def positions_hold_sequence(line: Line) -> Problems:
    """There must be a position for every token."""
    most = line.number("max-position-embeddings")
    longest = max(line.number(name) or 0 for name in ("seq-length", "decoder-seq-length"))
    if most is not None and longest > most:
        change = f"raise it to {longest:,}"
        yield f"{longest:,} tokens and --max-position-embeddings {most:,}", change


@validate_bridge()
def one_packing(line: Line) -> Problems:
    """Data are packed in one way."""
    if line.on("enable-offline-packing") and line.on("enable-in-batch-packing"):
        yield "packing before training and in the batch at once", "leave one of them out"


@validate_bridge()
def packing_and_micro_batch(line: Line) -> Problems:
    """A packed data set needs micro-batch 1, and packing in the batch more than 1."""
    size = line.launch.micro_batch
    if size is not None and size > 1 and line.on("enable-offline-packing"):
        yield f"a packed data set and micro-batch {size}", "use micro-batch 1"
    if size == 1 and line.on("enable-in-batch-packing"):
        yield "packing in the batch and micro-batch 1", "raise the micro-batch"


@validate_bridge()
def energon_packing(line: Line) -> Problems:
    """Packing by Energon itself works with one stage and micro-batch 1."""
    size, stages = line.launch.micro_batch or 1, line.launch.pipeline
    if line.text("packing-buffer-size") is not None and (stages > 1 or size > 1):
        change = "use PP 1 and micro-batch 1, or packs made before training"
        yield f"Energon's own packing with PP {stages} and micro-batch {size}", change


@validate_bridge()
def lengths_agree(line: Line) -> Problems:
    """The model's and the data's sequence length must be equal."""
    model, data = (line.launch.flags.get(f"{part}.seq_length") for part in ("model", "dataset"))
    if model is not None and data is not None and model != data:
        yield f"model.seq_length={model} and dataset.seq_length={data}", "make them equal"


@rule(f"megatron_args.py:852, {SWIFT}", launchers=_OF_SWIFT)
def grouped_lengths_or_padding_free(line: Line) -> Problems:
    """Samples are grouped by length or joined without padding."""
    if line.on("group-by-length") and line.on("padding-free", default=True):
        change = "leave it out, or give --padding_free false"
        yield "--group_by_length beside padding_free, which is the default", change


@rule(f"base_args.py:165, {SWIFT}", launchers=_OF_SWIFT)
def packing_not_lazy(line: Line) -> Problems:
    """Packing needs all lengths before training."""
    if line.on("packing") and line.on("lazy-tokenize"):
        yield "--packing beside --lazy_tokenize", "leave the second out"


@validate_args()
def renamed_flags(line: Line) -> Problems:
    """Flags of older versions end the program."""
    given = {name: new for name, new in _RENAMED.items() if name in line.flags}
    if given:
        yield ", ".join(f"--{name}" for name in given), f"use {', '.join(given.values())}"


@rule(
    f"training/arguments.py, parse_args (allow_abbrev=False), {MEGATRON_LM}",
    launchers=frozenset((Launcher.MEGATRON_LM,)),
)
def flag_spelling(line: Line) -> Problems:
    """Names must be written in full and with dashes."""
    wrong = [name for name in line.launch.flags if "_" in name and canonical(name) in FIELDS]
    if wrong:
        right = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        yield ", ".join(f"--{name}" for name in wrong), f"write {right}"

"""Rules of micro-batches, steps and the length of samples."""

from omnibal.lint.flags import FIELDS, canonical, whole_number, words_of
from omnibal.lint.launch import Launcher
from omnibal.lint.line import ARGPARSE, Line
from omnibal.lint.rule import BRIDGE, CORE, MEGATRON_LM, SWIFT, Broken, Rule

_VALIDATE = f"training/arguments.py, validate_args, {MEGATRON_LM}"
_OF_BRIDGE = frozenset((Launcher.MEGATRON_BRIDGE,))
_OF_SWIFT = frozenset((Launcher.MS_SWIFT,))
_RENAMED = {
    "batch-size": "--micro-batch-size",
    "model-parallel-size": "--tensor-model-parallel-size",
    "warmup": "--lr-warmup-fraction",
    "checkpoint-activations": "--recompute-granularity",
}


def _micro_batch(line: Line) -> Broken | None:
    if line.launch.micro_batch is not None:
        return None
    return Broken("the line has no micro-batch size", "give --micro-batch-size")


def _batch(line: Line) -> Broken | None:
    launch, data = line.launch, line.data
    if data is None or launch.micro_batch is None or launch.global_batch is None:
        return None
    at_once = launch.micro_batch * data
    is_fitted = line.on("decrease-batch-size-if-needed")
    if launch.global_batch % at_once == 0 or is_fitted:
        return None
    nearest = max(at_once, round(launch.global_batch / at_once) * at_once)
    return Broken(
        f"global batch {launch.global_batch:,}, micro-batch {launch.micro_batch} and data-parallel "
        f"size {data:,} ({launch.gpus:,} GPUs / {line.grid})",
        f"use a multiple of {at_once:,}, such as {nearest:,}",
    )


def _rampup_form(line: Line) -> Broken | None:
    given = line.text("rampup-batch-size")
    if given is None or len(words_of(given)) == 3:
        return None
    return Broken(f"--rampup-batch-size {given}", "give START INCREMENT SAMPLES")


def _rampup_steps(line: Line) -> Broken | None:
    given = [whole_number(word) for word in words_of(line.text("rampup-batch-size"))]
    whole = line.launch.global_batch
    if len(given) != 3 or whole is None or given[0] is None or given[1] is None:
        return None
    start, increment = given[0], given[1]
    if increment > 0 and whole >= start and (whole - start) % increment == 0:
        return None
    return Broken(
        f"ramp-up from {start} by {increment} to global batch {whole}",
        "choose a start and an increment that lead to the global batch",
    )


def _rampup_iterations(line: Line) -> Broken | None:
    if not (line.number("train-iters") and "rampup-batch-size" in line.flags):
        return None
    return Broken(
        "--rampup-batch-size beside --train-iters",
        "train by --train-samples, or leave the ramp-up out",
    )


def _one_measure(line: Line) -> Broken | None:
    by_samples = ("train-samples", "lr-decay-samples", "lr-warmup-samples")
    by_iterations = ("train-iters", "lr-decay-iters", "lr-warmup-iters")
    for measure, others in (("train-iters", by_samples), ("train-samples", by_iterations)):
        against = [f"--{name}" for name in others if line.number(name)]
        if line.number(measure) and against:
            return Broken(f"--{measure} beside {', '.join(against)}", "leave those out")
    return None


def _one_warmup(line: Line) -> Broken | None:
    others = [f"--{name}" for name in ("lr-warmup-iters", "lr-warmup-samples") if line.number(name)]
    if "lr-warmup-fraction" not in line.flags or not others:
        return None
    return Broken(f"--lr-warmup-fraction beside {', '.join(others)}", "give one of them")


def _rates(line: Line) -> Broken | None:
    texts = line.text("lr"), line.text("min-lr")
    try:
        rate, least = (None if text is None else float(text) for text in texts)
    except ValueError:
        return None
    if rate is None or least is None or least <= rate:
        return None
    return Broken(f"--min-lr {least:g} above --lr {rate:g}", "lower it")


def _interleaved(line: Line) -> Broken | None:
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is None or count is None or stages <= group <= count:
        return None
    return Broken(
        f"{count} micro-batches in groups of {group} on {stages} stages of {line.virtual} chunks",
        f"use a global batch with at least {max(group, stages)} micro-batches"
        if group >= stages
        else "leave the group size out, or raise it",
    )


def _interleaved_rest(line: Line) -> Broken | None:
    count, group, stages = line.micro_batches, line.chunk_group, line.launch.pipeline
    if line.virtual is None or count is None or group < stages:
        return None
    rest = count % group
    if not 0 < rest < stages:
        return None
    return Broken(
        f"{count} micro-batches in groups of {group} leave {rest} on {stages} stages",
        f"use a multiple of {group} micro-batches",
    )


def _context(line: Line) -> Broken | None:
    length = line.number("seq-length") or line.launch.sequence_length
    context = line.launch.context
    if context == 1 or length is None or length % (2 * context) == 0:
        return None
    return Broken(f"{length:,} tokens and CP {context}", f"use a multiple of {2 * context} tokens")


def _positions(line: Line) -> Broken | None:
    most = line.number("max-position-embeddings")
    lengths = [line.number(name) for name in ("seq-length", "decoder-seq-length")]
    longest = max((length for length in lengths if length is not None), default=0)
    if most is None or longest <= most:
        return None
    return Broken(
        f"{longest:,} tokens and --max-position-embeddings {most:,}",
        f"raise it to {longest:,}",
    )


def _one_packing(line: Line) -> Broken | None:
    both = ("enable-offline-packing", "enable-in-batch-packing")
    if not all(line.on(name) for name in both):
        return None
    return Broken("packing before training and in the batch at once", "leave one of them out")


def _packed_samples(line: Line) -> Broken | None:
    size = line.launch.micro_batch
    if size is None:
        return None
    if line.on("enable-offline-packing") and size > 1:
        return Broken(f"a packed data set and micro-batch {size}", "use micro-batch 1")
    if line.on("enable-in-batch-packing") and size == 1:
        return Broken("packing in the batch and micro-batch 1", "raise the micro-batch")
    return None


def _energon(line: Line) -> Broken | None:
    if "packing-buffer-size" not in line.flags or line.text("packing-buffer-size") is None:
        return None
    size, stages = line.launch.micro_batch, line.launch.pipeline
    if stages == 1 and size in (None, 1):
        return None
    return Broken(
        f"Energon's own packing with PP {stages} and micro-batch {size or 1}",
        "use PP 1 and micro-batch 1, or packs made before training",
    )


def _data_length(line: Line) -> Broken | None:
    flags = line.launch.flags
    model, data = (flags.get(f"{part}.seq_length") for part in ("model", "dataset"))
    if model is None or data is None or model == data:
        return None
    return Broken(f"model.seq_length={model} and dataset.seq_length={data}", "make them equal")


def _grouped_lengths(line: Line) -> Broken | None:
    free = "padding-free" not in line.flags or line.on("padding-free")
    if not line.on("group-by-length") or not free:
        return None
    return Broken(
        "--group_by_length beside padding_free, which is the default",
        "leave it out, or give --padding_free false",
    )


def _lazy(line: Line) -> Broken | None:
    if not (line.on("packing") and line.on("lazy-tokenize")):
        return None
    return Broken("--packing beside --lazy_tokenize", "leave the second out")


def _renamed(line: Line) -> Broken | None:
    given = [name for name in _RENAMED if name in line.flags]
    if not given:
        return None
    new = ", ".join(dict.fromkeys(_RENAMED[name] for name in given))
    return Broken(", ".join(f"--{name}" for name in given), f"use {new}")


def _spelling(line: Line) -> Broken | None:
    wrong = [name for name in line.launch.flags if "_" in name and canonical(name) in FIELDS]
    if not wrong:
        return None
    right = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
    return Broken(", ".join(f"--{name}" for name in wrong), f"write {right}")


BATCH_RULES = (
    Rule(
        name="micro-batch-given",
        holds="a micro-batch size is needed",
        source=_VALIDATE,
        broken=_micro_batch,
        launchers=ARGPARSE,
    ),
    Rule(
        name="batch-divides",
        holds="the global batch must be a multiple of micro-batch x data-parallel size",
        source=f"core/num_microbatches_calculator.py:340, {CORE}; megatron_args.py:1003, {SWIFT}",
        broken=_batch,
    ),
    Rule(
        name="rampup-has-three-numbers",
        holds="a ramp-up of the batch is three numbers",
        source=f"core/num_microbatches_calculator.py:233, {CORE}",
        broken=_rampup_form,
        launchers=ARGPARSE,
    ),
    Rule(
        name="rampup-reaches-batch",
        holds="a ramp-up must lead to the global batch in whole increments",
        source=f"core/num_microbatches_calculator.py:429, {CORE}",
        broken=_rampup_steps,
        launchers=ARGPARSE,
    ),
    Rule(
        name="rampup-by-samples",
        holds="the batch ramps up only in training by samples",
        source=_VALIDATE,
        broken=_rampup_iterations,
        launchers=ARGPARSE,
    ),
    Rule(
        name="iterations-or-samples",
        holds="a run is measured in iterations or in samples, not in both",
        source=_VALIDATE,
        broken=_one_measure,
        launchers=ARGPARSE,
    ),
    Rule(
        name="one-warmup",
        holds="warm-up is given as a fraction or as a number",
        source=_VALIDATE,
        broken=_one_warmup,
        launchers=ARGPARSE,
    ),
    Rule(
        name="learning-rates-in-order",
        holds="the least learning rate must not exceed the rate",
        source=_VALIDATE,
        broken=_rates,
        launchers=ARGPARSE,
    ),
    Rule(
        name="interleaved-groups",
        holds="chunks of stages need groups of at least as many micro-batches as stages, and no "
        "fewer micro-batches than a group",
        source=f"core/pipeline_parallel/schedules.py:995-1003, {CORE}",
        broken=_interleaved,
        severity="refused-at-first-step",
    ),
    Rule(
        name="interleaved-remainder",
        holds="the last group of micro-batches must be empty or at least as large as the stages",
        source=f"core/pipeline_parallel/schedules.py:1007-1015, {CORE}",
        broken=_interleaved_rest,
        severity="refused-at-first-step",
    ),
    Rule(
        name="context-divides-sequence",
        holds="the sequence must be a multiple of twice the context size",
        source=_VALIDATE,
        broken=_context,
        launchers=ARGPARSE | _OF_BRIDGE,
    ),
    Rule(
        name="positions-hold-sequence",
        holds="there must be a position for every token",
        source=_VALIDATE,
        broken=_positions,
        launchers=ARGPARSE,
    ),
    Rule(
        name="one-packing",
        holds="data are packed in one way",
        source=f"training/config.py, validate, {BRIDGE}",
        broken=_one_packing,
        launchers=_OF_BRIDGE,
    ),
    Rule(
        name="packing-and-micro-batch",
        holds="a packed data set needs micro-batch 1, and packing in the batch more than 1",
        source=f"training/config.py, validate, {BRIDGE}",
        broken=_packed_samples,
        launchers=_OF_BRIDGE,
    ),
    Rule(
        name="energon-packing",
        holds="Energon's own packing works with one stage and micro-batch 1",
        source=f"training/config.py, validate, {BRIDGE}",
        broken=_energon,
        launchers=_OF_BRIDGE,
    ),
    Rule(
        name="lengths-agree",
        holds="the model's and the data's sequence length must be equal",
        source=f"training/config.py, validate, {BRIDGE}",
        broken=_data_length,
        launchers=_OF_BRIDGE,
    ),
    Rule(
        name="grouped-lengths-or-padding-free",
        holds="samples are grouped by length or joined without padding",
        source=f"megatron_args.py:852, {SWIFT}",
        broken=_grouped_lengths,
        launchers=_OF_SWIFT,
    ),
    Rule(
        name="packing-not-lazy",
        holds="packing needs all lengths before training",
        source=f"base_args.py:165, {SWIFT}",
        broken=_lazy,
        launchers=_OF_SWIFT,
    ),
    Rule(
        name="renamed-flags",
        holds="these flags are of older versions and end the program",
        source=_VALIDATE,
        broken=_renamed,
        launchers=ARGPARSE,
    ),
    Rule(
        name="flag-spelling",
        holds="names must be written in full and with dashes",
        source=f"training/arguments.py, parse_args (allow_abbrev=False), {MEGATRON_LM}",
        broken=_spelling,
        launchers=frozenset((Launcher.MEGATRON_LM,)),
    ),
)

"""Export for Megatron-LM (core 0.16.1): flags of the split and the batch, and packs for Energon."""

from collections.abc import Iterator

from omnibal.job.plan import Plan
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.trainers.export.energon import FOLDER, energon_files, energon_notes, without_packs
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.layout import split_flags
from omnibal.trainers.export.megatron_flags import (
    Batch,
    Flags,
    as_flags,
    flag_lines,
    fp8_flags,
    join_command,
    launch_variables,
    parallel_fields,
    plan_layout,
    recompute_fields,
    recomputed_encoders,
    torchrun,
)

_PROGRAM = "YOUR_TRAINING_SCRIPT.py"


def export(given: ExportInput) -> Exported:
    """Write a plan's flags for Megatron-LM's launcher, and its packs for Energon."""
    plan, batch, files = given.plan, Batch.of(given), energon_files(given)
    layout, has_ranks = plan_layout(plan), plan.parallel.data > 1
    flags = {
        **as_flags(parallel_fields(plan)),
        **_layer_flags(plan),
        "seq-length": str(batch.sequence_length),
        "micro-batch-size": "1",
        "global-batch-size": str(given.packs_per_step),
        **({} if given.full_steps is None else {"train-iters": str(given.full_steps)}),
        "calculate-per-token-loss": None,
        "use-distributed-optimizer": None,
        **({"overlap-grad-reduce": None, "overlap-param-gather": None} if has_ranks else {}),
        **({} if plan.precision == "fp32" else {"bf16": None}),
        **fp8_flags(plan),
        "pretrained-checkpoint": "$MODEL",
        "load": "$OUTPUT",
        "save": "$OUTPUT",
        "save-interval": "500",
        "lr": "$LR",
    }
    if files:
        flags["dataloader-type"] = "external"
        flags["data-path"] = f"$EXPORT/{FOLDER}/meta.yaml"
        flags["num-workers"] = str(given.workers)
    return Exported(
        files=files,
        variables=launch_variables(given, SCRIPT=_PROGRAM),
        command=join_command([torchrun(plan, '"$SCRIPT"'), *flag_lines(flags)]),
        settings=f"layout in full: {layout.text}\nlayout in short: {layout.short_text}\n",
        given_up=tuple(_given_up(plan, batch, bool(files))),
        notes=(*_notes(plan), *energon_notes(given, files)),
    )


def layer_flags(plan: Plan) -> list[str]:
    """Return flags of the split and recomputation."""
    return flag_lines(_layer_flags(plan))


def _layer_flags(plan: Plan) -> Flags:
    encoders = {"recompute-vision": None} if recomputed_encoders(plan) else {}
    return {**split_flags(plan_layout(plan)), **as_flags(recompute_fields(plan)), **encoders}


def _given_up(plan: Plan, batch: Batch, has_packs: bool) -> Iterator[str]:
    if plan.parallel.pipeline > 1:
        yield from batch.padding_notes(
            "Megatron-LM's own launcher sets variable_seq_lengths to false, so that stages "
            "exchange micro-batches of one length and every pack is padded to the longest"
        )
    if not has_packs:
        yield without_packs("Megatron-LM")


def _notes(plan: Plan) -> Iterator[str]:
    yield (
        f"`{_PROGRAM}` is yours, with the flags of the model itself and the tokenizer: Megatron-LM "
        "has none that are the same for all vision-language models."
    )
    language = plan.model.language
    unusual = {
        "--squared-relu": language.activation == "squared_relu",
        "no --swiglu": language.activation != "gated",
        "--position-embedding-type learned_absolute": language.positions == "learned",
        "--normalization LayerNorm": language.norm_bias or language.activation == "gelu",
        "no --disable-bias-linear": language.bias,
        "--softmax-type learnable": language.sinks,
    }
    flags = ", ".join(flag for flag, is_needed in unusual.items() if is_needed)
    if flags:
        yield f"{plan.model.name} is built with {flags}."
    yield (
        "The first stage holds the encoders beside its layers of the language model, as in "
        "examples/multimodal; the split counts layers of the language model alone."
    )
    if plan.schedule.chunks > 1:
        yield (
            "Your model's provider is called for every chunk of a stage (`vp_stage`), and must "
            "build the encoders for the first chunk of the first stage alone. Messages between "
            "stages overlap with computation, as they do without "
            "`--no-overlap-p2p-communication`; two stages need that."
        )
    if plan.frozen:
        yield (
            f"Frozen in the plan: {', '.join(plan.frozen)}. In examples/multimodal `--freeze-LM` "
            "and `--freeze-ViT` say so; freeze projectors in your model."
        )
    encoders = recomputed_encoders(plan)
    if encoders:
        yield (
            f"All layers of {encoders} are recomputed: `--recompute-vision` is a flag "
            "of examples/multimodal's launcher, which Megatron-LM's own parser does not have; see "
            "to it that your script takes it."
        )
    elif recompute_fields(plan)["recompute_num_layers"] and len(model_parts(plan.model)) > 1:
        yield (
            f"The recompute flags are of {LANGUAGE} alone; no layer of an encoder is recomputed. "
            "See to it that your model gives its encoders a configuration of their own."
        )

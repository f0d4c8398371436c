"""Export for Megatron-LM (core 0.16.1): parallel, layer and batch flags, and packs for Energon."""

from collections.abc import Iterator
from typing import Any

from omnibal.job.plan import Plan
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.trainers.export import energon
from omnibal.trainers.export import megatron_flags as core
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.layout import split_flags

_PROGRAM = "YOUR_TRAINING_SCRIPT.py"


def export(given: ExportInput) -> Exported:
    """Return a plan's launch command for Megatron-LM, its packs for Energon, and deviations."""
    plan, batch, files = given.plan, core.Batch.measure(given), energon.energon_files(given)
    layout, has_replicas = core.plan_layout(plan), plan.parallel.data > 1
    fields = {
        **core.parallel_fields(plan),
        **_layer_fields(plan),
        "seq_length": batch.sequence_length,
        "micro_batch_size": 1,  # a pack
        "global_batch_size": given.packs_per_step,
        "train_iters": given.full_steps,
        "calculate_per_token_loss": True,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": has_replicas,
        "overlap_param_gather": has_replicas,
        "bf16": plan.precision != "fp32",
        **core.fp8_fields(plan),
        "pretrained_checkpoint": "$MODEL",
        "load": "$OUTPUT",
        "save": "$OUTPUT",
        "save_interval": 500,
        "lr": "$LR",
        "dataloader_type": "external" if files else None,
        "data_path": f"$EXPORT/{energon.ENERGON_FOLDER}/meta.yaml" if files else None,
        "num_workers": given.workers if files else None,
    }
    return Exported(
        files=files,
        variables=core.launch_variables(given, SCRIPT=_PROGRAM),
        command=core.join_command([core.torchrun(plan, '"$SCRIPT"'), *core.flag_lines(fields)]),
        settings=f"layout in full: {layout.text}\nlayout in short: {layout.short_text}\n",
        deviations=tuple(_megatron_lm_deviations(plan, batch, bool(files))),
        notes=(*_megatron_lm_notes(plan), *energon.energon_notes(given, files)),
    )


def layer_flags(plan: Plan) -> list[str]:
    """Return command-line flags of the pipeline split and recomputation."""
    return core.flag_lines(_layer_fields(plan))


def _layer_fields(plan: Plan) -> dict[str, Any]:
    return {
        **split_flags(core.plan_layout(plan)),
        **core.recompute_fields(plan),
        "recompute_vision": bool(core.recomputed_encoders(plan)),
    }


def _megatron_lm_deviations(plan: Plan, batch: core.Batch, has_packs: bool) -> Iterator[str]:
    if plan.parallel.pipeline > 1:
        yield from batch.padding_notes(
            "Megatron-LM's launcher sets variable_seq_lengths to false: stages exchange "
            "micro-batches of one length, and every pack is padded to the longest"
        )
    if not has_packs:
        yield energon.without_packs("Megatron-LM")


def _megatron_lm_notes(plan: Plan) -> Iterator[str]:
    yield (
        f"`{_PROGRAM}` is yours, with flags of the model and the tokenizer: Megatron-LM has no "
        "common flags for vision-language models."
    )
    language = plan.model.language
    # Flags unlike Megatron-LM's defaults or common launch lines, and whether the model needs them.
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
    yield "The first stage holds the encoders too; the split counts only language layers."
    if plan.schedule.chunks > 1:
        yield (
            "Your model provider is called for every chunk of a stage (`vp_stage`): build the "
            "encoders only for the first chunk of the first stage. Do not set "
            "`--no-overlap-p2p-communication`: two stages need overlapped P2P."
        )
    if plan.frozen:
        yield (
            f"Frozen in the plan: {', '.join(plan.frozen)}. Flags of examples/multimodal are "
            "`--freeze-LM` and `--freeze-ViT`; freeze projectors in your model."
        )
    encoders = core.recomputed_encoders(plan)
    if encoders:
        yield (
            f"All layers of {encoders} are recomputed: `--recompute-vision` is a flag of "
            "examples/multimodal, not of Megatron-LM's parser; your script must take it."
        )
    elif core.recompute_fields(plan)["recompute_num_layers"] and len(model_parts(plan.model)) > 1:
        yield (
            f"The recompute flags are for {LANGUAGE}, and no layer of an encoder is recomputed: "
            "give encoders a TransformerConfig without them."
        )

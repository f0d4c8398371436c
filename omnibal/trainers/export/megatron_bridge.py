"""Export for Megatron-Bridge (commit 003e863): recipe overrides, and packs for Energon."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omnibal.job.plan import Plan
from omnibal.model.fp8 import FP8_FORMAT, TRAINED_FP8
from omnibal.model.units import LANGUAGE
from omnibal.trainers.export import megatron_flags as core
from omnibal.trainers.export.energon import energon_files, energon_notes, without_packs
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.layout import LAYOUT_WORDS, PPLayout

_RUNNER = 'scripts/training/run_recipe.py --recipe "$RECIPE"'
# Overrides by shell variables, which the plan does not decide. Paths are quoted for Hydra.
_USER_OVERRIDES = (
    "\"checkpoint.pretrained_checkpoint='$MODEL'\"",
    "\"checkpoint.save='$OUTPUT'\"",
    "optimizer.lr=$LR",
)
_FROZEN = {
    LANGUAGE: "model.freeze_language_model",
    "vision": "model.freeze_vision_model",
    "projector": "model.freeze_vision_projection",
}
_FP8 = {
    "mixed_precision.fp8": FP8_FORMAT,
    "mixed_precision.fp8_recipe": TRAINED_FP8.recipe,
    "mixed_precision.fp8_param_gather": not TRAINED_FP8.keeps_bf16_weights,
    "mixed_precision.first_last_layers_bf16": False,  # as predicted: all layers
}


def export(given: ExportInput) -> Exported:
    """Return a plan as a Megatron-Bridge command and recipe statements, and packs for Energon."""
    plan, batch, files = given.plan, core.Batch.measure(given), energon_files(given)
    values = overrides(given, batch)
    # Overrides have both in single quotes, for Hydra.
    names = given.checkpoint or plan.model.name, str(given.folder)
    checkpoint, folder = (name.replace("'", r"\'") for name in names)
    quoted = replace(given, checkpoint=checkpoint, folder=Path(folder))
    return Exported(
        files=files,
        variables=core.launch_variables(quoted, RECIPE="YOUR_RECIPE"),
        command=core.join_command(
            [core.torchrun(plan, _RUNNER), *_override_words(values), *_USER_OVERRIDES]
        ),
        settings=_recipe_statements(values, core.plan_layout(plan)),
        deviations=tuple(_bridge_deviations(plan, batch, bool(files))),
        notes=(*_bridge_notes(plan, bool(files)), *energon_notes(given, files)),
    )


def overrides(given: ExportInput, batch: core.Batch) -> Mapping[str, Any]:
    """Return values of the recipe fields that the plan sets, by dotted name."""
    plan, overlaps = given.plan, given.plan.parallel.data > 1
    return {
        **{f"model.{name}": value for name, value in core.parallel_fields(plan).items()},
        **_layer_fields(plan),
        "model.seq_length": batch.sequence_length,
        "dataset.seq_length": batch.sequence_length,
        "train.micro_batch_size": 1,
        "train.global_batch_size": given.packs_per_step,
        **({} if given.full_steps is None else {"train.train_iters": given.full_steps}),
        # The planned loss is a mean over all tokens of a step: sum gradients, and divide once.
        "model.calculate_per_token_loss": True,
        "ddp.average_in_collective": False,
        "ddp.use_distributed_optimizer": True,
        "ddp.overlap_grad_reduce": overlaps,
        "ddp.overlap_param_gather": overlaps,
        **(_FP8 if plan.precision == "fp8" else {}),
        **{_FROZEN[part]: True for part in plan.frozen if part in _FROZEN},
    }


def layer_flags(plan: Plan) -> list[str]:
    """Return command-line overrides of the pipeline split and recomputation."""
    return _override_words(_layer_fields(plan))


def _layer_fields(plan: Plan) -> Mapping[str, Any]:
    """Return all fields of the pipeline split and recomputation; None resets a recipe's."""
    layout = core.plan_layout(plan)
    first, last = (None, None) if layout.is_even else layout.end_layers or (None, None)
    in_full = first is None and not layout.is_even
    has_chunks = layout.virtual > 1
    # On two ranks, batched P2P mixes up messages of chunks: one rank is both neighbors.
    messages = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    fields = {
        "virtual_pipeline_model_parallel_size": layout.virtual if has_chunks else None,
        **(messages if has_chunks else {}),
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": layout.short_text if in_full else None,
        **core.recompute_fields(plan),
    }
    return {f"model.{name}": value for name, value in fields.items()}


def _override_words(values: Mapping[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        # Quotes protect a layout's signs from the shell; Hydra gets the text without quotes.
        quoted = isinstance(value, str) and not value.isalnum()
        return f"'{value}'" if quoted else "null" if value is None else str(value)

    return [f"{name}={text(value)}" for name, value in values.items()]


def _recipe_statements(values: Mapping[str, Any], layout: PPLayout) -> str:
    lines = [f"cfg.{name} = {value!r}" for name, value in values.items()]
    lists = [f"    {[LAYOUT_WORDS[unit] for unit in chunk]}," for chunk in layout.chunks]
    begin = "# in a recipe, whose ConfigContainer is cfg"
    title = "# the split as lists, for a recipe's own table of layouts"
    return "\n".join([begin, *lines, title, "layout = [", *lists, "]\n"])


def _bridge_deviations(plan: Plan, batch: core.Batch, has_packs: bool) -> Iterator[str]:
    if plan.parallel.pipeline > 1 or plan.parallel.expert > 1:
        yield from batch.padding_notes(
            "Megatron-Bridge pads to the sequence length when it trains a vision-language model "
            "on several pipeline stages or expert-parallel ranks"
        )
    if not has_packs:
        yield without_packs("Megatron-Bridge")
    encoders = core.recomputed_encoders(plan)
    if encoders:
        yield (
            f"All layers of {encoders} are recomputed in the plan, not by the command: set your "
            "model provider's own field, or the first stage takes more memory than planned."
        )
    unknown = ", ".join(part for part in plan.frozen if part not in _FROZEN)
    if unknown:
        yield f"The plan freezes {unknown}, with no field of Megatron-Bridge: set it in the model."


def _bridge_notes(plan: Plan, has_packs: bool) -> Iterator[str]:
    yield (
        "`YOUR_RECIPE` is the recipe of your model, whose other fields stay unchanged. The "
        "overrides also reset fields that could set another split."
    )
    yield "The first stage holds the encoders too; the split counts only language layers."
    if plan.precision == "fp8":
        yield "`mixed_precision` of the recipe must be a MixedPrecisionConfig: its fields are set."
    if has_packs:
        yield (
            "Its EnergonProvider does not pass `parallel_shard_iters`, which Energon needs to keep "
            "the order: write a DatasetProvider that returns `get_savable_loader(planned_dataset("
            "...))`. Untested: its step with joined packs of your TaskEncoder."
        )

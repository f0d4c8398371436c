"""A plan as ms-swift's ordered rows and flags, for its Megatron and DeepSpeed back ends.

From ms-swift 4.6.0: swift/dataset/packing.py (packs by next fit, `sequential`),
swift/megatron/trainers/base.py and swift/dataloader/shard.py (without shuffling, pack k goes to
rank k modulo the ranks), swift/megatron/arguments/megatron_args.py (flags and their defaults).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omnibal.base.errors import UserError
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import ALL_LINEAR, AdapterConfig
from omnibal.model.encoders import ImagesEncoder, TilesEncoder
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.trainers.export import megatron_flags as core
from omnibal.trainers.export.exported import Exported, ExportInput, Writer, script_file, shell_word
from omnibal.trainers.export.layout import all_or_none, split_flags
from omnibal.trainers.export.ms_swift_records import write_rows
from omnibal.trainers.export.reading_order import sample_numbers

_ROWS, _CHECK = "train.jsonl", "check_packs.py"
_DEEPSTACK_NAME = "deepstack_merger"  # in names of deepstack projectors' parameters
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}  # by the plan's precision
SwiftFlags = dict[str, Any]  # values of flags by name without dashes; None is left out


def export(given: ExportInput) -> Exported:
    """Return the ordered rows and the command of `megatron sft`."""
    plan, overlaps = given.plan, given.plan.parallel.data > 1
    flags = {
        **_data_flags(given),
        **_set_fields(core.parallel_fields(plan)),
        **_swift_layer_flags(plan),
        "attention_backend": "flash",
        "micro_batch_size": 1,
        "global_batch_size": given.packs_per_step,
        "train_iters": given.full_steps,
        "train_dataloader_shuffle": False,
        # As predicted: sharded state, fp32 gradients, overlapped reduction.
        "use_distributed_optimizer": True,
        "accumulate_allreduce_grads_in_fp32": True,
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps,
        **_frozen_flags(plan),
        "torch_dtype": _DTYPES[plan.precision],
        **core.fp8_fields(plan),
    }
    return _make_exported(given, "megatron sft", {"lr": "$LR", **flags})


def export_deepspeed(given: ExportInput) -> Exported:
    """Return the ordered rows and the command of `swift sft` with DeepSpeed's ZeRO-3."""
    plan = given.plan
    flags = {
        **_data_flags(given),
        "deepspeed": "zero3",
        "attn_impl": "flash_attn",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": given.packs_per_step // plan.parallel.data,
        "max_steps": given.full_steps,
        "train_dataloader_shuffle": False,
        "dataloader_drop_last": True,
        "gradient_checkpointing": bool(all_or_none(plan.stages_at(0), LANGUAGE)),
        "vit_gradient_checkpointing": _recomputes_encoders(plan),
        **_frozen_flags(plan),
        "torch_dtype": _DTYPES[plan.precision],
    }
    return _make_exported(given, "swift sft", {"learning_rate": "$LR", **flags})


def _make_exported(given: ExportInput, program: str, flags: SwiftFlags) -> Exported:
    order, annotations = given.order, given.annotations
    files: dict[str, Writer] = {} if order is None else {_CHECK: script_file(_CHECK)}
    if order is not None and annotations is not None:
        samples, of_tiles = sample_numbers(order, given.lengths), _takes_tiles(given.plan)
        files[_ROWS] = lambda path: write_rows(annotations, samples, path, of_tiles=of_tiles)
    deviations = []
    if annotations is not None and annotations.augmented_sources:
        deviations.append(
            f"Images of {', '.join(annotations.augmented_sources)} are degraded at random "
            "(data_augment), and ms-swift reads them unchanged."
        )
    return Exported(
        files=files,
        variables=core.launch_variables(given),
        command=_shell_command(given.plan, program, flags),
        deviations=tuple(deviations),
        notes=tuple(_swift_notes(given)),
    )


def _takes_tiles(plan: Plan) -> bool:
    return any(isinstance(tower, TilesEncoder) for tower in plan.model.encoders.values())


def _data_flags(given: ExportInput) -> SwiftFlags:
    """Return flags for ordered rows packed by next fit."""
    length = given.longest_pack  # with this cap, next fit makes the plan's packs
    return {
        "dataset": None if given.order is None else f"$EXPORT/{_ROWS}",
        "dataset_shuffle": False,
        "split_dataset_ratio": 0,
        "strict": True,  # an unusable row ends the run: without it all packs would shift
        "max_length": length,
        "truncation_strategy": "delete",
        "packing": True,
        "packing_strategy": "sequential",
        "packing_length": length,
        "packing_num_proc": 1,
    }


def layer_flags(plan: Plan) -> list[str]:
    """Return flag lines of the split and recomputation; of encoders only if the model has any."""
    flags = _swift_layer_flags(plan)
    return _flag_lines({k: v for k, v in flags.items() if plan.model.encoders or "vit" not in k})


def _swift_layer_flags(plan: Plan) -> SwiftFlags:
    recompute = _set_fields(core.recompute_fields(plan))
    return {
        **(split_flags(core.plan_layout(plan)) if plan.parallel.pipeline > 1 else {}),
        **(recompute or {"recompute_granularity": "none"}),  # ms-swift's default is `selective`
        "vit_gradient_checkpointing": _recomputes_encoders(plan),
    }


def _set_fields(fields: Mapping[str, Any]) -> SwiftFlags:
    """Return the fields that are neither False nor None."""
    return {name: value for name, value in fields.items() if value}


def _flag_lines(flags: SwiftFlags) -> list[str]:
    """Return a line per flag that is not None, as ms-swift spells flags and switches."""
    words = {
        name.replace("-", "_"): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in flags.items()
        if value is not None
    }
    return [f"--{name} {shell_word(word)}" for name, word in words.items()]


def _recomputes_encoders(plan: Plan) -> bool:
    recomputed = {name: bool(all_or_none(plan.stages_at(0), name)) for name in plan.model.encoders}
    return _common_value(recomputed, "recomputes the layers of")


def _frozen_flags(plan: Plan) -> SwiftFlags:
    """Return flags of trained and frozen parts, and of adapters."""
    encoders = plan.model.encoders
    flags: SwiftFlags = {"tuner_type": "full", "freeze_llm": LANGUAGE in plan.frozen}
    if plan.adapters is not None:
        flags |= _adapter_flags(plan.adapters, has_encoders=bool(encoders))
    if not encoders:
        return flags
    tower = _common_value({name: name in plan.frozen for name in encoders}, "freezes")
    projectors = [part for part in model_parts(plan.model) if part.endswith("projector")]
    aligner = _common_value({part: part in plan.frozen for part in projectors}, "freezes")
    # Deepstack projectors belong to ms-swift's aligner, but to this planner's encoder.
    has_deepstack = any(encoder.deepstack_features for encoder in encoders.values())
    if tower != aligner and has_deepstack and plan.adapters is None:
        flags["freeze_parameters_regex" if tower else "trainable_parameters_regex"] = (
            _DEEPSTACK_NAME
        )
    return flags | {"freeze_vit": tower, "freeze_aligner": aligner}


def _adapter_flags(adapters: AdapterConfig, *, has_encoders: bool) -> SwiftFlags:
    flags = {
        "tuner_type": "lora",
        "lora_rank": adapters.rank,
        "lora_alpha": f"{adapters.alpha:g}",
        "use_rslora": adapters.rank_stabilized,
    }
    if adapters.is_of_all:
        return flags | {"target_modules": ALL_LINEAR}
    if adapters.is_pattern:
        return flags | {"target_regex": adapters.targets[0]}
    # Linears of encoders may have the same names.
    within = ".*language_model.*" if has_encoders else ".*"
    ends = "|".join(map(re.escape, adapters.targets))
    return flags | {"target_regex": rf"{within}\.({ends})"}


def _common_value(parts: Mapping[str, bool], verb: str) -> bool:
    """Return the value of all parts; raise if they differ."""
    if len(set(parts.values())) > 1:
        some = [name for name, holds in parts.items() if holds]
        others = [name for name, holds in parts.items() if not holds]
        raise UserError(
            f"the plan {verb} {', '.join(some)}, not {', '.join(others)}; ms-swift has one switch"
        )
    return any(parts.values())


def _shell_command(plan: Plan, program: str, flags: SwiftFlags) -> str:
    per_node, nodes = core.devices_and_nodes(plan)
    environment = {**_image_size_variables(plan), "NPROC_PER_NODE": per_node}
    lines = [" ".join(f"{name}={value}" for name, value in environment.items())]
    if nodes > 1:
        names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
        lines.append(" ".join([f"NNODES={nodes}", *(f'{name}="${name}"' for name in names)]))
    paths = {"model": "$MODEL", "output_dir": "$OUTPUT"}
    return core.join_command([*lines, program, *_flag_lines({**paths, **flags})])


def _image_size_variables(plan: Plan) -> SwiftFlags:
    """Return environment variables with which ms-swift resizes images as counted."""
    sizes: SwiftFlags = {}
    for tower in plan.model.encoders.values():
        if isinstance(tower, TilesEncoder):
            sizes |= {"INPUT_SIZE": tower.image_size, "MAX_NUM": tower.tiling.max_dynamic_patch}
        elif isinstance(tower, ImagesEncoder) and tower.resize == "smart":
            sizes |= {"MIN_PIXELS": tower.min_pixels, "MAX_PIXELS": tower.max_pixels}
    return sizes


def _swift_notes(given: ExportInput) -> Iterator[str]:
    yield "MODEL is the folder or the name of the model's checkpoint."
    if given.order is None:
        yield "The plan is of shapes only, without rows to train: give your own --dataset."
        return
    if given.annotations is None:
        yield f"Without --data {_ROWS} is left out: write rows in the order of order.parquet."
    count_command = (
        f'swift export --model "$MODEL" --dataset "$EXPORT/{_ROWS}" --to_cached_dataset true '
        f"--split_dataset_ratio 0 --dataset_shuffle false --strict true --max_length "
        f"{given.longest_pack} --output_dir counted"
    )
    yield (
        "ms-swift packs the rows itself, by the lengths that its template counts: a sample of "
        "another length shifts all packs behind it. Before training, count and compare: "
        f'`{count_command}`, then `python "$EXPORT/{_CHECK}" counted/train`. If that says "as '
        'planned", train with `--cached_dataset counted/train`, else plan with these lengths.'
    )
    yield "--strict true ends a run at an unreadable row, which else would shift the packs."
    if _takes_tiles(given.plan):
        yield (
            "ms-swift cuts every image of a sample into at most MAX_NUM tiles; InternVL's own "
            "trainer and `omnibal lengths` limit the sum over a sample's images."
        )

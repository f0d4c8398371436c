"""Export for LoongForge: a pack plan for its offline packing, and flags with lists by stage.

Read: tools/data_preprocess/vlm/offline_packing/wds_pack (cli/build_plan.py, io/webdataset_writer.py
and manifest/scan.py at 7393697), loongforge/train/arguments.py and
loongforge/data/multimodal/dataloader_provider.py (4ce92af).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.lengths import Lengths
from omnibal.data.loongforge_manifest import Manifest
from omnibal.export.energon import loader_order, stored, whole_steps
from omnibal.export.exported import Exported, ExportInput
from omnibal.export.layout import DECODER
from omnibal.export.megatron_flags import (
    Batch,
    Flags,
    batch_flags,
    command,
    flag_lines,
    optimizer_flags,
    parallel_flags,
    plan_layout,
    torchrun,
)
from omnibal.export.order_file import sample_numbers
from omnibal.export.recomputed_layers import number_of_stage
from omnibal.job.plan import Plan

PACK_PLAN = "pack_plan.jsonl"
MEDIA = ("text", "image", "video")
Namer = Callable[[int, bool], tuple[str, str]]
"""Name and medium of a sample in LoongForge's manifest, of its number in the data and whether it
has items that an encoder takes."""
_PROGRAM = "$LOONGFORGE_PATH/loongforge/train.py --config-file YOUR_MODEL.yaml"


def export(given: ExportInput) -> Exported:
    """Write a plan's packs for LoongForge's offline packing, and the flags of its trainer.

    Raises:
        UserError: a pack or a sample's record is not what LoongForge's packing takes.
    """
    plan, batch = given.files.plan, Batch.of(given)
    lines = flag_lines(
        parallel_flags(plan),
        split_flags(plan),
        recompute_flags(plan),
        batch_flags(batch),
        optimizer_flags(plan),
        {
            "max-packed-tokens": str(batch.sequence_length),
            "variable-seq-lengths": None,
            "dataloader-type": "external",
            "num-workers": str(given.workers),
        },
    )
    namer = _namer(given)
    files = {} if namer is None else {PACK_PLAN: lambda path: _write(path, given, namer)}
    return Exported(
        files=files,
        command=command([torchrun(plan, _PROGRAM), *lines, "--data-path $PACKED_WDS_DIR"]),
        given_up=tuple(_given_up(plan)),
        notes=tuple(_notes(given, batch, bool(files))),
    )


def split_flags(plan: Plan) -> Flags:
    """Layers of the language model by stage, or by chunk in model order; one stage needs none."""
    layout = plan_layout(plan)
    if layout.virtual > 1:
        of_chunks = [chunk.count(DECODER) for chunk in layout.chunks]
        return {
            "num-virtual-stages-per-pipeline-rank": str(layout.virtual),
            "custom-virtual-pipeline-layers": _listed(of_chunks),
        }
    return {"custom-pipeline-layers": _listed(layout.layers)} if layout.pipeline > 1 else {}


def recompute_flags(plan: Plan) -> Flags:
    """Recomputed layers of every chunk by stage, a number each; none where none recomputes any.

    A list needs a comma, so a single stage has Megatron's own number.
    """
    towers, parts = plan.model.towers, plan.stages_at(0)
    numbers = [
        number_of_stage([parts[part] for part in plan.parts_of(stage)], towers)
        for stage in range(plan.parallel.pipeline)
    ]
    counts = [0 if number is None else number for number in numbers]
    if not any(counts):
        return {}
    full = {"recompute-granularity": "full", "recompute-method": "block"}
    if len(counts) == 1:
        return full | {"recompute-num-layers": str(counts[0])}
    return full | {"custom-pipeline-recompute-layers": _listed(counts)}


def layer_flags(plan: Plan) -> list[str]:
    """Flags of the split and of recomputed layers alone."""
    return flag_lines(split_flags(plan), recompute_flags(plan))


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def sample_id(shard: Path, key: str) -> str:
    """Name of a shard's sample in LoongForge's manifest, of shards that lie in its `wds_dir`.

    As manifest/scan.py makes it: the shard's name without its suffix, and 16 digits of a SHA-1 of
    the shard's path within that folder and the key.
    """
    digest = hashlib.sha1(f"{shard.name}\0{key}".encode(), usedforsecurity=False).hexdigest()
    return f"{shard.stem}__{digest[:16]}"


def _namer(given: ExportInput) -> Namer | None:
    """How samples are named, if they are in shards or a manifest names them."""
    annotations, order = given.annotations, given.order
    if order is None or not len(order):
        return None
    if given.manifest is not None:
        return _of_manifest(given.manifest, given.files.steps[1])
    if annotations is None:
        return None
    first = sample_numbers(order, given.files.steps[1])[0]
    return _of_shards(annotations) if annotations.stored(int(first)).in_shard else None


def _write(path: Path, given: ExportInput, name: Namer) -> None:
    with path.open("w", encoding="utf-8") as file:
        for line in plan_lines(given, name):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def plan_lines(given: ExportInput, name: Namer) -> Iterator[dict[str, Any]]:
    """Yield the lines of pack_plan.jsonl in the order in which Energon hands out packs.

    Raises:
        UserError: samples of a pack are of several media, or one is not as LoongForge's scan takes
            it.
    """
    order, lengths = whole_steps(given), given.files.steps[1]
    assert order is not None
    rows = order.packs.samples
    numbers, tokens = sample_numbers(order, lengths), lengths.tokens[rows]
    shown = np.any([lengths.items[item][rows] > 0 for item in lengths.item_names], axis=0)
    counted = Counter[str]()
    for pack in loader_order(len(order), given.files.plan.parallel.data, given.workers):
        held = range(order.packs.offsets[pack], order.packs.offsets[pack + 1])
        found = [name(int(numbers[row]), bool(shown[row])) for row in held]
        media = sorted({medium for _, medium in found})
        if len(media) > 1:
            raise UserError(
                f"pack {pack} has samples of {' and '.join(media)}, and LoongForge takes packs of "
                "one medium; give videos a source of their own, and plan each for itself"
            )
        pack_tokens = tokens[held.start : held.stop].tolist()
        yield {
            "pack_id": f"{media[0]}_pack_{counted[media[0]]:08d}",
            "media_type": media[0],
            "sample_ids": [sample for sample, _ in found],
            "sample_token_lens": pack_tokens,
            "total_token_len": sum(pack_tokens),
        }
        counted[media[0]] += 1


def _of_manifest(manifest: Manifest, lengths: Lengths) -> Namer:
    """Names of LoongForge's own manifest, whose rows the lengths must be."""
    where, told = manifest.path, "plan with its lengths: `omnibal lengths`"
    if lengths.sample is not None or len(lengths) != len(manifest):
        raise UserError(
            f"{where} has {len(manifest):,} samples, and the plan's lengths are of "
            f"{len(lengths):,}; {told}"
        )
    other = np.flatnonzero(manifest.tokens != lengths.tokens)
    if len(other):
        row = int(other[0])
        raise UserError(
            f"{where}: sample {manifest.names[row]} has {manifest.tokens[row]:,} tokens, and row "
            f"{row} of the plan's lengths {lengths.tokens[row]:,}; {told}"
        )
    return lambda index, shown: (manifest.names[index], manifest.media[index])


def _of_shards(annotations: Annotations) -> Namer:
    """Names that LoongForge's scan will give to samples of shards."""
    return lambda index, shown: _scanned(annotations, index, shown)


def _scanned(annotations: Annotations, index: int, shown: bool) -> tuple[str, str]:
    record, where = annotations.stored(index), annotations.where(index)
    if not record.in_shard:
        raise UserError(
            f"{where} is in no shard, and other samples are; LoongForge packs samples of shards "
            "alone: write all of them as shards"
        )
    medium = _medium(record.content, where)
    if shown == (medium == "text"):
        raise UserError(
            f"{where} shows {'images' if shown else 'nothing'}, and LoongForge's scan takes it for "
            f'{medium}; write its medium as "media_type" into the record'
        )
    apart = [part for part in stored(annotations, index).parts if "." in part] if shown else []
    if apart:
        raise UserError(
            f"{where} has the member {record.name}.{apart[0]}, which LoongForge's scan takes for "
            f"one of another sample, {record.name}.{apart[0].rpartition('.')[0]}: it ends a key at "
            f"the last dot of a name; name members as {record.name}.jpg"
        )
    return sample_id(annotations.files[annotations.file[index]], record.name), medium


def _medium(content: bytes, where: str) -> str:
    """Medium that LoongForge's scan reads in a record."""
    try:
        said = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); mend or remove it") from error
    medium = str(said.get("media_type") or said.get("media") or "text").lower()
    if medium not in MEDIA:
        raise UserError(
            f"{where} has media_type {medium!r}, which LoongForge's scan leaves out; it must be "
            f"one of {', '.join(MEDIA)}"
        )
    return medium


def _given_up(plan: Plan) -> Iterator[str]:
    if recompute_flags(plan) and plan.model.encoders:
        yield (
            "The list of recomputed layers gives the first stage one number; that it also rules "
            "the encoders' layers there is read from LoongForge's own scripts (38 layers "
            "recomputed on a stage with 5 of the language model), and was not found in its code."
        )


def _notes(given: ExportInput, batch: Batch, has_packs: bool) -> Iterator[str]:
    chunks = given.files.plan.schedule.chunks > 1
    yield (
        f"`--custom-{'virtual-' if chunks else ''}pipeline-layers` counts layers of the language "
        f"model; newer LoongForge also takes `--pipeline-model-parallel-layout "
        f"'{plan_layout(given.files.plan).short_text}'`, never both."
    )
    if given.order is None:
        return
    if not has_packs:
        yield (
            f"{PACK_PLAN} is left out: LoongForge packs samples of tar shards, which its manifest "
            "knows by the shard and the key. Write the samples as shards, and export with --data "
            "of them or of the manifest; order.parquet has the packs until then."
        )
        return
    yield (
        f"Copy `{PACK_PLAN}` into `data.work_dir` of your packing config behind `python -m "
        "wds_pack.cli.scan_manifest`, in place of its steps 2 and 3, with `sample.max_token_len` "
        f"at least {batch.sequence_length}, then run `python -m wds_pack.cli.write_wds`."
    )
    yield (
        "All shards must lie in `data.wds_dir` itself, as names of samples are made of the shard's "
        "path in it. Token counts must be those of its manifest (`SELECT sample_id, token_len FROM "
        "samples`); where they are not, plan with its lengths."
    )
    yield (
        "Keep the packed data in one tar (`packed_wds.maxcount` and `maxsize` above its packs and "
        "bytes): several are read in the order of .nv-meta/split.yaml, which is drawn, and in "
        "training their parts are mixed. Leave `--data-shuffle-buffer-size` and "
        "`--data-max-samples-per-sequence` out, and do not pack again (`--packing-sft-data`)."
    )
    yield (
        f"Lines are in the order of {given.files.plan.parallel.data:,} data-parallel rank(s) with "
        f"{max(given.workers, 1)} loader process(es) each: `--num-workers {given.workers}`. For "
        "others export again with --workers."
    )

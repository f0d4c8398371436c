"""Packs for Megatron-Energon: a line per pack, with the keys of its samples."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.record_files import index_lines
from omnibal.packing.packs import ScheduledPacks
from omnibal.trainers.export.exported import ExportInput, Writer, json_file, script_file
from omnibal.trainers.export.reading_order import sample_numbers

ENERGON_FOLDER = "energon"
_MODULE, _MAKE_SHARDS = "omnibal_packs.py", "make_shards.py"
_MADE_DATASET = "samples"  # dataset and folder made by `make_shards.py`
_SHARDED_DATASET = "source"  # prefix of datasets already in shards, before the source's number
_NV_META = ".nv-meta"


def loader_order(packs: int, ranks: int, workers: int) -> np.ndarray:
    """Return the pack of every line, int64 [lines], so that rank r reads packs r, r + ranks, ...

    A rank's last pack is repeated, to be read last, up to a multiple of its loader processes
    (`workers`; 0 counts as 1). `packs` is a multiple of `ranks`.
    """
    # Energon 7.4.1 splits an unshuffled JSONL file into equal runs, one per loader process of all
    # ranks, and a rank alternates among its processes (flavors/webdataset/sharder.py,
    # `split_samples_to_workers`). So lines are sorted by rank, then by process.
    of_rank, workers = packs // ranks, max(workers, 1)
    rounds = -(-of_rank // workers)
    turn = np.minimum(np.arange(rounds * workers), max(of_rank - 1, 0))
    by_process = turn.reshape(rounds, workers).T.ravel()  # processes' runs, one after another
    return (by_process * ranks + np.arange(ranks)[:, None]).ravel()  # [ranks, lines of a rank]


def whole_steps(given: ExportInput) -> ScheduledPacks | None:
    """Return packs of all full steps, None for a plan of shapes only. Raise if no step is full."""
    if given.order is None:
        return None
    if not given.full_steps:
        raise UserError(
            f"{len(given.order):,} packs fill no step of {given.plan.parallel.data:,} ranks"
        )
    return given.order.take(np.arange(given.full_steps * given.packs_per_step))


def _find_members(annotations: Annotations, index: int) -> tuple[str, str, dict[str, Path | None]]:
    """Return the dataset, the key and the members of a sample in Energon's shards.

    Members are named without the key, the record first. A path is a file to be stored.
    """
    shown, record = annotations[index].files, annotations.read_stored(index)
    parts: dict[str, Path | None] = {"json": None}
    if record.in_shard:
        parts |= {str(file.name).removeprefix(f"{record.name}."): None for file in shown}
        return f"{_SHARDED_DATASET}{annotations.source[index]}", record.name, parts
    for number, file in enumerate(shown):
        parts[f"{number}{PurePath(file.path).suffix.lower()}"] = file.path.absolute()
    return _MADE_DATASET, f"{index:09}", parts


def energon_files(given: ExportInput) -> Mapping[str, Writer]:
    """Return writers of Energon's files by path. Empty without samples or their data."""
    order, annotations = whole_steps(given), given.annotations
    if order is None or annotations is None:
        return {}
    numbers = sample_numbers(order, given.lengths)
    ranks = given.plan.parallel.data
    lines = loader_order(len(order), ranks, given.workers)
    datasets = _find_datasets(annotations, numbers)
    counts = {"ranks": ranks, "workers": max(given.workers, 1), "lines": len(lines)}
    meta = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"path": "packs.jsonl", "aux": datasets}},
    }
    offsets = order.packs.offsets

    def write_packs(path: Path) -> None:
        written = set[int]()
        with path.open("w", encoding="utf-8") as file:
            for pack in map(int, lines):
                indices = numbers[offsets[pack] : offsets[pack + 1]].tolist()
                members = (_find_members(annotations, index) for index in indices)
                samples = [[dataset, key, list(parts)] for dataset, key, parts in members]
                # A repeated pack pads the last round of loader processes: not to be trained.
                line = {"pack": -1 if pack in written else pack, "samples": samples}
                written.add(pack)
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    files: dict[str, Writer] = {
        "packs.jsonl": write_packs,
        "packs.jsonl.idx": _write_offsets,
        "packs.json": json_file(counts),
        "meta.yaml": json_file(meta),  # JSON is YAML
        _MODULE: script_file(_MODULE),
    }
    if _MADE_DATASET in datasets:
        files["samples.jsonl"] = lambda path: _write_samples(path, numbers, annotations)
        files[_MAKE_SHARDS] = script_file(_MAKE_SHARDS)
    return {f"{ENERGON_FOLDER}/{name}": writer for name, writer in files.items()}


def _find_datasets(annotations: Annotations, numbers: np.ndarray) -> dict[str, str]:
    """Return folders by dataset name; `samples` is still to be made. Raise without an index."""
    datasets = {}
    sources, first = np.unique(annotations.source[numbers], return_index=True)
    for source, index in zip(sources.tolist(), numbers[first].tolist(), strict=True):
        if annotations.read_stored(index).in_shard:
            folder = _find_prepared_folder(annotations, source)
            datasets[f"{_SHARDED_DATASET}{source}"] = str(folder)
        else:
            datasets[_MADE_DATASET] = _MADE_DATASET
    return datasets


def _find_prepared_folder(annotations: Annotations, source: int) -> Path:
    root = annotations.entries[source].root.absolute()
    for folder in (root, *root.parents):
        if (folder / _NV_META).is_dir():
            return folder
    raise UserError(f"{root}: its shards have no index {_NV_META}; run `energon prepare` there")


def _write_offsets(path: Path) -> None:
    """Write the byte offsets of all lines of packs.jsonl and its end."""
    index = index_lines(path.with_suffix(""))
    borders = np.append(index.start, index.start[-1] + index.size[-1])
    path.write_bytes(borders.astype("<u8").tobytes())  # Energon reads little-endian uint64


def _write_samples(path: Path, numbers: np.ndarray, annotations: Annotations) -> None:
    _, first = np.unique(numbers, return_index=True)  # in order of first use, for few seeks
    with path.open("w", encoding="utf-8") as file:
        for index in numbers[np.sort(first)].tolist():
            dataset, key, parts = _find_members(annotations, index)
            if dataset == _MADE_DATASET:
                record = annotations.read_stored(index).content.decode().strip()
                files = [(part, str(file)) for part, file in parts.items() if file]
                line = {"key": key, "record": record, "files": files}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def without_packs(trainer: str) -> str:
    """Return a sentence on the few settings that an export without packs has."""
    return (
        "Only the split, recomputation and the batch are set: without packs for Energon, "
        f"{trainer} makes micro-batches of its own, which are not predicted."
    )


def energon_notes(given: ExportInput, files: Mapping[str, Writer]) -> Iterator[str]:
    """Yield sentences on how to load the packs, or on missing inputs."""
    if given.order is None:
        return
    if given.annotations is None:
        yield "Without --data no packs are written for Energon; order.parquet has their samples."
        return
    yield (
        f"`{ENERGON_FOLDER}/{_MODULE}` reads the packs: put its `PlannedPacks` before your "
        "TaskEncoder and call its `planned_dataset` in place of Energon's `get_train_dataset`."
    )
    yield (
        f"`{ENERGON_FOLDER}/packs.jsonl` is for {given.plan.parallel.data:,} data-parallel rank(s) "
        f"with `--num-workers {given.workers}`. For other numbers export again with --workers."
    )
    if f"{ENERGON_FOLDER}/samples.jsonl" not in files:
        yield "Samples are read by key from your shards: keep them on a disk of fast random reads."
        return
    yield (
        "The samples are single files, and Energon reads tar shards: run `python "
        f"{ENERGON_FOLDER}/{_MAKE_SHARDS}`, then `energon prepare {ENERGON_FOLDER}/"
        f"{_MADE_DATASET}`. Samples are in the order of their first pack, with unchanged records; "
        "a record's media are members KEY.0.jpg, KEY.1.jpg and so on, in its order."
    )

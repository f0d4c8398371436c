"""Packs for Megatron-Energon: a line per pack, with the keys of its samples.

Energon 7.4.1 splits an unshuffled JSONL file into equal runs per loader process of all ranks, and a
rank alternates among its processes (flavors/webdataset/sharder.py, `split_samples_to_workers`). So
lines are written rank by rank and process by process.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.record_files import index_lines
from omnibal.packing.packs import ScheduledPacks
from omnibal.trainers.export.exported import ExportInput, Writer, json_file, script_file
from omnibal.trainers.export.order_file import sample_numbers

FOLDER = "energon"
_MODULE, _MAKE_SHARDS = "omnibal_packs.py", "make_shards.py"
_MADE = "samples"
"""Dataset and folder made by `make_shards.py`."""
_OF_SHARDS = "source"
"""Name of datasets already in shards, before the source's number."""
_META = ".nv-meta"


def loader_order(packs: int, ranks: int, workers: int) -> np.ndarray:
    """Return the pack of every line, int64 [lines], so that rank r reads packs r, r + ranks, ...

    A rank's last pack is repeated, to be read last, up to a multiple of its loader processes
    (`workers`, 0 as 1).
    """
    each, workers = packs // ranks, max(workers, 1)
    rounds = -(-each // workers)
    turn = np.minimum(np.arange(rounds * workers), max(each - 1, 0))
    by_process = turn.reshape(rounds, workers).T.ravel()
    return (by_process * ranks + np.arange(ranks)[:, None]).ravel()


def whole_steps(given: ExportInput) -> ScheduledPacks | None:
    """Return the packs of all full steps, or None for a plan of shapes only."""
    order, full = given.order, given.packs_per_step
    if order is None:
        return None
    if len(order) < full:
        ranks = given.files.plan.parallel.data
        raise UserError(
            f"the plan has {len(order):,} packs for {ranks:,} data-parallel ranks, so that no step "
            "is full and nothing would be trained; plan for fewer ranks, or with more samples"
        )
    return order.take(np.arange(len(order) // full * full))


@dataclass(frozen=True, slots=True)
class _Stored:
    dataset: str
    key: str
    parts: tuple[str, ...]
    """Parts of member names behind the key, the record first."""
    files: tuple[Path, ...]
    """Files to be stored under these parts, except the record, or empty in a shard."""


def _find_members(annotations: Annotations, index: int) -> _Stored:
    """Find a sample's members, in its shard or to be stored."""
    sample, record = annotations[index], annotations.read_stored(index)
    shown = sample.files
    if record.in_shard:
        members = (str(file.name).removeprefix(f"{record.name}.") for file in shown)
        parts = tuple(dict.fromkeys(("json", *members)))
        return _Stored(f"{_OF_SHARDS}{annotations.source[index]}", record.name, parts, ())
    names = (f"{n}{PurePath(file.path).suffix.lower()}" for n, file in enumerate(shown))
    files = tuple(file.path.absolute() for file in shown)
    return _Stored(_MADE, f"{index:09}", ("json", *names), files)


def energon_files(given: ExportInput) -> Mapping[str, Writer]:
    """Return Energon's files for the plan's packs, or nothing without samples."""
    order, annotations = whole_steps(given), given.annotations
    if order is None or annotations is None:
        return {}
    numbers = sample_numbers(order, given.files.steps[1])
    ranks = given.files.plan.parallel.data
    lines = loader_order(len(order), ranks, given.workers)
    datasets = _datasets(annotations, numbers)
    described = {"ranks": ranks, "workers": max(given.workers, 1), "lines": len(lines)}
    meta = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"path": "packs.jsonl", "aux": datasets}},
    }
    offsets = order.packs.offsets

    def write_packs(path: Path) -> None:
        seen = set[int]()
        with path.open("w", encoding="utf-8") as file:
            for pack in map(int, lines):
                here = numbers[offsets[pack] : offsets[pack + 1]].tolist()
                found = (_find_members(annotations, index) for index in here)
                samples = [[each.dataset, each.key, each.parts] for each in found]
                line = {"pack": -1 if pack in seen else pack, "samples": samples}
                seen.add(pack)
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    written: dict[str, Writer] = {
        "packs.jsonl": write_packs,
        "packs.jsonl.idx": _write_offsets,
        "packs.json": json_file(described),
        "meta.yaml": json_file(meta),  # JSON is YAML
        _MODULE: script_file(_MODULE),
    }
    if _MADE in datasets:
        written["samples.jsonl"] = lambda path: _write_samples(path, numbers, annotations)
        written[_MAKE_SHARDS] = script_file(_MAKE_SHARDS)
    return {f"{FOLDER}/{name}": writer for name, writer in written.items()}


def _datasets(annotations: Annotations, numbers: np.ndarray) -> dict[str, str]:
    """Return dataset folders by name, including that still to be made."""
    datasets = {}
    for source in np.unique(annotations.source[numbers]):
        index = int(numbers[np.argmax(annotations.source[numbers] == source)])
        if annotations.read_stored(index).in_shard:
            datasets[f"{_OF_SHARDS}{source}"] = str(_prepared(annotations, int(source)))
        else:
            datasets[_MADE] = _MADE
    return datasets


def _prepared(annotations: Annotations, source: int) -> Path:
    """Return a prepared dataset's folder: the shards' or a parent."""
    root = annotations.roots[source].absolute()
    for folder in (root, *root.parents):
        if (folder / _META).is_dir():
            return folder
    raise UserError(
        f"{root}: the shards of source {annotations.sources[source]!r} have no {_META} there or "
        "above, by which Energon finds samples by their keys; run `energon prepare` on their folder"
    )


def _write_offsets(path: Path) -> None:
    """Write the offsets of all lines of packs.jsonl and its end."""
    index = index_lines(path.with_suffix(""))
    borders = np.append(index.start, index.start[-1] + index.size[-1])
    path.write_bytes(borders.astype("<u8").tobytes())


def _write_samples(path: Path, numbers: np.ndarray, annotations: Annotations) -> None:
    """Write samples outside shards once, in order of first use."""
    _, first = np.unique(numbers, return_index=True)
    with path.open("w", encoding="utf-8") as file:
        for index in numbers[np.sort(first)].tolist():
            found = _find_members(annotations, index)
            if found.dataset == _MADE:
                record = annotations.read_stored(index).content.decode().strip()
                names = list(zip(found.parts[1:], map(str, found.files), strict=True))
                line = {"key": found.key, "record": record, "files": names}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")


def without_packs(trainer: str) -> str:
    """Return a sentence on settings missing without packs."""
    return (
        "Only the split, recomputation and the batch are told: without packs for Energon, "
        f"{trainer} makes micro-batches of its own, and the prediction is not of those."
    )


def energon_notes(given: ExportInput, files: Mapping[str, Writer]) -> Iterator[str]:
    """Yield sentences on how to load the packs, or on missing inputs."""
    if given.order is None:
        return
    if given.annotations is None:
        yield (
            "Without --data no packs are written for Energon; order.parquet says which samples "
            "make them, and in which order."
        )
        return
    yield (
        f"`{FOLDER}/{_MODULE}` reads the packs: put its `PlannedPacks` before your TaskEncoder and "
        "call its `planned_dataset` in place of Energon's `get_train_dataset`."
    )
    yield (
        f"`{FOLDER}/packs.jsonl` is in the order of {given.files.plan.parallel.data:,} "
        f"data-parallel rank(s) with {max(given.workers, 1)} loader process(es) each: "
        f"`--num-workers {given.workers}`. For others export again with --workers."
    )
    if f"{FOLDER}/samples.jsonl" in files:
        yield (
            f"The samples are files of their own, and Energon finds samples by key in tar shards: "
            f"run `python {FOLDER}/{_MAKE_SHARDS}`, then `energon prepare {FOLDER}/{_MADE}`. The "
            "shards are in the order in which packs need them. Their records are as they stand in "
            "their files; what a record shows stands behind its key as 0.jpg, 1.jpg and so on, in "
            "its order."
        )
    else:
        yield (
            "Samples are read by key from your shards, in the plan's order: keep them on a disk "
            "that is fast at random reads."
        )

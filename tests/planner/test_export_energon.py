"""Energon packs, read by a copy of its algorithm. From Energon 7.4.1: flavors/webdataset/sharder.py
(`split_samples_to_workers`: equal runs of lines for all loader processes of all ranks), loader.py
(a rank alternates between its processes) and flavors/jsonl/ijsonl.py (offsets)."""

import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from export_cases import MICRO_BATCHES, given_of, places_of, plan_files, random_packs, stages_of
from length_cases import lengths_of
from plan_cases import MODEL
from shard_cases import make_samples, write_lines, write_shards

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations, StoredRecord
from omnibal.model.parallel import Parallel
from omnibal.model.targets import TargetName
from omnibal.trainers.export import megatron_lm
from omnibal.trainers.export.energon import energon_files, loader_order, whole_steps
from omnibal.trainers.export.exported import ExportInput

SAMPLES = 10_000


def energon_reads(lines: list, ranks: int, workers: int) -> list[list]:
    """Return the lines that every rank reads from a JSONL file, in order."""
    processes = ranks * max(workers, 1)
    assert len(lines) % processes == 0  # else some processes have an extra line, in another order
    each = len(lines) // processes
    read = []
    for rank in range(ranks):
        first = rank * max(workers, 1) * each
        runs = [lines[first + w * each : first + (w + 1) * each] for w in range(max(workers, 1))]
        read.append([run[turn] for turn in range(each) for run in runs])
    return read


class TextShard:
    """Annotations of text in a single shard, without a file."""

    files = (Path("all.tar"),)

    def __init__(self, samples: int, root: Path = Path()) -> None:
        self.file = self.source = np.zeros(samples, np.int32)
        self.sources, self.entries = ("a",), (SimpleNamespace(root=root),)

    def read_stored(self, index: int) -> StoredRecord:
        return StoredRecord(b"{}", f"{index:06}", True)

    def where(self, index: int) -> str:
        return f"sample {index}"

    def __getitem__(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(files=())


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_energon_hands_every_rank_its_packs_in_order(seed, ranks, tmp_path):
    """Prevents packs that Energon gives to another rank or step than planned."""
    workers, rng = (0, 2, 3)[seed], np.random.default_rng(seed)
    lengths = lengths_of(tokens=rng.integers(10, 300, SAMPLES), tiles=np.zeros(SAMPLES))
    sizes = {"parallel": Parallel(pipeline=1, data=ranks)}
    files = plan_files(random_packs(SAMPLES, 20, rng), lengths, stages_of(MODEL, 4), **sizes)
    given = given_of(files, TargetName.MEGATRON_LM, None, workers)
    (tmp_path / ".nv-meta").mkdir()
    given = replace(given, annotations=TextShard(SAMPLES, tmp_path))
    energon_files(given)["energon/packs.jsonl"](tmp_path / "packs.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "packs.jsonl").read_text().splitlines()]
    run = given.files.steps[0]
    whole, places = np.bincount(run.step) == MICRO_BATCHES * ranks, places_of(run)
    planned = [
        [places[place] for place in sorted(places) if place[1] == rank and whole[place[0]]]
        for rank in range(ranks)
    ]
    for rank, read in enumerate(energon_reads(lines, ranks, workers)):
        trained, filling = read[: len(planned[rank])], read[len(planned[rank]) :]
        assert [[int(key) for _, key, _ in line["samples"]] for line in trained] == planned[rank]
        assert [line["pack"] for line in trained] == list(range(rank, len(trained) * ranks, ranks))
        assert all(line["pack"] == -1 for line in filling) and len(filling) < max(workers, 1)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Return the meta of a file of records with pictures, and the records."""
    folder = tmp_path_factory.mktemp("photos")
    records = make_samples(folder)
    return write_lines(folder, records), records


def make_input(
    annotations: Annotations, name=TargetName.MEGATRON_LM, workers: int = 0
) -> ExportInput:
    count = len(annotations)
    shown = np.array([len(annotations[index].files) for index in range(count)])
    lengths = lengths_of(tokens=np.arange(10, 10 + count), tiles=shown)
    packs = random_packs(count, 3, np.random.default_rng(0))
    given = given_of(plan_files(packs, lengths, stages_of(MODEL, 1, 3)), name, workers=workers)
    return replace(given, annotations=annotations)


def write(files: dict, folder: Path) -> None:
    for name, writer in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        writer(folder / name)


def test_files_become_shards_with_the_keys_of_the_packs(photos, tmp_path):
    """Prevents packs that name keys or members missing from their shards."""
    meta, records = photos
    annotations = Annotations.open(meta)
    given = make_input(annotations)
    write(megatron_lm.export(given).files, tmp_path)
    folder = tmp_path / "energon"
    made = [sys.executable, str(folder / "make_shards.py"), "--samples-per-shard", "7"]
    assert subprocess.run(made, check=False).returncode == 0
    made_of, named = {}, 0
    for path in (folder / "samples").iterdir():
        with tarfile.open(path) as shard:
            made_of |= {member.name: shard.extractfile(member).read() for member in shard}
    lines, order = (folder / "packs.jsonl").read_text().splitlines(), whole_steps(given)
    packs = [order.packs[pack].tolist() for pack in range(len(order))]
    for line, pack in zip(lines, packs, strict=True):
        for (dataset, key, parts), index in zip(json.loads(line)["samples"], pack, strict=True):
            record, *shown = (made_of[f"{key}.{part}"] for part in parts)
            assert dataset == "samples" and json.loads(record) == records[index]
            assert shown == [file.path.read_bytes() for file in annotations[index].files]
            named += len(parts)
    assert named == len(made_of) > 20
    again = subprocess.run(made, check=False, capture_output=True, text=True)
    assert again.returncode == 1 and "exists already" in again.stderr


def test_offsets_are_of_the_lines(photos, tmp_path):
    """Prevents an index that points Energon to the middle of a line."""
    given = make_input(Annotations.open(photos[0]), TargetName.MEGATRON_BRIDGE, workers=2)
    write(energon_files(given), tmp_path)
    content = (tmp_path / "energon/packs.jsonl").read_bytes()
    offsets = np.frombuffer((tmp_path / "energon/packs.jsonl.idx").read_bytes(), "<u8")
    lines = [content[a:b] for a, b in pairwise(offsets)]
    assert b"".join(lines) == content and all(json.loads(line)["samples"] for line in lines)
    assert json.loads((tmp_path / "energon/packs.json").read_text()) == {
        "ranks": 1, "workers": 2, "lines": len(lines)
    }  # fmt: skip
    meta = json.loads((tmp_path / "energon/meta.yaml").read_text())
    assert meta["splits"]["train"] == {"path": "packs.jsonl", "aux": {"samples": "samples"}}


def test_shards_are_read_where_they_are(tmp_path):
    """Prevents copying samples that are already in shards."""
    pytest.importorskip("webdataset")
    records, meta = make_samples(tmp_path), tmp_path / "meta.json"
    last = len(write_shards(tmp_path, records)) - 1
    meta.write_text(json.dumps({"a": {"shards": f"train-{{000..{last:03}}}.tar"}}))
    given = make_input(Annotations.open(meta))
    with pytest.raises(UserError, match=r"its shards have no index"):
        energon_files(given)
    (tmp_path / ".nv-meta").mkdir()
    files = energon_files(given)
    names = "packs.jsonl packs.jsonl.idx packs.json meta.yaml omnibal_packs.py".split()
    assert set(files) == {f"energon/{name}" for name in names}
    write(files, tmp_path)
    meta = json.loads((tmp_path / "energon/meta.yaml").read_text())
    assert meta["splits"]["train"]["aux"] == {"source0": str(tmp_path)}
    for line in (tmp_path / "energon/packs.jsonl").read_text().splitlines():
        for dataset, key, parts in json.loads(line)["samples"]:
            shown = [*records[int(key)].get("image", []), *records[int(key)].get("video", [])]
            assert (dataset, parts) == ("source0", ["json", *(n.partition(".")[2] for n in shown)])


def test_without_data_only_what_needs_none_is_written(photos):
    """Prevents guessing samples without data."""
    given = make_input(Annotations.open(photos[0]))
    exported = megatron_lm.export(replace(given, annotations=None))
    assert not exported.files and "--data-path" not in exported.command
    assert any("Without --data" in note for note in exported.notes)
    assert any("makes micro-batches of its own" in each for each in exported.deviations)


def test_lines_fill_the_last_round_of_loader_processes():
    """Prevents a number of lines that Energon divides unequally among processes."""
    for packs, ranks, workers in ((1, 1, 0), (6, 2, 2), (8, 2, 3), (40, 8, 4), (3, 3, 5)):
        lines = loader_order(packs, ranks, workers)
        assert len(lines) % (ranks * max(workers, 1)) == 0
        assert set(lines) == set(range(packs))
        for rank, read in enumerate(energon_reads(lines.tolist(), ranks, workers)):
            assert read[: packs // ranks] == list(range(rank, packs, ranks))

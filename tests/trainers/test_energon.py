"""Exported packs read by Energon on every rank with several loader processes."""

import importlib.util
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from megatron.energon import (
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    edataclass,
    get_savable_loader,
    stateless,
)
from planned import SHARDS, Planned, picture_of, plan_job, shows_picture, write_lines, write_shards

from omnibal.data.tar_shards import Shard, energon_indexes, index_shard

SEEDS, RANKS = (0, 1, 2), (1, 2, 8)
TARGET = "megatron-lm"


@edataclass
class Encoded(Sample):
    """An encoded sample or pack."""

    said: list[int]
    """Sample numbers."""
    shown: list[bool]
    """Whether each sample has its image."""


class Encoder(DefaultTaskEncoder):
    """A user's task encoder for samples and packs."""

    decoder = None

    @stateless
    def encode_sample(self, sample: Encoded) -> Encoded:
        return sample

    @stateless
    def pack_selected_samples(self, samples: list[Encoded]) -> Encoded:
        said = [number for sample in samples for number in sample.said]
        shown = [right for sample in samples for right in sample.shown]
        return Encoded.derive_from(samples[0], said=said, shown=shown)

    @stateless
    def batch(self, samples: list[Encoded]) -> Encoded:
        (only,) = samples
        return only


def import_packs(export: Path) -> ModuleType:
    """Import the export's module as a user does."""
    path = export / "energon/omnibal_packs.py"
    spec = importlib.util.spec_from_file_location("omnibal_packs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["omnibal_packs"] = module
    spec.loader.exec_module(module)
    return module


def make_encoder(packs: ModuleType) -> DefaultTaskEncoder:
    class Both(packs.PlannedPacks, Encoder):
        @stateless
        def sample_of(self, members: dict[str, Any]) -> Encoded:
            number = int(json.loads(members["json"])["messages"][-1]["content"])
            pictures = [members[part] for part in members if part not in ("__key__", "json")]
            return Encoded(
                __key__=members["__key__"],
                __restore_key__=(),
                __subflavors__={},
                said=[number],
                shown=[pictures == [picture_of(number)] * shows_picture(number)],
            )

    return Both()


def prepare(folder: Path) -> None:
    """Index shards as a user does."""
    energon = Path(sys.executable).with_name("energon")
    options = "--non-interactive --split-ratio 1,0,0 --skip-dataset-yaml --num-workers 1"
    subprocess.run([energon, "prepare", folder, *options.split()], check=True, capture_output=True)


def check_read(made: Planned, ranks: int, workers: int) -> None:
    """Compare every rank's packs from Energon with the plan."""
    packs = import_packs(made.export)
    for rank in range(ranks):
        config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers)
        dataset = packs.planned_dataset(make_encoder(packs), config, repeat=False)
        read = list(get_savable_loader(dataset))
        expected = made.rank_packs(rank)
        assert [pack.said for pack in read[: len(expected)]] == expected
        assert len(read) - len(expected) < max(workers, 1)
        assert all(all(pack.shown) for pack in read)


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    meta = write_shards(folder)
    prepare(folder)
    return meta


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_energon_reads_the_planned_packs_from_shards(shards, seed, ranks):
    """Prevents packs that Energon gives to another rank or step, and missing samples."""
    workers = 2 * ((seed + RANKS.index(ranks)) % 2)
    check_read(plan_job(shards, TARGET, seed, ranks, workers=workers), ranks, workers)


def test_energon_reads_samples_that_were_files(tmp_path):
    """Prevents our shards from failing to index, or reading with wrong keys or images."""
    made = plan_job(write_lines(tmp_path), TARGET, 0, 2, workers=2)
    subprocess.run([sys.executable, str(made.export / "energon/make_shards.py")], check=True)
    prepare(made.export / "energon/samples")
    check_read(made, 2, 2)


def test_other_ranks_or_processes_are_refused(shards):
    """Prevents silently reading packs with another rank or worker count than exported."""
    packs = import_packs(plan_job(shards, TARGET, 0, 2, workers=2).export)
    for ranks, workers in ((1, 2), (2, 0), (8, 2)):
        config = WorkerConfig(rank=0, world_size=ranks, num_workers=workers)
        with pytest.raises(ValueError, match="export a plan for"):
            packs.planned_dataset(make_encoder(packs), config)


def test_where_energon_has_found_samples(shards):
    """Prevents wrong sample offsets from Energon's index."""
    names = sorted(path.name for path in shards.parent.glob("*.tar"))
    indexes = energon_indexes(shards.parent, names)
    assert len(names) == SHARDS
    for name, index in zip(names, indexes, strict=True):
        assert index is not None
        found = index_shard(Shard(shards.parent / name, listed=index))
        starts: dict[str, int] = {}
        with tarfile.open(shards.parent / name) as tar:
            for entry in tar:
                starts.setdefault(entry.name.partition(".")[0], entry.offset)
        assert found.start.tolist() == list(starts.values())

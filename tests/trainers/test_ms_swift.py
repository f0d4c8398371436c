"""Exports loaded, packed and dealt by ms-swift, and flags parsed by ms-swift."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import datasets
import pytest
import swift.dataset
import torch.distributed as dist
from planned import MICRO_BATCHES, SMALL, Planned, plan_job, write_lines
from swift.arguments import SftArguments
from swift.dataloader import BatchSamplerShard
from swift.dataset.packing import PackingDataset
from swift.megatron.trainers.batch_sampler import MegatronPretrainingRandomSampler
from swift.utils.utils import parse_args

BACK_ENDS = ("ms-swift", "ms-swift-deepspeed")
SEEDS, RANKS = (0, 1, 2), (1, 2, 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_lines(tmp_path_factory.mktemp("ms-swift"))


def read_rows(made: Planned) -> list[dict]:
    return [json.loads(line) for line in Path(made.flags["dataset"]).read_text().splitlines()]


def pack_rows(made: Planned) -> list[list[int]]:
    """Pack the exported rows with ms-swift; return the samples of every pack."""
    flags = made.flags
    numbers = [int(row["messages"][-1]["content"]) for row in read_rows(made)]
    lengths = [[int(made.tokens[number])] for number in numbers]
    packs = PackingDataset(
        SimpleNamespace(max_length=int(flags["max_length"])),  # packing reads only max_length
        datasets.Dataset.from_dict({"lengths": lengths}),
        packing_length=int(flags["packing_length"]),
        packing_strategy=flags["packing_strategy"],
        packing_num_proc=int(flags["packing_num_proc"]),
    )
    return [sorted(numbers[row] for row in pack) for pack in packs.packed_idx]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_ms_swift_makes_and_deals_the_planned_packs(data, monkeypatch, seed, ranks):
    """Prevents an export that ms-swift packs differently, or deals to other ranks or steps."""
    for target in BACK_ENDS:
        made = plan_job(data, target, seed, ranks)
        packs = pack_rows(made)
        in_order = [sorted(pack) for step in made.packs for slot in step for pack in slot]
        assert packs == in_order
        steps = int(made.flags["train_iters" if target == "ms-swift" else "max_steps"])
        assert steps == made.full_steps == len(packs) // (ranks * MICRO_BATCHES)
        for rank in range(ranks):
            dealt = _deal_packs(target, len(packs), rank, ranks, monkeypatch)
            got = [packs[pack] for pack in dealt][: steps * MICRO_BATCHES]
            assert got == [sorted(pack) for pack in made.rank_packs(rank)]


def _deal_packs(target: str, packs: int, rank: int, ranks: int, monkeypatch) -> list[int]:
    """Packs that ms-swift's sampler gives to a rank."""
    if target == "ms-swift":
        sampler = MegatronPretrainingRandomSampler(None, packs, 0, 1, rank, ranks, False, False)
        return [pack for batch in sampler for pack in batch]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    return [pack for batch in BatchSamplerShard(packs, 1, False, True, None) for pack in batch]


def test_ms_swift_loads_every_row_in_its_order(data):
    """Prevents rows that ms-swift's loader drops, reorders, or reads without images."""
    made = plan_job(data, "ms-swift", 0, 2)
    flags = made.flags
    found, validation = swift.dataset.load_dataset(
        [flags["dataset"]],
        split_dataset_ratio=float(flags["split_dataset_ratio"]),
        shuffle=flags["dataset_shuffle"] == "true",
        strict=flags["strict"] == "true",
    )
    assert validation is None
    rows = read_rows(made)
    assert found["messages"] == [row["messages"] for row in rows]
    paths = [[image["path"] for image in images or ()] for images in found["images"]]
    assert paths == [row.get("images", []) for row in rows] and any(paths)


@pytest.fixture
def megatron_arguments(monkeypatch) -> type:
    """Arguments of `megatron sft`, imported with a fake mcore_bridge, which parses nothing."""
    for name in ("mcore_bridge", "mcore_bridge.model"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    from swift.megatron.arguments import MegatronSftArguments

    return MegatronSftArguments


@pytest.mark.parametrize(
    ("target", "job"),
    [("ms-swift", SMALL), ("ms-swift", f"{SMALL} --pp 3"), ("ms-swift-deepspeed", SMALL)],
)
def test_every_flag_is_parsed_as_it_is_meant(data, megatron_arguments, target, job):
    """Prevents a flag that ms-swift does not know or parses to another value."""
    arguments = megatron_arguments if target == "ms-swift" else SftArguments
    # Skip __post_init__, which needs a model and GPUs.
    parsed_alone = dataclass(type("Parsed", (arguments,), {"__post_init__": lambda self: None}))
    made = plan_job(data, target, 0, 2, job=job)
    given = made.flags | {"model": "a"}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    parsed, unknown = parse_args(parsed_alone, words)
    assert not unknown
    for name, value in given.items():
        found = vars(parsed)[name]
        found = found[0] if isinstance(found, list) else found
        assert (
            type(found)(value) == found if isinstance(found, float) else str(found).lower() == value
        ), name
    assert ("recompute_granularity" in given) == (target == "ms-swift")

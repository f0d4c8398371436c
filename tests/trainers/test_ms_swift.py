"""Rows of an export packed and dealt by ms-swift itself, and its flags among those that it has."""

import ast
import json
from importlib.metadata import version
from pathlib import Path

import datasets
import pytest
import swift
import torch.distributed as dist
from planned import MICRO_BATCHES, Planned, planned
from swift.dataloader import BatchSamplerShard
from swift.dataset.packing import PackingDataset
from swift.megatron.trainers.batch_sampler import MegatronPretrainingRandomSampler

BACK_ENDS = ("ms-swift", "ms-swift-deepspeed")
SEEDS, RANKS = (0, 1, 2), (1, 2, 8)


class _Template:
    """What packing reads of a template."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ms-swift")


def packed(made: Planned) -> list[list[int]]:
    """Numbers of the samples of every pack that ms-swift makes of the exported rows."""
    flags = made.flags
    assert flags["packing_strategy"] == "sequential" and flags["packing_num_proc"] == "1"
    rows = [json.loads(line) for line in Path(flags["dataset"]).read_text().splitlines()]
    numbers = [int(row["messages"][-1]["content"]) for row in rows]
    lengths = [[int(made.tokens[number])] for number in numbers]
    length = int(flags["packing_length"])
    packs = PackingDataset(
        _Template(int(flags["max_length"])),
        datasets.Dataset.from_dict({"lengths": lengths}),
        packing_length=length,
        packing_strategy=flags["packing_strategy"],
        packing_num_proc=int(flags["packing_num_proc"]),
    )
    return [[numbers[row] for row in pack] for pack in packs.packed_idx]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_ms_swift_makes_and_deals_the_planned_packs(folder, monkeypatch, seed, ranks):
    """Prevents an export that ms-swift packs otherwise, or gives to other ranks in other steps."""
    for target in BACK_ENDS:
        made = planned(folder, target, seed, ranks)
        packs = packed(made)
        in_order = [pack for step in made.packs for slot in step for pack in slot]
        assert packs == in_order
        full = len(packs) // (ranks * MICRO_BATCHES)
        steps = int(made.flags["train_iters" if target == "ms-swift" else "max_steps"])
        assert steps == full
        for rank in range(ranks):
            dealt = _dealt(target, len(packs), rank, ranks, monkeypatch)
            got = [packs[pack] for pack in dealt][: steps * MICRO_BATCHES]
            assert got == made.of_rank(rank, steps=steps)


def _dealt(target: str, packs: int, rank: int, ranks: int, monkeypatch) -> list[int]:
    """Packs that ms-swift's own sampler gives to a rank."""
    if target == "ms-swift":
        sampler = MegatronPretrainingRandomSampler(None, packs, 0, 1, rank, ranks, False, False)
        return [pack for batch in sampler for pack in batch]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    return [pack for batch in BatchSamplerShard(packs, 1, False, True, None) for pack in batch]


@pytest.mark.parametrize(
    ("target", "rooms"),
    [("ms-swift", ["megatron/arguments", "arguments"]), ("ms-swift-deepspeed", ["arguments"])],
)
def test_every_flag_is_one_of_ms_swift(folder, target, rooms):
    """Prevents a flag that ms-swift does not have, or no longer under that name."""
    package = Path(swift.__file__).parent
    named = {"deepspeed", "dataset", "model"}
    for room in rooms:
        for module in (package / room).rglob("*.py"):
            for node in ast.walk(ast.parse(module.read_text())):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    named.add(node.target.id)
    flags = set(planned(folder / "flags", target, 0, 2).flags) - _of_transformers()
    assert flags <= named, f"ms-swift {version('ms-swift')} has no {sorted(flags - named)}"


def _of_transformers() -> set[str]:
    """Flags of Transformers' own training arguments, which ms-swift's take over."""
    from transformers import TrainingArguments

    return set(TrainingArguments.__dataclass_fields__)

"""Context-parallel packs of native-resolution images on four processes, against one process: equal
losses, gradients and trained weights."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from native_resolution_cases import pack_of, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, sample_of
from shared_training_cases import GATHER, HEADS, own_batches
from tensor_parallel_cases import Feed, compare_with_one_process
from toy import stages_of, toy_plan

from omnibal.data.native_resolution import Grid
from omnibal.job.plan import PlannedLevel
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.levels import CutRule
from omnibal.model.limits import Caps

# Slots of each step: (level, packs), a pack being samples of (grids, text tokens). Levels 1 and 2
# are shared. Packs have text only, one image (some ranks encode nothing), a video split over ranks,
# or many images. A step's widest packs come first, to be in the same slot on all ranks.
STEPS = [
    [
        (1, [
            [((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((Grid(1, 4, 4),), 6), ((), 14)],
            [((), 25), ((), 4)],
        ]),
        (0, [[((Grid(1, 4, 4),), 6)], [((), 9)]]),
        (2, [[((Grid(5, 4, 6), Grid(1, 2, 2)), 21)], [((Grid(1, 6, 10),), 8)]]),
    ],
    [
        (1, [[((Grid(1, 4, 10), Grid(2, 2, 2), Grid(1, 8, 2)), 11)]]),
        (2, [[((Grid(1, 2, 4),) * 6, 20), ((), 7)]]),
        (0, [[((), 8)]]),
    ],
]  # fmt: skip
MODELS = {
    "Qwen3-VL": qwen3_vl(kv_heads=4),
    "tied": qwen3_vl(tied_head=True, kv_heads=4),
    "experts": qwen3_vl_moe(kv_heads=4),
    "Qwen2.5-VL": qwen2_5_vl(kv_heads=2),
}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}


PAIR, UNCHANGED = {"data": 2}, {}


class Case(NamedTuple):
    model: str
    levels: tuple = ((2, CutRule.ZIGZAG, GATHER), (2, CutRule.CONTIGUOUS, HEADS))
    cuts: tuple[int, ...] = ()
    sizes: dict = PAIR
    recompute: tuple[dict, ...] = ({}, {}, {})
    changes: dict = UNCHANGED


SOME = {"vision": (1, 2), "language": (0,)}
GATHERED = ((2, CutRule.ZIGZAG, GATHER), (2, CutRule.COST, GATHER))
WIDE = ((4, CutRule.WHOLE, GATHER), (2, CutRule.COST, HEADS))
# Units of Qwen3-VL: 0 vision embed, 1-5 vision layers (2 and 4 output deepstack features), 6
# projector, 7 language embed, 8-10 language layers (two add the features), 11 head.
CASES = {
    "wide": Case("Qwen3-VL", WIDE, sizes={"data": 4}, recompute=({}, SOME, {})),
    "pipeline-between-towers": Case("tied", cuts=(7,), recompute=({}, {}, SOME)),
    "pipeline-between-deepstack-layers": Case("Qwen3-VL", cuts=(9,), recompute=(SOME, SOME, {})),
    "tensor": Case("Qwen3-VL", sizes={"data": 2, **IN_PARTS}, recompute=({}, SOME, {})),
    "experts": Case("experts", sizes={"data": 4, "expert": 2}, recompute=(SOME,) * 3),
    "frozen-language": Case("Qwen3-VL", cuts=(8,), changes={"frozen": ("language",)}),
    "adapters": Case(
        "Qwen3-VL", cuts=(9,), recompute=({}, SOME, {}),
        changes={"adapters": AdapterConfig(rank=4, alpha=8), "frozen": ("vision", "projector")},
    ),
    "divided": Case("Qwen3-VL", WIDE, sizes={"data": 4, "sharded": 4}, recompute=(SOME, {}, {})),
    "windows-pipeline": Case("Qwen2.5-VL", cuts=(3,), recompute=({}, {"vision": (0, 4)}, {})),
    "windows-tensor": Case("Qwen2.5-VL", GATHERED, sizes={"data": 2, **IN_PARTS}),
}  # fmt: skip


def plan_of(case):
    model, cuts = MODELS[case.model], case.cuts
    shapes = [(1, CutRule.CONTIGUOUS, GATHER), *case.levels]
    recomputed = [stages_of(model, *cuts, **again) for again in case.recompute]
    levels = tuple(
        PlannedLevel(
            caps=Caps.of(image_tokens=999, tokens=400 * (index + 1)),
            context=context,
            cut=cut,
            exchange=exchange,
            attention_weight=0.05,
            image_weight=0.02,
            recompute=tuple(stage.recompute for stage in recomputed[index]),
        )
        for index, (context, cut, exchange) in enumerate(shapes)
    )
    plan = toy_plan(model, stages_of(model, *cuts), **case.sizes)
    return plan.model_copy(update={"levels": levels, **case.changes})


def whole_packs(model, number, rows):
    """Yield a step's rows with each pack as a micro-batch. Loss weights differ by position."""
    for place, (level, packs) in enumerate(rows):
        row = []
        for index, pack in enumerate(packs):
            seed = 1000 * number + 100 * place + 10 * index
            batch = pack_of(
                [sample_of(model, *counts, seed=seed + i) for i, counts in enumerate(pack)]
            )
            weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
            weight = weights.sum().item()
            row.append(replace(batch, level=level, loss_weights_L=weights, loss_weight=weight))
        yield level, row


@pytest.mark.parametrize("name", CASES)
def test_shared_packs_of_images_train_as_one_process(name):
    """Prevents attention within part of an image, features or deepstack features at wrong tokens,
    and positions of another rank's tokens."""
    plan = plan_of(CASES[name])
    compare_with_one_process(plan, STEPS, rel=2e-5, feed=Feed(whole_packs, own_batches))

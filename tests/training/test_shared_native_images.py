"""Packs of images at their native resolution that data-parallel ranks share, on four processes,
against one process that has them whole: same loss, every gradient, same weights after."""

import functools
from dataclasses import dataclass, field, replace

import pytest
import torch
from native_resolution_cases import pack_of, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, sample_of
from ranks import run_ranks
from shared_training_cases import GATHER, HEADS, own_batches
from tensor_parallel_cases import OPTIONS, assert_same_training, gradients_of, weights_of
from toy import stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.data.native_resolution import Grid
from omnibal.job.plan import PlannedLevel
from omnibal.model.adapters import AdapterConfig
from omnibal.model.levels import CutRule
from omnibal.model.limits import Caps

# Rows of slots of every step, each (level, packs); a pack is samples of (grids, text tokens).
# Levels 1 and 2 are shared. There are packs of text alone, of one image, so that some rank encodes
# nothing, of a video whose times several ranks encode, and a sample with many images. The widest
# packs of a step come first, so that all their ranks have them in one slot.
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
GATED = {"Qwen2.5-VL": ("language.", "vision.")}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}


@dataclass(frozen=True)
class Case:
    model: str
    levels: tuple = ((2, CutRule.ZIGZAG, GATHER), (2, CutRule.CONTIGUOUS, HEADS))
    cuts: tuple[int, ...] = ()
    sizes: dict = field(default_factory=lambda: {"data": 2})
    recompute: tuple[dict, ...] = ({}, {}, {})
    changes: dict = field(default_factory=dict)


SOME = {"vision": (1, 2), "language": (0,)}
GATHERED = ((2, CutRule.ZIGZAG, GATHER), (2, CutRule.COST, GATHER))
WIDE = ((4, CutRule.WHOLE, GATHER), (2, CutRule.COST, HEADS))
# Units of Qwen3-VL: 0 vision embed, 1-5 vision layers of which the second and fourth have deepstack
# features, 6 projector, 7 language embed, 8-10 language layers of which two take them, 11 head.
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


def plan_of(case, whole=False):
    """The case's plan; whole: of one process, where no pack is shared."""
    model, cuts = MODELS[case.model], () if whole else case.cuts
    shapes = [(1, CutRule.CONTIGUOUS, GATHER), *case.levels]
    levels = tuple(
        PlannedLevel(
            caps=Caps.of(image_tokens=999, tokens=400 * (index + 1)),
            context=1 if whole else context,
            cut=cut,
            exchange=exchange,
            attention_weight=0.05,
            image_weight=0.02,
            recompute=((),)
            if whole
            else tuple(s.recompute for s in stages_of(model, *cuts, **case.recompute[index])),
        )
        for index, (context, cut, exchange) in enumerate(shapes)
    )
    plan = toy_plan(model, stages_of(model, *cuts), **({} if whole else case.sizes))
    return plan.model_copy(update={"levels": levels, **case.changes})


def whole_packs(model, number):
    """The rows of a step with each pack as one micro-batch, whose weights differ by position."""
    for place, (level, packs) in enumerate(STEPS[number]):
        row = []
        for index, pack in enumerate(packs):
            seed = 1000 * number + 100 * place + 10 * index
            batch = pack_of([sample_of(model, *one, seed=seed + i) for i, one in enumerate(pack)])
            weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
            weight = weights.sum().item()
            row.append(replace(batch, level=level, loss_weights_L=weights, loss_weight=weight))
        yield level, row


def train_steps(links, plan, shared):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    results, gradients = [], []
    for number in range(len(STEPS)):
        rows = list(whole_packs(plan.model, number))
        batches = MicroBatchStream.of([batch for _, row in rows for batch in row])
        batches = own_batches(plan, rows) if shared else batches
        result = train_step(trainer, batches, slots=trainer.most_in_lockstep(len(batches)))
        results.append((result.loss, result.grad_norm, result.loss_tokens))
        gradients.append(gradients_of(trainer))
    trainer.wait_for_weights()
    return results, gradients, weights_of(trainer)


@functools.cache
def alone(name):
    plan = plan_of(CASES[name], whole=True)
    return run_ranks(plan.parallel, train_steps, plan, False)[0]


@pytest.mark.parametrize("name", CASES)
def test_shared_packs_of_images_train_as_one_process(name):
    """Prevents: an image that attends to a part of itself, features or deepstack features that
    reach other tokens than their own, and positions that are those of another rank's tokens."""
    case = CASES[name]
    plan = plan_of(case)
    ranks = run_ranks(plan.parallel, train_steps, plan, True)
    of_whole = {"gated": GATED[case.model]} if case.model in GATED else {}
    assert_same_training(ranks, plan.parallel.tensor, alone(name), rel=2e-5, **of_whole)

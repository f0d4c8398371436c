"""Models of images at their native resolution on four processes against one: same loss, every
gradient, same weights after."""

from dataclasses import replace

import pytest
import torch
from native_resolution_cases import pack_of, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, sample_of
from ranks import run_ranks
from tensor_parallel_cases import OPTIONS, Feed, compare_resumed, compare_with_one_process
from toy import stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.schedule import run_forward
from megatron.vlm.step.train import build_trainer
from omnibal.data.native_resolution import Grid

# Packs as (grids, text tokens). Token counts are odd and even; one has a video, one no loss, and
# one step's packs no image.
STEPS = [
    [
        [((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((Grid(1, 4, 4),), 6)],
        [((), 12), ((), 7)],
        [((Grid(3, 4, 6),), 5)],
        [((Grid(1, 2, 2),), 8), ((), 6), ((Grid(1, 4, 10),), 11)],
    ],
    [[((), 7)], [((), 12), ((), 3)]],
    [[((Grid(1, 8, 2),), 20)], [((Grid(1, 4, 4),), 2)], [((Grid(2, 2, 2),), 8)]],
]
MODELS = {
    "Qwen3-VL": qwen3_vl(),
    "tied": qwen3_vl(tied_head=True),
    "experts": qwen3_vl_moe(),
    "Qwen2.5-VL": qwen2_5_vl(kv_heads=2),
}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}


def packs_of(model, number, packs):
    """The packs of step `number`, with weights that differ between positions."""
    for index, pack in enumerate(packs):
        seeds = range(100 * number + 10 * index, 1_000_000)
        samples = (
            sample_of(model, *one, seed=seed) for one, seed in zip(pack, seeds, strict=False)
        )
        batch = pack_of(list(samples))
        weights = torch.linspace(0.5, 1.5, len(batch.labels_L))
        yield replace(batch, loss_weights_L=weights, loss_weight=weights.sum().item())


def plan_of(name, cuts=(), frozen=(), recompute=None, **sizes):
    model = MODELS[name]
    plan = toy_plan(model, stages_of(model, *cuts, **(recompute or {})), **sizes)
    return plan.model_copy(update={"frozen": frozen})


SOME = {"vision": (1, 2), "language": (0,)}
# Units: 0 vision embed, 1-5 vision layers of which the second and fourth have deepstack features,
# 6 projector, 7 language embed, 8-10 language layers of which two take them, 11 head. A cut is the
# position of the first unit after it.
PLANS = {
    "of-four": ("Qwen3-VL", {"cuts": (3, 6, 9)}),
    "of-four-tied": ("tied", {"cuts": (5, 8, 10), "recompute": SOME}),
    "tensor-in-encoder": ("Qwen3-VL", {"cuts": (4,), "tensor": 2}),
    "tensor-between-deepstack-layers": ("Qwen3-VL", {"cuts": (9,), **IN_PARTS}),
    "tensor-between-towers": ("tied", {"cuts": (7,), **IN_PARTS, "recompute": SOME}),
    "frozen-vision": ("Qwen3-VL", {"cuts": (3, 9), "frozen": ("vision",)}),
    "frozen-language": ("Qwen3-VL", {"cuts": (3, 9), "frozen": ("language",)}),
    "frozen-projector": ("Qwen3-VL", {"cuts": (5,), "tensor": 2, "frozen": ("projector",)}),
    "divided-pipeline": ("tied", {"cuts": (4,), "data": 2, "sharded": 2, "recompute": SOME}),
    "divided-tensor": ("Qwen3-VL", {**IN_PARTS, "data": 2, "sharded": 2}),
    "divided-language-frozen": (
        "Qwen3-VL", {"cuts": (9,), "data": 2, "sharded": 2, "frozen": ("language",)},
    ),
    "experts-pipeline": ("experts", {"cuts": (9,), "data": 2, "expert": 2}),
    "experts-tensor": ("experts", {"cuts": (4,), **IN_PARTS, "expert": 2}),
    "windows": ("Qwen2.5-VL", {"cuts": (3,), **IN_PARTS, "recompute": {"vision": (0, 1, 4)}}),
    "windows-of-four": ("Qwen2.5-VL", {"cuts": (2, 6, 7)}),
    "windows-divided": ("Qwen2.5-VL", {"tensor": 2, "data": 2, "sharded": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_same_training_as_one_process(name):
    """Prevents: deepstack features or their gradients lost or mixed up over a cut, patches in
    another order on another stage, and padded heads or divided weights that change a gradient."""
    model, options = PLANS[name]
    compare_with_one_process(plan_of(model, **options), STEPS, rel=2e-5, feed=Feed(packs_of))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("Qwen3-VL", {"cuts": (3,), "tensor": 2}, {"cuts": (5, 9)}, id="deepstack"),
        pytest.param("Qwen2.5-VL", {}, {"tensor": 2, "data": 2, "sharded": 2}, id="windows"),
    ],
)
def test_resumes_under_another_layout(tmp_path, name, before, after):
    """Prevents: a checkpoint that has no deepstack projectors, or parts of them, or biases of a
    gate and a value that change places."""
    layouts = (plan_of(name, **before), 1), (plan_of(name, **after), 2)
    compare_resumed(tmp_path, *layouts, steps=STEPS, rel=2e-5, feed=Feed(packs_of))


def evaluated(links, plan):
    """Loss of a pack in training and in evaluation, on the last stage."""
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    stage, found = trainer.stage, []
    for is_training in (True, False):
        stage.train(is_training)
        batches = MicroBatchStream.of(list(packs_of(plan.model, 0, STEPS[0])))
        losses = run_forward(plan, trainer.models, links, batches)
        found.append([loss.item() for loss in losses])
    return found


def test_held_out_packs_have_deepstack_features_too():
    """Prevents: a loss on held-out data without what core's own loop over layers leaves out."""
    plan = plan_of("Qwen3-VL", cuts=(9,))
    trained, held_out = run_ranks(plan.parallel, evaluated, plan)[-1]
    assert len(trained) == len(STEPS[0]) and held_out == pytest.approx(trained, rel=1e-6)

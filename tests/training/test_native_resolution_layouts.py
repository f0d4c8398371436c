"""Native-resolution models on four processes, with pipelined or data-parallel encoders, against one
process: equal losses, gradients and weights."""

import pytest
from data_parallel_cases import data_parallel_plan
from native_pass_cases import own_stream
from native_resolution_cases import (
    STEPS,
    WORD,
    packs_of,
    qwen2_5_vl,
    qwen3_vl,
    qwen3_vl_moe,
    rope_positions,
)
from ranks import run_ranks
from tensor_parallel_cases import OPTIONS, Feed, compare_resumed, compare_with_one_process
from toy import cut_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer

MODELS = {
    "Qwen3-VL": qwen3_vl(),
    "tied": qwen3_vl(tied_head=True),
    "experts": qwen3_vl_moe(),
    "Qwen2.5-VL": qwen2_5_vl(kv_heads=2),
}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}


def plan_of(name, cuts=(), **options):
    """Return a plan, with data-parallel encoders if `options` has `pipelines`."""
    if "pipelines" in options:
        return data_parallel_plan(MODELS[name], cuts, **{"per_pass": 9, "kept": 7} | options)
    return cut_plan(MODELS[name], *cuts, **options)


SOME = {"vision": (1, 2), "language": (0,)}
ENCODER = ("vision", "projector")
# A cut is the position of the first unit after it. Units: 0 vision embed, 1-5 vision layers (2 and
# 4 output deepstack features), 6 projector, 7 language embed, 8-10 language layers (8 and 9 add the
# features), 11 head.
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
# Units of the language model: 0 embed, 1-3 layers (Qwen3-VL's 1 and 2 add deepstack features), 4
# head.
DATA_PARALLEL = {
    "features-sent-on": ("Qwen3-VL", {"cuts": (1,), "data": 2, "pipelines": 2, "divided": 4}),
    "of-four": (
        "tied",
        {"cuts": (1, 2, 3), "pipelines": 1, "per_pass": 4, "recompute": {"language": (0, 1)}},
    ),
    "all-divided": ("Qwen3-VL", {"data": 4, "sharded": 4, "pipelines": 4, "divided": 4}),
    "tensor-pipeline": ("tied", {**IN_PARTS, "cuts": (2,), "pipelines": 1, "divided": 4}),
    "frozen-vision": (
        "Qwen3-VL", {"cuts": (1,), "data": 2, "pipelines": 2, "frozen": ("vision",)},
    ),
    "frozen-language": (
        "Qwen3-VL", {"cuts": (1,), "data": 2, "pipelines": 1, "frozen": ("language",)},
    ),
    "frozen-encoder": (
        "Qwen3-VL", {"cuts": (2,), "data": 2, "pipelines": 1, "frozen": ENCODER, "divided": 2},
    ),
    "experts": ("experts", {"data": 4, "expert": 2, "pipelines": 2}),
    "windows-divided": (
        "Qwen2.5-VL", {"cuts": (3,), "data": 2, "pipelines": 1, "divided": 4, "kept": 3},
    ),
    "windows-tensor": ("Qwen2.5-VL", {**IN_PARTS, "data": 2, "pipelines": 2}),
}  # fmt: skip
TOLD = {"rel": 2e-5, "feed": Feed(packs_of, own_stream)}


@pytest.fixture(scope="module", autouse=True)
def fill_position_cache():
    """Compute RoPE positions once, before ranks are forked."""
    for model in MODELS.values():
        rope_positions(model, [WORD], ())


@pytest.mark.parametrize(
    ("model", "options"),
    [*PLANS.values(), *DATA_PARALLEL.values()],
    ids=[*PLANS, *map("data-parallel-{}".format, DATA_PARALLEL)],
)
def test_same_training_as_one_process(model, options):
    """Prevents lost or swapped deepstack features or gradients, patches reordered between stages,
    gradients changed by padded heads or sharded weights, and split or misassigned images."""
    compare_with_one_process(plan_of(model, **options), STEPS, **TOLD)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        pytest.param("Qwen3-VL", {"cuts": (3,), "tensor": 2}, {"cuts": (5, 9)}, id="deepstack"),
        pytest.param("Qwen2.5-VL", {}, {"tensor": 2, "data": 2, "sharded": 2}, id="windows"),
        pytest.param(
            "Qwen3-VL", {"cuts": (3,)}, {"cuts": (2,), "data": 2, "pipelines": 2, "divided": 4},
            id="data-parallel",
        ),
    ],
)  # fmt: skip
def test_resumes_under_another_layout(tmp_path, name, before, after):
    """Prevents checkpoints that lack deepstack projectors or swap gate and value biases."""
    layouts = (plan_of(name, **before), 1), (plan_of(name, **after), 2)
    compare_resumed(tmp_path, *layouts, steps=STEPS[:3], **TOLD)


def train_and_eval_losses(links, plan):
    """Return the last stage's losses of a pack in training and in evaluation mode."""
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    stage, found = trainer.stage, []
    for is_training in (True, False):
        stage.train(is_training)
        batches = MicroBatchStream.of(list(packs_of(plan.model, 0, STEPS[0])))
        losses = trainer.run_forward(batches)
        found.append([loss.item() for loss in losses])
    return found


def test_held_out_packs_have_deepstack_features_too():
    """Prevents evaluation losses without deepstack features, which core's own layer loop omits."""
    plan = plan_of("Qwen3-VL", cuts=(9,))
    trained, held_out = run_ranks(plan.parallel, train_and_eval_losses, plan)[-1]
    assert len(trained) == len(STEPS[0]) and held_out == pytest.approx(trained, rel=1e-6)

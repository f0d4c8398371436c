"""Data-parallel encoders of images at their native resolution, on four processes, against one
process with everything in its pipeline: same loss, every gradient, same weights after."""

import pytest
from native_encoder_cases import FEED, STEPS, in_pipeline, plan_of
from native_resolution_cases import qwen2_5_vl, qwen3_vl, qwen3_vl_moe
from tensor_parallel_cases import compare_resumed, compare_with_one_process

MODELS = {
    "Qwen3-VL": qwen3_vl(),
    "tied": qwen3_vl(tied_head=True),
    "experts": qwen3_vl_moe(),
    "Qwen2.5-VL": qwen2_5_vl(kv_heads=2),
}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}
# Units of the language model: 0 embed, 1-3 layers, of which Qwen3-VL's first two take deepstack
# features, 4 head. A cut is the position of the first unit after it.
PLANS = {
    "features-sent-on": ("Qwen3-VL", {"cuts": (1,), "data": 2, "pipelines": 2, "divided": 4}),
    "of-four": ("tied", {"cuts": (1, 2, 3), "per_pass": 4, "recompute": {"language": (0, 1)}}),
    "all-divided": ("Qwen3-VL", {"data": 4, "sharded": 4, "pipelines": 4, "divided": 4}),
    "tensor-pipeline": ("tied", {**IN_PARTS, "cuts": (2,), "divided": 4}),
    "frozen-vision": (
        "Qwen3-VL", {"cuts": (1,), "data": 2, "pipelines": 2, "frozen": ("vision",)},
    ),
    "frozen-language": ("Qwen3-VL", {"cuts": (1,), "data": 2, "frozen": ("language",)}),
    "frozen-encoder": (
        "Qwen3-VL", {"cuts": (2,), "data": 2, "frozen": ("vision", "projector"), "divided": 2},
    ),
    "experts": ("experts", {"data": 4, "expert": 2, "pipelines": 2}),
    "windows-divided": ("Qwen2.5-VL", {"cuts": (3,), "data": 2, "divided": 4, "kept": 3}),
    "windows-tensor": ("Qwen2.5-VL", {**IN_PARTS, "data": 2, "pipelines": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_encoders_of_whole_samples_train_as_one_process(name):
    """Prevents: an image encoded in parts or for another pack, deepstack features or their
    gradients mixed up on their way to and from first stages and over the cuts behind these, and
    ranks that wait for ever for one without images."""
    model, options = PLANS[name]
    compare_with_one_process(plan_of(MODELS[model], **options), STEPS, rel=2e-5, feed=FEED)


def test_resumes_with_the_encoder_elsewhere(tmp_path):
    """Prevents: deepstack projectors under other names, or moments of another parameter, where
    encoders are data-parallel."""
    before = in_pipeline(MODELS["Qwen3-VL"], 3)
    after = plan_of(MODELS["Qwen3-VL"], cuts=(2,), data=2, pipelines=2, divided=4)
    compare_resumed(tmp_path, (before, 2), (after, 2), steps=STEPS, rel=2e-5, feed=FEED)

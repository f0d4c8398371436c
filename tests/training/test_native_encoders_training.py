"""Data-parallel encoders of images at their native resolution, on four processes, against one
process with everything in its pipeline: same loss, every gradient, same weights after."""

import functools

import pytest
from native_encoder_cases import in_pipeline, plan_of, train_steps
from native_resolution_cases import qwen2_5_vl, qwen3_vl, qwen3_vl_moe
from ranks import run_ranks
from tensor_parallel_cases import assert_equal_whole

MODELS = {
    "Qwen3-VL": qwen3_vl(),
    "tied": qwen3_vl(tied_head=True),
    "experts": qwen3_vl_moe(),
    "Qwen2.5-VL": qwen2_5_vl(kv_heads=2),
}
GATED = {"Qwen2.5-VL": ("language.", "vision.")}
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


@functools.cache
def alone(name, frozen):
    plan = in_pipeline(MODELS[name], frozen=frozen)
    return run_ranks(plan.parallel, train_steps, plan)[0]


def is_language(name):
    return name.startswith(("language.", "embedding.", "head."))


def assert_equal(ranks, tensor, expected, **of_whole):
    """Tensors of every rank's stage, and of its copy of the encoders."""
    language = {name: value for name, value in expected.items() if is_language(name)}
    rest = {name: value for name, value in expected.items() if not is_language(name)}
    assert_equal_whole([parts[0] for parts in ranks], tensor, language, **of_whole)
    for parts in ranks:
        assert_equal_whole([parts[1]], 1, rest, **of_whole)


def assert_same_training(ranks, tensor, reference, **of_whole):
    results, gradients, [weights] = reference
    for rank in ranks:
        for got, expected in zip(rank[0], results, strict=True):
            assert got == pytest.approx(expected, rel=2e-5)
    for step, [expected] in enumerate(gradients):
        assert_equal([rank[1][step] for rank in ranks], tensor, expected, **of_whole)
    assert_equal([rank[2] for rank in ranks], tensor, weights, **of_whole)


@pytest.mark.parametrize("name", PLANS)
def test_encoders_of_whole_samples_train_as_one_process(name):
    """Prevents: an image encoded in parts or for another pack, deepstack features or their
    gradients mixed up on their way to and from first stages and over the cuts behind these, and
    ranks that wait for ever for one without images."""
    model, options = PLANS[name]
    plan = plan_of(MODELS[model], **options)
    ranks = run_ranks(plan.parallel, train_steps, plan)
    of_whole = {"gated": GATED[model]} if model in GATED else {}
    assert_same_training(ranks, plan.parallel.tensor, alone(model, plan.frozen), **of_whole)


def test_resumes_with_the_encoder_elsewhere(tmp_path):
    """Prevents: deepstack projectors under other names, or moments of another parameter, where
    encoders are data-parallel."""
    before = in_pipeline(MODELS["Qwen3-VL"], 3)
    after = plan_of(MODELS["Qwen3-VL"], cuts=(2,), data=2, pipelines=2, divided=4)
    results, gradients, weights = alone("Qwen3-VL", ())
    run_ranks(before.parallel, train_steps, before, range(2), None, tmp_path)
    ranks = run_ranks(after.parallel, train_steps, after, range(2, 4), tmp_path)
    assert_same_training(ranks, 1, (results[2:], gradients[2:], weights))

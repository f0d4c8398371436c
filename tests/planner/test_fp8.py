"""Precision fp8: costs and kept tensors, unsupported targets, and launch-line recipes."""

import numpy as np
import pytest
from cost_cases import analytic_cost, assumed_h100

from omnibal.base.errors import UserError
from omnibal.cost.analytic import layer_products
from omnibal.cost.model import UnitCost
from omnibal.job.check import training_obstacles
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, load_cluster, load_model
from omnibal.model.fp8 import Fp8
from omnibal.model.parallel import Parallel
from omnibal.model.runtime import OWN_RUNTIME, RuntimeOptions
from omnibal.model.targets import TARGETS, TargetName
from omnibal.pipeline.stage_memory import state_bytes
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.trainers.lint.command_line import read_launch
from omnibal.trainers.lint.line import line_of
from omnibal.trainers.lint.weights import notes_on_precision, precision_of

CLUSTER = assumed_h100()
LLAMA = load_model("llama3.1-8b")
ONE = Parallel(pipeline=1)
H, F, QKV = 4096, 14_336, 4096 + 2 * 1024
WEIGHTS = H * QKV + H * H + H * 2 * F + F * H
INPUTS, OUTPUTS = H + H + H + F, QKV + H + 2 * F + H
MOVED = 3350e6 * 0.8


FEATURES = list(analytic_cost(LLAMA, CLUSTER, ONE, "bf16").features)


def layers(parallel: Parallel = ONE, **fp8) -> list[UnitCost]:
    """Return a language layer's costs in bf16 and in FP8."""
    runtime = OWN_RUNTIME.model_copy(update={"fp8": Fp8(**fp8)})
    costs = (
        analytic_cost(LLAMA, CLUSTER, parallel, each, runtime=runtime) for each in ("bf16", "fp8")
    )
    return [cost.units["language_layer"] for cost in costs]


def per_token(vector: np.ndarray) -> float:
    return float(vector[FEATURES.index("tokens")])


def plan_of(model: ModelConfig, parallel: Parallel) -> Plan:
    return Plan(
        model=model, precision="fp8", parallel=parallel, stages=stages_from_cuts(model, ()),
        cluster=CLUSTER, data=None,
    )  # fmt: skip


@pytest.mark.parametrize(("recipe", "cast"), [("delayed", 4), ("mxfp8", 4), ("tensorwise", 6)])
def test_a_layers_products_go_at_the_fp8_rate_after_casts(recipe, cast):
    """Prevents attention or norms at the FP8 rate, casts without time, and backward products in
    bf16."""
    plain, fast = layers(recipe=recipe)
    saved_ms = 2 * WEIGHTS * (1 / (989e9 * 0.55) - 1 / (1979e9 * CLUSTER.fp8_efficiency))
    forward_ms = saved_ms - INPUTS * cast / MOVED
    backward_ms = 2 * saved_ms - OUTPUTS * cast / MOVED
    assert per_token(plain.forward_ms - fast.forward_ms) == pytest.approx(forward_ms)
    assert per_token(plain.backward_ms - fast.backward_ms) == pytest.approx(backward_ms)
    square = FEATURES.index("squared_tokens")
    assert fast.forward_ms[square] == plain.forward_ms[square] > 0
    # Cast kernels of four inputs and gradients.
    kernels_ms = 4 * (2 if recipe == "tensorwise" else 1) * 0.004
    assert (fast.forward_ms - plain.forward_ms)[0] == pytest.approx(kernels_ms)


def test_weights_have_two_copies_or_are_those():
    """Prevents omitting memory of FP8 weights, or counting absent bf16 weights."""
    cost, plain = (analytic_cost(LLAMA, CLUSTER, ONE, each) for each in ("fp8", "bf16"))
    runtime = RuntimeOptions(fp8=Fp8(keeps_bf16_weights=False))
    alone = analytic_cost(LLAMA, CLUSTER, ONE, "fp8", runtime=runtime)
    for name, copies in (("language_layer", 2 * WEIGHTS), ("language_embed", 0), ("head", 0)):
        before = state_bytes(plain, plain.units[name]).sum()
        assert state_bytes(cost, cost.units[name]).sum() - before == copies
        assert state_bytes(alone, alone.units[name]).sum() == before
    cast_ms = cost.rates.optimizer_ms - plain.rates.optimizer_ms
    assert cast_ms == pytest.approx(6 / MOVED)


def test_what_is_no_linear_of_a_language_layer_is_as_in_bf16():
    """Prevents head, embeddings, encoders and projectors in FP8."""
    model = load_model("internvl2.5-8b")
    plain, fast = (analytic_cost(model, CLUSTER, ONE, each).units for each in ("bf16", "fp8"))
    for name in plain.keys() - {"language_layer"}:
        np.testing.assert_array_equal(fast[name].forward_ms, plain[name].forward_ms)
        np.testing.assert_array_equal(fast[name].activation_bytes, plain[name].activation_bytes)


def test_gathers_of_sequence_parallelism_are_of_bytes():
    """Prevents counting gathers of FP8 inputs in bf16; reductions remain in bf16."""
    sizes = Parallel(tensor=4, pipeline=1, sequence_parallel=True)
    plain, fast = (each.collective_ms for each in layers(sizes))
    # Forward gathers and reduces; backward gathers, reduces and gathers inputs again.
    assert per_token(fast[0]) / per_token(plain[0]) == pytest.approx(1.5 / 2)
    assert per_token(fast[1]) / per_token(plain[1]) == pytest.approx(2 / 3)


def test_experts_are_in_fp8_and_routers_and_gates_are_not():
    """Prevents experts left in bf16, and a quantized router or gate."""
    products = layer_products(load_model("qwen3.5-35b-a3b"), ONE, "fp8")
    mixture = [one for one in products if one.groups > 1]
    assert mixture and all(one.dtype == "fp8" for one in mixture)
    assert {one.dtype for one in products if one.outer == 1} == {None}
    routers = [one for one in products if one.outer == 256]
    assert routers and all(one.dtype == "fp32" for one in routers)


def refusal(**changes) -> str:
    given = {"model": LLAMA, "cluster": CLUSTER, "parallel": ONE, "precision": "fp8"}
    with pytest.raises(UserError) as error:
        JobSpec(**(given | changes))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_who_has_no_fp8_says_so():
    """Prevents plans for devices, sizes and trainers without FP8."""
    assert "no rate for fp8" in refusal(cluster=load_cluster("a100-80g"))
    odd = LLAMA.with_tower("language", ffn_hidden_size=14_344)
    assert "14344" in refusal(model=odd) and "multiples of 16" in refusal(model=odd)
    assert "XTuner" in refusal(trainer=TARGETS[TargetName.XTUNER])
    plan = plan_of(load_model("internvl3.5-30b-a3b"), ONE)
    assert any("experts" in told and "bf16 only" in told for told in training_obstacles(plan))


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [({}, 16), ({"tensor": 4}, 16), ({"tensor": 4, "sequence_parallel": True}, 64)],
)
def test_tokens_are_padded_to_what_fp8_multiplies(sizes, multiple):
    """Prevents unequal micro-batch lengths on two pipeline ends, and sequence parts FP8 rejects."""
    plan = plan_of(LLAMA, Parallel(pipeline=1, **sizes))
    assert plan.token_multiple == multiple
    assert plan.model_copy(update={"precision": "bf16"}).token_multiple == multiple // 16


LM = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 --use-distributed-optimizer "
    "--micro-batch-size 1 --global-batch-size 64 --seq-length 8192 "
    "--pipeline-model-parallel-size 2 "
)
MX = "--fp8-format hybrid --fp8-recipe mxfp8 "
BRIDGE = "run_recipe.py -ng 8 -pp 2 -mb 1 -gb 64 -sl 8192 "
SWIFT = "NPROC_PER_NODE=8 megatron sft --pipeline_model_parallel_size 2 --micro_batch_size 1 "
READ = {
    LM + "--fp8-format hybrid": ("delayed", True),
    LM + "--fp8-format e4m3 --fp8-recipe blockwise": ("blockwise", True),
    LM + "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather": ("mxfp8", False),
    SWIFT + "--fp8_format hybrid --fp8_recipe tensorwise": ("tensorwise", True),
    BRIDGE + "model.fp8=hybrid": ("tensorwise", True),
    BRIDGE + "mixed_precision.fp8=hybrid mixed_precision.fp8_recipe=delayed": ("delayed", True),
    BRIDGE + "mixed_precision=bf16_with_fp8_current_scaling_mixed": ("tensorwise", False),
    BRIDGE + "--compute_dtype fp8_mx": ("mxfp8", False),
    BRIDGE + "--compute_dtype fp8 --fp8_recipe cs": ("tensorwise", False),
    BRIDGE + "--compute_dtype fp8 --fp8_recipe ds": ("delayed", False),
    BRIDGE + "--compute_dtype FP8_CS": ("tensorwise", False),
}


def parse_line(text: str):
    return line_of(read_launch(text, {}), LLAMA)


@pytest.mark.parametrize("text", READ)
def test_recipes_of_lines_are_read(text):
    """Prevents a trainer's FP8 option predicted as bf16, or as another recipe."""
    recipe, keeps = READ[text]
    assert precision_of(parse_line(text)) == ("fp8", Fp8(recipe=recipe, keeps_bf16_weights=keeps))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LM, None),
        (BRIDGE + "mixed_precision=bf16_mixed", None),
        (BRIDGE + "model.fp8=null", None),
        (BRIDGE + "--compute_dtype nvfp4", "nvfp4 is not known"),
        (LM + "--fp4-format e2m1", "FP4 is not counted"),
    ],
)
def test_other_lines_are_in_bf16(text, told):
    """Prevents predicting FP8 for a line that lacks it or turns it off."""
    assert precision_of(parse_line(text))[0] == "bf16"
    notes = list(notes_on_precision(parse_line(text)))
    assert told in " ".join(notes) if told else not notes


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--fp8-format hybrid --fp8-recipe custom", "custom is predicted as tensorwise"),
        (
            "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16",
            "2 language layers stay in bf16",
        ),
        (MX + "--first-last-layers-bf16 --num-layers-at-start-in-bf16 4", "5 language"),
        ("--fp8-format hybrid --fp8-dot-product-attention", "attention is predicted in bf16"),
        ("--fp8-format hybrid --no-fp8-wgrad", "gradients of weights are predicted in FP8"),
    ],
)
def test_what_is_not_counted_is_said(flags, told):
    """Prevents omitting a note if a line asks for more or less FP8 than is counted."""
    (note,) = notes_on_precision(parse_line(LM + flags))
    assert told in note

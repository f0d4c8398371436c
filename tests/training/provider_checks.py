"""A model with Transformer Engine layers against local layers, in a process with a stand-in:
PYTHONPATH=.:tests/training/fake_te python tests/training/provider_checks.py"""

from dataclasses import replace

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear
from pipeline_cases import MODEL, pipeline_plan
from ranks import run_alone, run_ranks
from toy import OPTIONS, PROFILE, pack, toy_batch, toy_model, toy_sample
from transformer_engine import Float8CurrentScaling, Format
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from megatron.vlm.backend import prepare_megatron_core
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.profiler import Profiler
from megatron.vlm.measure.stage_replay import StageReplayer, act_as_stage
from megatron.vlm.model.initialize import first_values, initialize_parameters
from megatron.vlm.model.stage import build_stage
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.job import JobSpec
from omnibal.model.parallel import Parallel

MODELS = (
    MODEL,
    toy_model(normalization="RMSNorm", qkv_bias=False).with_tower(
        "language", qk_norm=True, head_size=10
    ),
)
SAMPLES = [(2, 9), (0, 12), (1, 6)]
FP8_MODEL = MODEL.with_tower("language", hidden_size=32, head_size=8, ffn_hidden_size=48, layers=4)


def describe(provider, model, tensor):
    """Return the stage, parameter shapes and shardings by name, and checkpoint keys."""
    stage = build_stage(pipeline_plan(model=model, tensor=tensor), 0, provider=provider)
    assert any(isinstance(part, TELinear) for part in stage.modules()) == (provider == "te")
    initialize_parameters(stage, first_values(stage, seed=5))
    parameters = {
        name: (p.shape, p.tensor_model_parallel, p.partition_dim, p.partition_stride)
        for name, p in stage.named_parameters()
    }
    return stage, parameters, sorted(stage.sharded_state_dict(metadata={"dp_cp_group": None}))


def compare(links, model, tensor):
    """Compare providers' parameters and checkpoint keys; on one rank loss and gradients too."""
    (local, *expected), (engine, *found) = (
        describe(provider, model, tensor) for provider in ("local", "te")
    )
    assert found == expected, (found, expected)
    if tensor > 1:
        return
    batch = pack([toy_sample(model, *counts, seed=i) for i, counts in enumerate(SAMPLES)])
    losses = [stage(batch) for stage in (local, engine)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    sum(losses).backward()
    theirs = dict(engine.named_parameters())
    for name, parameter in local.named_parameters():
        # fp32 sums in either order agree up to rounding of the largest values.
        rounding = 1e-5 * float(parameter.grad.abs().max())
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-4, atol=rounding)


def append_losses(links, plan, losses):
    """Append losses of two steps of ragged packs, and of a forward pass after them."""
    trainer = build_trainer(plan, links, OPTIONS, steps=2, seed=3, provider="te")
    batches = [toy_batch(plan.model, SAMPLES[:count], seed=count) for count in (3, 1)]
    losses += [train_step(trainer, MicroBatchStream.of(batches)).loss for _ in range(2)]
    losses += [float(one) for one in trainer.run_forward(MicroBatchStream.of(batches))]


def check_fp8(links, plan):
    """Assert that FP8 losses equal bf16 losses (the stand-in multiplies in bf16), and that each
    language linear runs in FP8 with the plan's recipe, rows in multiples of 16 and updated
    weights."""
    losses = {"bf16": [], "fp8": []}
    for precision, found in losses.items():
        FP8GlobalStateManager.products.clear()
        append_losses(links, plan.model_copy(update={"precision": precision}), found)
        if precision == "bf16":
            assert not FP8GlobalStateManager.products
    stage = plan.stages[links.rank]
    layers, again = stage.layers("language"), stage.recomputed_in("language")
    # Two micro-batches in two steps (recomputed layers run twice), then a forward of each.
    expected = 4 * (4 * (len(layers) + len(again)) + 2 * len(layers))
    products = FP8GlobalStateManager.products
    assert len(products) == expected, (len(products), expected)
    assert {recipe for recipe, _ in products} == {Float8CurrentScaling(Format.HYBRID)}
    assert all(shape[0] % 16 == 0 and shape[1] == 1 for _, shape in products)
    if links.is_last:
        # bf16 rounding: products with more rows are summed in another order.
        torch.testing.assert_close(losses["fp8"], losses["bf16"], rtol=2e-3, atol=0)


def is_of_engine(trainer):
    return any(isinstance(part, TELinear) for part in trainer.stage.modules())


def check_replay(provider):
    """Assert that a replay builds the requested provider's layers."""
    plan = pipeline_plan()
    with act_as_stage(plan.parallel, 0) as links:
        trainer = StageReplayer(plan, links, provider=provider).trainer
        assert is_of_engine(trainer) == (provider == "te")


def check_profile(links, provider):
    """Assert that a profile measures the requested provider's layers."""
    profiler = Profiler(
        JobSpec.of_plan(pipeline_plan()), links, replace(PROFILE, provider=provider)
    )
    assert is_of_engine(profiler._trainer) == (provider == "te")


if __name__ == "__main__":
    assert HAVE_TE
    torch.set_num_threads(1)
    prepare_megatron_core()
    for model in MODELS:
        for tensor in (1, 2):
            run_ranks(Parallel(pipeline=1, tensor=tensor), compare, model, tensor)
    for provider in ("local", "te"):
        run_alone(check_replay, {"provider": provider})
        run_ranks(Parallel(pipeline=1), check_profile, provider)
    for plan in (
        pipeline_plan(model=FP8_MODEL, language=(1, 2)),
        pipeline_plan(8, model=FP8_MODEL, language=(0, 3)),
    ):
        run_ranks(plan.parallel, check_fp8, plan)

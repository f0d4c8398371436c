"""The pipeline against the single-process run: same losses, same gradients, same weights after."""

import datetime
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import STEPS, TIED, pipeline_plan
from ranks import run_ranks
from tensor_parallel_cases import Feed, alone, batches_of, compare_with_one_process, run
from toy import OPTIONS, toy_batch

from megatron.vlm.backend import COLLECTIVE_TIMEOUT
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.links import create_pipeline_links
from megatron.vlm.step.train import _tied_copies, build_trainer, train_step
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

# Data-parallel ranks get different counts of micro-batches and of loss tokens.
SPLITS = {
    "inside-the-vision-encoder": (pipeline_plan(3), STEPS),
    "between-projector-and-language-embed": (pipeline_plan(6), STEPS),
    "inside-the-language-model": (pipeline_plan(8), STEPS),
    "four-stages-embed-and-head-alone": (pipeline_plan(1, 5, 10), STEPS),
    "two-ranks": (pipeline_plan(data=2), STEPS),
    "two-pipelines": (pipeline_plan(4, data=2), STEPS),
    # As at the end of an epoch, when packs are fewer than ranks.
    "no-micro-batch-for-one-rank": (
        pipeline_plan(4, data=2), [[[(1, 9)]], [[(2, 5)], [(0, 8)], [(1, 6)]]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "steps"), SPLITS.values(), ids=SPLITS)
def test_split_equals_one_process(plan, steps):
    """Prevents: a boundary that loses a gradient, a shape, or the order of micro-batches; a loss or
    gradient that depends on how packs are spread over ranks; pipelines that mix their tensors."""
    compare_with_one_process(plan, steps)


def group_timeouts(links):
    """Of groups made where torch's own default is as short as NCCL's."""
    dist.distributed_c10d._get_default_timeout = lambda backend: datetime.timedelta(minutes=10)
    again = create_pipeline_links()
    tied = _tied_copies(pipeline_plan(10, model=TIED), again)
    groups = (again.activations, again.gradients, tied.group, dist.group.WORLD)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_group_has_the_jobs_timeout():
    """Prevents: a run that ends while a stage waits, rightly, for a neighbour that saves."""
    for timeouts in run_ranks(Parallel(pipeline=2), group_timeouts):
        assert timeouts == [COLLECTIVE_TIMEOUT] * 4


@pytest.mark.parametrize("cut", [3, 6], ids=["vision-cut", "projector-cut"])
def test_step_of_text_only_trains_and_does_not_hang(cut):
    """Prevents: a stage that waits for an empty tensor, or vision weights without a gradient."""
    steps = [[[(0, 12)], [(0, 9), (0, 5)], [(0, 7)]], [[(0, 6)], [(2, 8)]]]
    compare_with_one_process(pipeline_plan(cut), steps)
    gradients = alone(pipeline_plan(cut), steps)[1][0]
    vision = [grad for name, grad in gradients.items() if name.startswith("vision")]
    assert vision and all(not grad.any() for grad in vision)


def test_bf16_pipeline_trains_with_fp32_master_weights():
    """Prevents: a bf16 run whose small updates vanish, or whose loss is of another model."""
    steps = [STEPS[0]] * 8
    same = {"feed": Feed(lambda model, number, packs: batches_of(model, 0, packs))}
    plan = pipeline_plan(4).model_copy(update={"precision": "bf16"})
    ranks = run(plan, steps, **same)
    losses = [loss for loss, _, _ in ranks[0][0]]
    reference = [loss for loss, _, _ in alone(plan, steps, **same)[0]]
    assert losses == pytest.approx(reference, rel=2e-2)
    assert losses[-1] < 0.9 * losses[0]
    assert all(weight.dtype == torch.bfloat16 for _, _, own in ranks for weight in own.values())


def plainly_packed(model, number, packs):
    return [toy_batch(model, pack, seed=number) for pack in packs]


def poisoned(links, plan, factor):
    """Loss of the step after one of pixels that are no numbers, or of one rank's huge gradient."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    weights = list(trainer.stage.parameters())
    before = [weight.detach().clone() for weight in weights]
    batch = spoilt = toy_batch(plan.model, [(1, 9)], seed=0)
    is_second, hooks = dist.get_rank() == 1, []
    if factor is None and (is_second or plan.parallel.data == 1):
        spoilt = replace(batch, pixels_TCPP=batch.pixels_TCPP * math.nan)
    if factor is not None and is_second:
        hooks.append(weights[0].register_hook(lambda gradient: gradient * factor))
    result = train_step(trainer, MicroBatchStream.of([spoilt]))
    assert result.skipped and math.isfinite(result.loss) == (factor is not None)
    assert factor is not None or math.isnan(result.grad_norm)
    trainer.wait_for_weights()
    assert all(map(torch.equal, before, weights))
    for hook in hooks:
        hook.remove()
    after = train_step(trainer, MicroBatchStream.of([batch]))
    trainer.wait_for_weights()
    assert not all(map(torch.equal, before, weights))
    return after.loss, after.skipped


@pytest.mark.parametrize(
    "plan", [pipeline_plan(4), pipeline_plan(data=2)], ids=["pipeline", "buckets"]
)
# Each gradient of the last is finite, and the sum of their squares is not.
@pytest.mark.parametrize("factor", [None, math.inf, 1e25], ids=["loss", "gradient", "norm"])
def test_step_that_is_not_finite_is_skipped_on_every_rank(small_buckets, plan, factor):
    """Prevents: weights or moments spoilt by one batch, ranks that disagree about it, and exchanges
    of a skipped step that go on into the next one, which gives the loss of untouched weights."""
    [(loss, _, _)] = alone(plan, [[[(1, 9)]]], feed=Feed(plainly_packed))[0]
    for after_loss, skipped in run_ranks(plan.parallel, poisoned, plan, factor):
        assert after_loss == pytest.approx(loss, rel=1e-5)
        assert not skipped

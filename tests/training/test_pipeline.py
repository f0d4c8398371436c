"""The pipeline against the single-process run: same losses, same gradients, same weights after."""

import datetime
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import STEPS
from ranks import run_ranks
from tensor_parallel_cases import Feed, alone, batches_of, compare_with_one_process, run
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.backend import COLLECTIVE_TIMEOUT
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.links import create_pipeline_links
from megatron.vlm.step.train import _tied_copies, build_trainer, train_step
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick


# Units of the toy model: 0 vision embed, 1-4 vision layers, 5 projector, 6 language embed,
# 7-9 language layers, 10 head. A cut is the position of the first unit after it.
# Data-parallel ranks get different counts of micro-batches and of loss tokens.
@pytest.mark.parametrize(
    ("cuts", "data"),
    [
        pytest.param((3,), 1, id="inside-the-vision-encoder"),
        pytest.param((6,), 1, id="between-projector-and-language-embed"),
        pytest.param((8,), 1, id="inside-the-language-model"),
        pytest.param((1, 5, 10), 1, id="four-stages-embed-and-head-alone"),
        pytest.param((), 2, id="two-ranks"),
        pytest.param((4,), 2, id="two-pipelines"),
    ],
)
def test_split_equals_one_process(cuts, data):
    """Prevents: a boundary that loses a gradient, a shape, or the order of micro-batches; a loss or
    gradient that depends on how packs are spread over ranks; pipelines that take each other's
    tensors."""
    model = toy_model()
    compare_with_one_process(toy_plan(model, stages_of(model, *cuts), data=data), STEPS)


def group_timeouts(links):
    """Of groups made where torch's own default is as short as NCCL's."""
    dist.distributed_c10d._get_default_timeout = lambda backend: datetime.timedelta(minutes=10)
    again = create_pipeline_links()
    model = toy_model()
    language = model.language.model_copy(update={"tied_head": True})
    model = model.model_copy(update={"language": language})
    tied = _tied_copies(toy_plan(model, stages_of(model, 10)), again)
    groups = (again.activations, again.gradients, tied.group, dist.group.WORLD)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_group_has_the_jobs_timeout():
    """Prevents: a run that ends after ten minutes because a stage waits, rightly, for a neighbour
    that reads its first samples or writes a checkpoint."""
    for timeouts in run_ranks(Parallel(pipeline=2), group_timeouts):
        assert timeouts == [COLLECTIVE_TIMEOUT] * 4


@pytest.mark.parametrize("cuts", [(3,), (6,)], ids=["vision-cut", "projector-cut"])
def test_step_of_text_only_trains_and_does_not_hang(cuts):
    """Prevents: a stage that waits for an empty tensor, or vision weights without a gradient."""
    model = toy_model()
    steps = [[[(0, 12)], [(0, 9), (0, 5)], [(0, 7)]], [[(0, 6)], [(2, 8)]]]
    plan = toy_plan(model, stages_of(model, *cuts))
    compare_with_one_process(plan, steps)
    gradients = alone(plan, steps)[1][0]
    vision = [grad for name, grad in gradients.items() if name.startswith("vision")]
    assert vision and all(not grad.any() for grad in vision)


def test_step_without_micro_batches_for_one_rank():
    """Prevents: a hang at the end of an epoch, when packs are fewer than ranks."""
    model = toy_model()
    steps = [[[(1, 9)]], [[(2, 5)], [(0, 8)], [(1, 6)]]]
    compare_with_one_process(toy_plan(model, stages_of(model, 4), data=2), steps)


def test_bf16_pipeline_trains_with_fp32_master_weights():
    """Prevents: a bf16 run whose small updates vanish, or whose loss is of another model."""
    model = toy_model()
    steps = [STEPS[0]] * 8
    same = {"feed": Feed(lambda model, number, packs: batches_of(model, 0, packs))}
    plan = toy_plan(model, stages_of(model, 4)).model_copy(update={"precision": "bf16"})
    ranks = run(plan, steps, **same)
    losses = [loss for loss, _, _ in ranks[0][0]]
    reference = [loss for loss, _, _ in alone(plan, steps, **same)[0]]
    assert losses == pytest.approx(reference, rel=2e-2)
    assert losses[-1] < 0.9 * losses[0]
    assert all(weight.dtype == torch.bfloat16 for _, _, own in ranks for weight in own.values())


def plainly_packed(model, number, packs):
    return [toy_batch(model, pack, seed=number) for pack in packs]


def train_on_poisoned_pixels(links, plan):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    batch = toy_batch(plan.model, [(1, 9)], seed=0)
    poisoned = replace(batch, pixels_TCPP=batch.pixels_TCPP * float("nan"))
    result = train_step(trainer, MicroBatchStream.of([poisoned]))
    assert result.skipped and math.isnan(result.loss) and math.isnan(result.grad_norm)
    assert all(torch.equal(before[n], p) for n, p in trainer.stage.named_parameters())
    after = train_step(trainer, MicroBatchStream.of([batch]))
    return after.loss, after.skipped


def poison_one_gradient(links, plan, factor):
    """One rank's one parameter has gradients so much larger, where the loss is finite."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    batch = toy_batch(plan.model, [(1, 9)], seed=0)
    weight = next(trainer.stage.parameters())
    if links.rank == 1:
        hook = weight.register_hook(lambda gradient: gradient * factor)
    result = train_step(trainer, MicroBatchStream.of([batch]))
    assert result.skipped and math.isfinite(result.loss)
    assert all(torch.equal(before[n], p) for n, p in trainer.stage.named_parameters())
    if links.rank == 1:
        hook.remove()
    after = train_step(trainer, MicroBatchStream.of([batch]))
    return after.loss, after.skipped


@pytest.mark.parametrize(
    "poison",
    [
        pytest.param(train_on_poisoned_pixels, id="loss"),
        pytest.param(partial(poison_one_gradient, factor=math.inf), id="gradient"),
        # Each gradient is finite, and the sum of their squares is not.
        pytest.param(partial(poison_one_gradient, factor=1e25), id="norm"),
    ],
)
def test_step_that_is_not_finite_is_skipped_on_every_rank(poison):
    """Prevents: weights or moments spoilt by one batch, and ranks that disagree about the update.

    The step after it gives the loss of untouched weights, and trains.
    """
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4))
    results = run_ranks(plan.parallel, poison, plan)
    [(loss, _, _)] = alone(plan, [[[(1, 9)]]], feed=Feed(plainly_packed))[0]
    for after_loss, skipped in results:
        assert after_loss == pytest.approx(loss, rel=1e-5)
        assert not skipped

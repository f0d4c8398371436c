"""The pipeline against one process: equal losses, gradients and trained weights."""

import datetime
import math
from dataclasses import replace

import data_parallel_encoder_cases as dp
import pytest
import torch
import torch.distributed as dist
from data_parallel_cases import own_stream
from pipeline_cases import STEPS, TIED, pipeline_plan
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    Feed,
    as_one_process,
    batches_of,
    compare_with_one_process,
    run,
)
from toy import OPTIONS, cut_plan, toy_batch

from megatron.vlm.backend import COLLECTIVE_TIMEOUT
from megatron.vlm.step.links import create_pipeline_links
from megatron.vlm.step.train import _group_tied_copies, build_trainer, train_step
from omnibal.model.parallel import Parallel

pytestmark = pytest.mark.quick

# Data-parallel ranks get different numbers of micro-batches and loss tokens.
SPLITS = {
    "inside-the-vision-encoder": (pipeline_plan(3), STEPS),
    "between-projector-and-language-embed": (pipeline_plan(6), STEPS),
    "inside-the-language-model": (pipeline_plan(8), STEPS),
    "four-stages-embed-and-head-alone": (pipeline_plan(1, 5, 10), STEPS),
    "two-ranks": (pipeline_plan(data=2), STEPS),
    "two-pipelines": (pipeline_plan(4, data=2), STEPS),
    # As at the end of an epoch with fewer packs than ranks.
    "no-micro-batch-for-one-rank": (
        pipeline_plan(4, data=2), [[[(1, 9)]], [[(2, 5)], [(0, 8)], [(1, 6)]]],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "steps"), SPLITS.values(), ids=SPLITS)
def test_split_equals_one_process(plan, steps):
    """Prevents stage boundaries that lose gradients, shapes or the order of micro-batches; losses
    or gradients that depend on the distribution of packs; tensors swapped between pipelines."""
    compare_with_one_process(plan, steps)


def group_timeouts(links):
    """Return timeouts of groups created while torch's default timeout is as short as NCCL's."""
    dist.distributed_c10d._get_default_timeout = lambda backend: datetime.timedelta(minutes=10)
    again = create_pipeline_links()
    tied = _group_tied_copies(pipeline_plan(10, model=TIED), again)
    groups = (again.activations, again.gradients, tied.group, dist.group.WORLD)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_every_group_has_the_jobs_timeout():
    """Prevents a timeout while a stage waits for a neighbour that saves."""
    for timeouts in run_ranks(Parallel(pipeline=2), group_timeouts):
        assert timeouts == [COLLECTIVE_TIMEOUT] * 4


def test_bf16_pipeline_trains_with_fp32_master_weights():
    """Prevents bf16 training that loses small updates or computes another loss."""
    steps = [STEPS[0]] * 8
    same = {"feed": Feed(lambda model, number, packs: batches_of(model, 0, packs))}
    plan = pipeline_plan(4).model_copy(update={"precision": "bf16"})
    ranks = run(plan, steps, **same)
    losses = [loss for loss, _, _ in ranks[0][0]]
    reference = [loss for loss, _, _ in as_one_process(plan, steps, **same)[0]]
    assert losses == pytest.approx(reference, rel=2e-2)
    assert losses[-1] < 0.9 * losses[0]
    assert all(weight.dtype == torch.bfloat16 for _, _, own in ranks for weight in own.values())


def toy_batches(model, number, packs):
    return [toy_batch(model, pack, seed=number) for pack in packs]


def copy_state(trainer):
    """Copy the rank's weights and optimizer state, of data-parallel encoders too."""
    encoders = [] if trainer.encoders is None else [trainer.encoders.data_parallel]
    holders = [trainer.data_parallel, *encoders]
    kept = [tensor for part in holders for tensor in (*part.weights(), *part.optimizer_state())]
    return [tensor.detach().clone() for tensor in kept]


def is_unchanged(trainer, before):
    trainer.wait_for_weights()
    after = copy_state(trainer)
    return len(after) == len(before) and all(map(torch.equal, before, after))


def step_after_bad_step(links, plan, factor):
    """Return the loss of the step after a step with NaN pixels or a scaled gradient on one rank."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    before, hooks = copy_state(trainer), []
    packs = [toy_batch(plan.model, [(1, 9)], seed=0)] * plan.parallel.data
    spoilt = replace(packs[0], pixels_TCPP=packs[0].pixels_TCPP * math.nan)
    if factor is not None and dist.get_rank() == 1:
        weight = next(trainer.stage.parameters())
        hooks.append(weight.register_hook(lambda gradient: gradient * factor))
    given = packs if factor is not None else [*packs[:-1], spoilt]
    result = train_step(trainer, own_stream(plan, 0, given))
    assert result.skipped and math.isfinite(result.loss) == (factor is not None)
    assert factor is not None or math.isnan(result.grad_norm)
    assert is_unchanged(trainer, before)
    for hook in hooks:
        hook.remove()
    after = train_step(trainer, own_stream(plan, 0, packs))
    assert not is_unchanged(trainer, before)
    return after.loss, after.skipped


WHOLE = {"pipeline": pipeline_plan(4), "buckets": pipeline_plan(data=2)}
DIVIDED = {
    f"divided-by-{sharded}": cut_plan(MODELS["300M-like"], data=4, sharded=sharded)
    for sharded in (2, 4)
}
DATA_PARALLEL = {
    f"data-parallel-divided-by-{sharded}": dp.plan_of(
        dp.Case({"data": 2}, cuts=(2,), pipelines=2, sharded=sharded)
    )
    for sharded in (1, 2)
}
FACTORS = {"loss": None, "gradient": math.inf, "norm": 1e25}
""""norm": each gradient is finite, their sum of squares overflows."""
POISONED = [
    *((name, factor) for name in WHOLE for factor in FACTORS),
    *((name, "loss") for name in DIVIDED | DATA_PARALLEL),
]


@pytest.mark.parametrize(("name", "factor"), POISONED)
def test_step_that_is_not_finite_is_skipped_on_every_rank(small_buckets, name, factor):
    """Prevents weights, moments or replicas corrupted by one batch, updates on only some ranks or
    parts, and exchanges of a skipped step that leak into the next step."""
    plan = (WHOLE | DIVIDED | DATA_PARALLEL)[name]
    [(loss, _, _)] = as_one_process(plan, [[[(1, 9)]]], feed=Feed(toy_batches))[0]
    for after_loss, skipped in run_ranks(plan.parallel, step_after_bad_step, plan, FACTORS[factor]):
        assert after_loss == pytest.approx(loss, rel=1e-5)
        assert not skipped

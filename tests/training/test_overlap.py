"""Exchanges of data-parallel ranks that run while a stage computes, against one process."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from overlap_cases import MODEL, STEPS
from ranks import run_ranks
from tensor_parallel_cases import OPTIONS, alone, assert_same_training, train_steps
from toy import stages_of, toy_batch, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step

TIED = MODEL.model_copy(update={"language": MODEL.language.model_copy(update={"tied_head": True})})


class _LateGather:
    """A gather whose weights come when they are waited for, and are no numbers before."""

    def __init__(self, bucket_group, data):
        [bucket] = bucket_group.buckets
        group = bucket_group.intra_distributed_optimizer_instance_group
        own = bucket.param_data.chunk(group.size())[group.rank()].clone()
        self._data, self._whole = data, torch.empty_like(data)
        self._work = dist.all_gather_into_tensor(self._whole, own, group=group, async_op=True)
        data.fill_(math.nan)
        data.chunk(group.size())[group.rank()].copy_(own)

    def wait(self):
        self._work.wait()
        self._data.copy_(self._whole)


def watch_exchanges(monkeypatch):
    """Make gathers late; returns a list of (kind, bucket, whether in a backward) as they begin."""
    begun = []
    reduce = _ParamAndGradBucketGroup.start_grad_sync

    def start_grad_sync(group, **options):
        if group.grad_reduce_handle is None:
            in_backward = torch._C._current_graph_task_id() != -1
            begun.append(("reduce", group.buckets[0].bucket_id, in_backward))
        reduce(group, **options)

    def start_param_sync(group, force_sync=False):
        assert group.param_gather_handle is None and not force_sync
        begun.append(("gather", group.buckets[0].bucket_id, False))
        group.param_gather_handle = _LateGather(group, group.buckets[0].param_data)
        group.param_gather_dispatched = True

    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_grad_sync", start_grad_sync)
    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_param_sync", start_param_sync)
    return begun


def watched_training(links, plan):
    with pytest.MonkeyPatch.context() as monkeypatch:
        begun = watch_exchanges(monkeypatch)
        trained = train_steps(links, plan, STEPS)
    place = (links.rank, parallel_state.get_tensor_model_parallel_rank())
    return *trained, place, begun


RECOMPUTE = {"vision": (0,), "language": (0, 1)}


# Units of the model: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head.
@pytest.mark.parametrize(
    ("model", "cuts", "recompute", "sizes", "frozen"),
    [
        pytest.param(MODEL, (5,), RECOMPUTE, {}, (), id="pp2-recomputed"),
        pytest.param(MODEL, (), RECOMPUTE, {}, ("vision",), id="frozen-vision"),
        pytest.param(MODEL, (3,), {}, {}, ("language",), id="frozen-language"),
        pytest.param(TIED, (), {"language": (1,)}, {}, (), id="tied-in-one-stage"),
        pytest.param(TIED, (6,), {}, {}, (), id="tied-apart"),
        pytest.param(
            MODEL, (), RECOMPUTE, {"tensor": 2, "sequence_parallel": True}, (), id="tp2-sp"
        ),
    ],
)
def test_late_exchanges_train_as_one_process(small_buckets, model, cuts, recompute, sizes, frozen):
    """Prevents: a gradient that comes after its bucket was summed, a weight that is used before it
    is here, and buckets that ranks with other packs exchange in another order, or never."""
    plan = toy_plan(model, stages_of(model, *cuts, **recompute), data=2, **sizes)
    plan = plan.model_copy(update={"frozen": frozen})
    ranks = run_ranks(plan.parallel, watched_training, plan)
    assert_same_training(ranks, plan, alone(plan, STEPS))
    in_order = {}
    for *_, place, begun in ranks:
        order = [(kind, bucket) for kind, bucket, _ in begun]
        assert in_order.setdefault(place, order) == order
    first_stage = [begun for *_, place, begun in ranks if place[0] == 0]
    for begun in first_stage:
        buckets = {bucket for _, bucket, _ in begun}
        assert len(buckets) > 3
        gathers = [bucket for kind, bucket, _ in begun if kind == "gather"]
        assert gathers == sorted(buckets, reverse=True) * len(STEPS)
    # All but those of the rank that has no pack in the first step.
    during = [[inside for kind, _, inside in begun if kind == "reduce"] for begun in first_stage]
    assert all(map(all, during[: plan.parallel.tensor]))
    assert all(sum(inside) == len(inside) * 3 // 4 for inside in during[plan.parallel.tensor :])


@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied-in-one-stage"])
def test_late_exchanges_train_with_fused_weight_gradients(small_buckets, monkeypatch, tied):
    """Prevents: a bucket that is summed before a product adds its weight gradient to it."""
    model = TIED if tied else MODEL
    plan = toy_plan(model, stages_of(model, **RECOMPUTE), data=2)
    expected = alone(plan, STEPS)
    monkeypatch.setattr("megatron.vlm.model.configs.fuses_weight_gradients", lambda: True)
    assert_same_training(run_ranks(plan.parallel, watched_training, plan), plan, expected)


def poisoned_steps(links, plan, spoil_loss):
    """Weights after a step, after a skipped one and after another, and whether it was skipped."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    seen, skipped = [], False
    for number in range(3):
        batch = toy_batch(plan.model, [(1, 9)], seed=0)
        spoilt = number == 1 and parallel_state.get_data_parallel_rank() == 1
        hooks = []
        if spoilt and spoil_loss:
            batch = replace(batch, loss_weights_L=torch.full(batch.labels_L.shape, math.nan))
        elif spoilt:
            weight = next(trainer.stage.parameters())
            hooks.append(weight.register_hook(lambda gradient: gradient * math.inf))
        skipped |= train_step(trainer, MicroBatchStream.of([batch])).skipped
        for hook in hooks:
            hook.remove()
        trainer.wait_for_weights()
        seen.append([weight.detach().clone() for weight in trainer.stage.parameters()])
    return seen, skipped


@pytest.mark.parametrize("spoil_loss", [True, False], ids=["loss", "gradient"])
def test_skipped_step_ends_its_exchanges(small_buckets, spoil_loss):
    """Prevents: reductions of a step that is skipped that go on into the next one, and weights that
    are gathered though no rank has changed its share."""
    plan = toy_plan(MODEL, stages_of(MODEL), data=2)
    for (first, second, third), skipped in run_ranks(
        plan.parallel, poisoned_steps, plan, spoil_loss
    ):
        assert skipped
        assert all(map(torch.equal, first, second))
        assert not all(map(torch.equal, second, third))

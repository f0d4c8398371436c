"""Gradients exchanged during compute, and added to buffers by products as on CUDA, against one
process that does neither."""

import math

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from overlap_cases import MODEL, STEPS
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from tensor_parallel_cases import STEPS as PLAIN_STEPS
from tensor_parallel_cases import TIED, as_one_process, assert_same_training, train_steps

from megatron.vlm.backend import WeightGradients


class _LateGather:
    """A gather that fills weights on `wait`, and leaves NaN before."""

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


def train_and_watch(links, plan):
    """Return results with late gathers, rank's place, exchanges (kind, bucket, in backward)."""
    begun, reduce = [], _ParamAndGradBucketGroup.start_grad_sync

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

    # This forked process runs nothing else.
    _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync
    _ParamAndGradBucketGroup.start_param_sync = start_param_sync
    trained = train_steps(links, plan, STEPS)
    return *trained, (links.rank, parallel_state.get_tensor_model_parallel_rank()), begun


RECOMPUTE = {"vision": (0,), "language": (0, 1)}


# Units of the model: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head.
LATE = {
    "pp2-recomputed": pipeline_plan(5, model=MODEL, data=2, **RECOMPUTE),
    "frozen-vision": pipeline_plan(model=MODEL, data=2, frozen=("vision",), **RECOMPUTE),
    "frozen-language": pipeline_plan(3, model=MODEL, data=2, frozen=("language",)),
    "tied-in-one-stage": pipeline_plan(model=TIED, data=2, language=(1,)),
    "tied-apart": pipeline_plan(6, model=TIED, data=2),
    "tp2-sp": pipeline_plan(model=MODEL, data=2, tensor=2, sequence_parallel=True, **RECOMPUTE),
}


@pytest.mark.parametrize("plan", LATE.values(), ids=LATE)
def test_late_exchanges_train_as_one_process(small_buckets, plan):
    """Prevents gradients added after their bucket was reduced, weights used before their gather,
    and buckets exchanged in different orders by ranks."""
    ranks = run_ranks(plan.parallel, train_and_watch, plan)
    assert_same_training(ranks, plan, as_one_process(plan, STEPS))
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
    # All but exchanges of the rank without a pack in the first step.
    during = [[inside for kind, _, inside in begun if kind == "reduce"] for begun in first_stage]
    assert all(map(all, during[: plan.parallel.tensor]))
    assert all(sum(inside) == len(inside) * 3 // 4 for inside in during[plan.parallel.tensor :])


def compare_fused(monkeypatch, plan, steps, work):
    """Compare fused weight-gradient accumulation with one process that adds gradients."""
    expected = as_one_process(plan, steps)
    monkeypatch.setattr("megatron.vlm.model.configs.fuses_weight_gradients", lambda: True)
    assert_same_training(run_ranks(plan.parallel, work, plan), plan, expected)


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["plain", "tied-in-one-stage"])
def test_late_exchanges_train_with_fused_weight_gradients(small_buckets, monkeypatch, model):
    """Prevents reducing a bucket before a product adds its weight gradient."""
    plan = pipeline_plan(model=model, data=2, **RECOMPUTE)
    compare_fused(monkeypatch, plan, STEPS, train_and_watch)


FUSED = {
    "tied": pipeline_plan(model=TIED),
    "tied-tp2-sp-pp2": pipeline_plan(5, model=TIED, tensor=2, sequence_parallel=True),
    "tp2-dp2-recomputed": pipeline_plan(model=MODEL, vision=(1,), language=(0,), data=2, tensor=2),
    "frozen": pipeline_plan(model=MODEL, frozen=("vision", "projector")),
}


def train_with_products(links, plan):
    """Return `train_steps` results; asserts that products accumulate weight gradients."""
    buffers, add = [], WeightGradients.wgrad_gemm_accum_fp32
    WeightGradients.wgrad_gemm_accum_fp32 = lambda *tensors: buffers.append(add(*tensors))
    result = train_steps(links, plan, PLAIN_STEPS)
    assert len(buffers) >= len(PLAIN_STEPS)
    return result


@pytest.mark.parametrize("plan", FUSED.values(), ids=FUSED)
def test_fused_weight_gradients_train_the_same(plan, monkeypatch):
    """Prevents lost gradients, or gradients counted twice in a tied matrix."""
    compare_fused(monkeypatch, plan, PLAIN_STEPS, train_with_products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_take_sums_unrounded(dtype):
    """Prevents rounding away a small gradient in a large accumulated sum."""
    input_RI, gradient_RO = (torch.full((3, size), 2.0**-7, dtype=dtype) for size in (4, 5))
    buffer_OI = torch.ones(5, 4)
    WeightGradients.wgrad_gemm_accum_fp32(input_RI, gradient_RO, buffer_OI)
    assert torch.equal(buffer_OI, torch.full((5, 4), 1 + 3 * 2.0**-14))


@pytest.mark.quick
def test_device_contexts_work():
    """Prevents models on the meta device from allocating memory or losing buffers."""
    with torch.device("meta"):
        assert torch.empty(2).is_meta and torch.nn.Linear(2, 3).weight.is_meta
    if not torch.cuda.is_available():
        assert torch.empty(2, device="cuda").device.type == "cpu"

"""Weight gradients that products add to buffers, as on CUDA, against gradients added after."""

import pytest
import torch
from ranks import run_ranks
from tensor_parallel_cases import STEPS, TIED, UNTIED, alone, assert_same_training, train_steps
from toy import stages_of, toy_plan

from megatron.vlm.backend import WeightGradients

CASES = {
    "tied": toy_plan(TIED, stages_of(TIED)),
    "tied-tp2-sp-pp2": toy_plan(TIED, stages_of(TIED, 5), tensor=2, sequence_parallel=True),
    "tp2-dp2-recomputed": toy_plan(
        UNTIED, stages_of(UNTIED, vision=(1,), language=(0,)), data=2, tensor=2
    ),
    "frozen": toy_plan(UNTIED, stages_of(UNTIED)).model_copy(
        update={"frozen": ("vision", "projector")}
    ),
}


def steps_that_add(links, plan):
    """The steps of one rank, all of whose products for weight gradients must add them."""
    buffers, add = [], WeightGradients.wgrad_gemm_accum_fp32
    WeightGradients.wgrad_gemm_accum_fp32 = lambda *tensors: buffers.append(add(*tensors))
    result = train_steps(links, plan, STEPS)
    assert len(buffers) >= len(STEPS)
    return result


@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same(case, monkeypatch):
    """Prevents: a linear whose gradient is lost, or counted twice beside the tied matrix's other
    use, by tensor-parallel ranks or by recomputation."""
    plan = CASES[case]
    expected = alone(plan)
    monkeypatch.setattr("megatron.vlm.model.configs.fuses_weight_gradients", lambda: True)
    ranks = run_ranks(plan.parallel, steps_that_add, plan)
    assert_same_training(ranks, plan, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_take_sums_unrounded(dtype):
    """Prevents: a small gradient lost to rounding beside a large sum of earlier micro-batches."""
    input_RI, gradient_RO = (torch.full((3, size), 2.0**-7, dtype=dtype) for size in (4, 5))
    buffer_OI = torch.ones(5, 4)
    WeightGradients.wgrad_gemm_accum_fp32(input_RI, gradient_RO, buffer_OI)
    assert torch.equal(buffer_OI, torch.full((5, 4), 1 + 3 * 2.0**-14))
    half_OI = torch.ones(5, 4, dtype=dtype)
    WeightGradients.wgrad_gemm_accum_fp16(input_RI * 64, gradient_RO * 64, half_OI)
    assert torch.equal(half_OI, torch.full((5, 4), 1.75, dtype=dtype))

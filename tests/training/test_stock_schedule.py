"""Schedules against Megatron-core's own, 1F1B and interleaved, on the same stages."""

from functools import partial

import pytest
import torch
from chunk_cases import with_chunks
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_batch, toy_model, toy_plan

from benchmarks.schedule import gradients, run_ours, run_stock, stock_stages
from megatron.vlm.step.train import build_trainer

VARYING = [
    [(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)], [(1, 20)],
]  # fmt: skip
EQUAL = [[(2, 9), (1, 14)]] * 5


def by_both_schedules(links, plan, packs, varying):
    """(losses, gradients) of this stage by our schedule and by stock's."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(packs)]
    of_rank = plan, trainer.models, trainer.links
    stages = stock_stages(*of_rank, varying=varying)
    results = []
    for run in (partial(run_ours, *of_rank), partial(run_stock, plan, stages, trainer.links)):
        trainer.zero_gradients()
        losses = run(batches)
        results.append((losses, gradients(trainer)))
    return results


# Units of the toy model: 0 vision embed, 1-4 vision layers, 5 projector, 6 language embed,
# 7-9 language layers, 10 head. Stock cannot send what crosses at 6, which has two dimensions.
@pytest.mark.parametrize(
    ("cuts", "packs"),
    [
        pytest.param((3,), VARYING, id="cut-in-vision-varying"),
        pytest.param((8,), EQUAL, id="cut-in-language-equal"),
        pytest.param((2, 7, 9), VARYING, id="four-stages-varying"),
        pytest.param((2, 7, 9), VARYING[:2], id="fewer-micro-batches-than-stages"),
    ],
)
def test_losses_and_gradients_equal_stock(cuts, packs):
    """Prevents: a faster schedule that trains something else than Megatron-core's."""
    model = toy_model()
    assert_same(toy_plan(model, stages_of(model, *cuts)), packs)


@pytest.mark.parametrize(
    ("cuts", "chunks"),
    [((2, 7, 9), 2), ((1, 2, 4, 5, 7, 8, 10), 4), ((1, 2, 4, 5, 7, 8, 10), 2)],
)
def test_interleaved_losses_and_gradients_equal_stock(cuts, chunks):
    """Prevents: chunks in an order that is not Megatron-core's, or that train something else."""
    model = toy_model()
    plan = with_chunks(toy_plan(model, stages_of(model, *cuts)), chunks)
    assert_same(plan, (VARYING * 2)[: 2 * plan.parallel.pipeline])


def assert_same(plan, packs):
    """Both schedules give the same losses and gradients on all ranks."""
    ranks = run_ranks(plan.parallel, by_both_schedules, plan, packs, packs is not EQUAL)
    for (losses, found), (stock_losses, expected) in ranks:
        torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=0)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert len(ranks[-1][1][0]) == len(packs)
    gradients_of_all = [value for _, (_, stock) in ranks for value in stock.values()]
    assert sum(bool(value.any()) for value in gradients_of_all) > len(gradients_of_all) / 2

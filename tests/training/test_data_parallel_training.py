"""Data-parallel encoders train as one process with all units in its pipeline does."""

from itertools import chain

import data_parallel_encoder_cases as dp
import pytest
import torch
from data_parallel_cases import own_stream
from pipeline_cases import pipeline_plan
from ranks import record_logs, run_ranks
from tensor_parallel_cases import (
    OPTIONS,
    as_one_process,
    compare_resumed,
    compare_with_one_process,
    run,
    train_steps,
)

from megatron.vlm.step.train import build_trainer, train_step


@pytest.mark.parametrize("case", dp.CASES.values(), ids=dp.CASES)
def test_data_parallel_encoders_train_as_one_process(case):
    """Prevents training that depends on an item's encoding rank, and hanging ranks."""
    feed = dp.feed_of(case.drop_path)
    compare_with_one_process(dp.plan_of(case), dp.STEPS, feed=feed)


def plan_of(sizes, **options):
    return dp.plan_of(dp.Case(sizes, **options))


def in_pipeline(*cuts, **options):
    return pipeline_plan(*cuts, model=dp.model_of_case(dp.Case({})), **options)


RESUMES = {
    "pipeline-to-data-parallel": (
        in_pipeline(2, tensor=2, sequence_parallel=True), plan_of({"data": 2}, cuts=(1,)),
    ),
    "frozen-language": (
        plan_of({"data": 2}, pipelines=2, frozen=("language",)),
        in_pipeline(tensor=2, frozen=("language",)),
    ),
    "divided-to-pipeline": (
        plan_of({"data": 4, "sharded": 2}, pipelines=2, sharded=4), in_pipeline(2, data=2),
    ),
    "whole-to-divided": (plan_of({"data": 2}, cuts=(1,)), plan_of(dp.IN_PARTS, sharded=2)),
    "frozen-encoders": (
        in_pipeline(5, frozen=("vision", "projector")),
        plan_of({"data": 2}, frozen=("vision", "projector")),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), RESUMES.values(), ids=RESUMES)
def test_resumes_with_encoders_elsewhere(tmp_path, before, after):
    """Prevents a checkpoint that fits one encoder placement, and swapped moments."""
    compare_resumed(tmp_path, (before, 2), (after, 2), steps=dp.STEPS, feed=dp.feed_of())


def core_warnings(links, plan, folder):
    """Return Megatron-core's warnings of states that differ between ranks, during a save."""
    with record_logs("megatron.core.dist_checkpointing.validation") as lines:
        train_steps(links, plan, dp.STEPS[:1], save=folder, feed=dp.feed_of())
    return lines


@pytest.mark.parametrize(
    "plan",
    [
        in_pipeline(2, data=2),
        plan_of({"data": 2}, pipelines=2),
        plan_of({"data": 2}, pipelines=2, frozen=("language",)),
        in_pipeline(5, frozen=("vision", "projector")),
    ],
    ids=["pipeline", "data-parallel", "frozen-language", "frozen-stage"],
)
def test_ranks_save_the_same_in_common(tmp_path, plan):
    """Prevents a warning by core from every rank at every save, which hides real warnings."""
    assert not any(run_ranks(plan.parallel, core_warnings, plan, tmp_path))


@pytest.mark.parametrize("sharded", [1, 2])
def test_bf16_trains_as_fp32(sharded):
    """Prevents an exchange that mixes dtypes, and gradients lost to rounding."""
    plan = plan_of({"data": 2}, pipelines=2, audio=True, sharded=sharded)
    fp32 = as_one_process(plan, dp.STEPS, feed=dp.feed_of())[0]
    plan = plan.model_copy(update={"precision": "bf16"})
    for results, _, weights in run(plan, dp.STEPS, feed=dp.feed_of()):
        for got, expected in zip(results, fp32, strict=True):
            assert got[:2] == pytest.approx(expected[:2], rel=5e-2)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())


def passes_of_each_kind(links, plan):
    """Return this rank's passes, and the items of an encoder layer's forwards, in one step."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    seen = []
    layer = trainer.encoders.stage.encoders["vision"].layers.layers[0]
    layer.register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    stream = own_stream(plan, 0, list(dp.packs_of(plan.model, 0, dp.STEPS[0])))
    train_step(trainer, stream)
    return [(one.items, one.is_kept) for one in stream.encoding.passes], seen


def test_only_what_is_not_kept_runs_again():
    """Prevents an extra recomputed forward, and activations of more items than planned."""
    plan = plan_of({"data": 2}, pipelines=2, per_pass=2, kept=3)
    for passes, seen in run_ranks(plan.parallel, passes_of_each_kind, plan):
        assert [items for items, _ in passes] == [2, 1, 2]
        assert [is_kept for _, is_kept in passes] == [True, True, False]
        assert seen == [2, 1, 2, 2]


def gradients_in_norm(links, plan):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    train_step(trainer, own_stream(plan, 0, list(dp.packs_of(plan.model, 0, dp.STEPS[0]))))
    chains = [one.chained_optimizers for one in trainer.optimizers]
    taken = [grad for each in chain(*chains) for grad in each.get_main_grads_for_grad_norm()]
    return sum(map(torch.numel, taken))


def test_every_gradient_counts_once_in_the_norm():
    """Prevents encoder gradients counted on every tensor-parallel rank, or on only one."""
    plan, whole = plan_of({"tensor": 2, "data": 2}, pipelines=2), in_pipeline()
    taken, expected = (
        sum(run_ranks(one.parallel, gradients_in_norm, one)) for one in (plan, whole)
    )
    # Padding rows of the vocabulary under TP 2, in the embedding and the head.
    language = plan.model.language
    padded = 2 * language.words_of_rank(2) - language.words_of_rank(1)
    assert taken == expected + 2 * padded * language.hidden_size

"""Stages with several chunks, compared with one process and with one chunk per stage."""

import pytest
import torch
from chunk_cases import chunk_plan, run_by_rule, whole_back_and_forth, with_chunks
from mixture_cases import plan_of as mixture_plan
from pipeline_cases import MODEL, named_parameters, pipeline_plan
from pipeline_cases import STEPS as PIPELINE_STEPS
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    STEPS,
    TIED,
    batches_of,
    compare_resumed,
    compare_with_one_process,
)

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.random_batches import random_batch
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.schedule import _HeldBatches
from megatron.vlm.step.train import build_trainer
from omnibal.job.check import training_obstacles
from omnibal.job.plan import PlannedLevel
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.limits import Caps
from omnibal.pipeline.schedules import PipelineSchedule

PLAIN = MODELS["300M-like"]
SOME = {"vision": (1,), "language": (0,)}
IN_PARTS = {"tensor": 2, "sequence_parallel": True}


def plan_of(*cuts, model=PLAIN, name="interleaved", **options):
    """Return a plan with two chunks per stage. Units: 0 vision embed, 1-2 vision layers, 3
    projector, 4 language embed, 5-6 language layers, 7 head."""
    return with_chunks(pipeline_plan(*cuts, model=model, **options), 2, name)


PLANS = {
    "pp2": chunk_plan(MODEL, 2, 2),
    "pp2-three-chunks": chunk_plan(MODEL, 2, 3),
    "pp4": chunk_plan(MODEL, 4, 2),
    "pp2-dp2": chunk_plan(MODEL, 2, 2, data=2),
    "back-and-forth-pp2": chunk_plan(MODEL, 2, 2, name="zb-v"),
    "back-and-forth-pp4": chunk_plan(MODEL, 4, 2, name="zb-v"),
    # Each plan below also runs a step without images.
    "tensor": plan_of(2, 4, 6, **IN_PARTS, **SOME),
    "frozen-vision": plan_of(2, 4, 6, data=2, frozen=("vision",)),
    "frozen-language": plan_of(3, 5, 7, frozen=("language",)),
    "divided": plan_of(2, 4, 6, data=2, sharded=2, **SOME),
    "back-and-forth": plan_of(2, 4, 6, name="zb-v", data=2),
    "tied-two-stages-tensor": plan_of(2, 4, 6, model=TIED, **IN_PARTS),
    "tied-one-stage-divided": plan_of(2, 5, 6, model=TIED, data=2, sharded=2),
    "tied-one-stage-back-and-forth": plan_of(5, 6, 7, model=TIED, name="zb-v", data=2),
    "tied-one-stage-frozen": plan_of(2, 5, 6, model=TIED, frozen=("language",)),
    "tied-one-part": plan_of(1, 3, 4, model=TIED),
    # Two chunks share an expert-parallel group: tokens of one chunk could wait for another chunk.
    "experts": with_chunks(mixture_plan(3, 5, 6, data=2, expert=2, recompute=(0, 2)), 2),
}


ADAPTERS = {"adapters": AdapterConfig(rank=4, alpha=8, parts=("language",))}
IN_TWO_PARTS = {
    "four-stages": chunk_plan(MODEL, 4, 2, name="zb-v"),
    "adapters": plan_of(2, 4, 6, name="zb-v", **SOME, **IN_PARTS).model_copy(update=ADAPTERS),
    "adapters-in-one-part": plan_of(2, 5, 6, name="zb-v", data=2).model_copy(update=ADAPTERS),
    "tied": plan_of(2, 5, 6, model=TIED, name="zb-v", **SOME, **IN_PARTS),
    "frozen": plan_of(2, 4, 6, name="zb-v", frozen=("vision",), **SOME, **IN_PARTS),
}
"""Plans with split backwards; PLANS have whole backwards."""


@pytest.mark.parametrize("name", PLANS | IN_TWO_PARTS)
def test_same_training_as_one_process(monkeypatch, name):
    """Prevents chunks that reduce, shard or recompute another chunk's parameters, tied copies that
    drift apart or count twice, and weight gradients lost, doubled or misplaced."""
    if name in PLANS:
        run_by_rule(monkeypatch, "zb-v", whole_back_and_forth)
    plan = (PLANS | IN_TWO_PARTS)[name]
    steps = PIPELINE_STEPS if plan.model == MODEL else STEPS
    compare_with_one_process(plan, steps, rel=2e-5 if plan.parallel.expert > 1 else 1e-5)


def test_many_buckets_are_summed_in_one_order(small_buckets):
    """Prevents a bucket reduced too early, and a forward before its weights are gathered."""
    compare_with_one_process(plan_of(2, 4, 6, data=2))


def test_checkpoints_resume_under_another_schedule(tmp_path, monkeypatch):
    """Prevents a checkpoint that depends on the number of chunks or loses a chunk."""
    run_by_rule(monkeypatch, "zb-v", whole_back_and_forth)
    plans = [
        plan_of(2, 5, 6, model=TIED, data=2),
        pipeline_plan(5, model=TIED, data=2, sharded=2),
        plan_of(1, 4, 6, model=TIED, name="zb-v", data=2),
    ]
    compare_resumed(tmp_path, *((plan, 1) for plan in plans))


def held_out_losses(links, plan):
    """Return this rank's losses of forward-only packs."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    packs = [one for step in enumerate(STEPS) for one in batches_of(plan.model, *step)]
    with trainer.evaluating():
        return [float(loss) for loss in trainer.run_forward(MicroBatchStream.of(packs))]


@pytest.mark.parametrize(("name", "last"), [("interleaved", 1), ("zb-v", 0)])
def test_held_out_losses_equal_one_process(name, last):
    """Prevents held-out losses in another order or from the wrong stage."""
    plan, whole = plan_of(2, 4, 6, name=name), pipeline_plan(model=PLAIN)
    [expected] = run_ranks(whole.parallel, held_out_losses, whole)
    ranks = run_ranks(plan.parallel, held_out_losses, plan)
    assert ranks[last] == pytest.approx(expected, rel=1e-5)
    assert ranks[1 - last] == []


def unclipped_step(links, plan):
    """Return losses and unclipped gradients by name of one step."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    trainer.zero_gradients()
    batches = MicroBatchStream.of(list(batches_of(plan.model, 0, STEPS[0])))
    losses = trainer.run_step(batches, PhaseClock())
    return losses, {name: p.main_grad.clone() for name, p in named_parameters(trainer).items()}


def test_sums_are_those_of_one_chunk_a_stage_bit_by_bit():
    """Prevents gradients accumulated over micro-batches in another order than without chunks."""
    runs = [
        run_ranks(plan.parallel, unclipped_step, plan)
        for plan in (plan_of(2, 4, 6), pipeline_plan(2, 4, 6, model=PLAIN))
    ]
    found, plain = ({k: v for _, each in run for k, v in each.items()} for run in runs)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    assert all(map(torch.equal, *(run[-1][0] for run in runs)))


def test_a_micro_batch_that_waits_keeps_no_images():
    """Prevents pixels kept until the last chunk has run, or freed before the vision embed."""
    plan = chunk_plan(MODEL, 2, 2)
    first, second = (plan.stages[part] for part in plan.parts_of(0))
    batches = [random_batch(MODEL, 2, (20, 5), 3, plan.units_of(0)) for _ in range(2)]
    held = _HeldBatches(MicroBatchStream.of(batches), [first, second])
    assert held.take(1, 0) is batches[1]
    waiting = held.take(1, 1)
    assert waiting.pixels_TCPP is None and waiting.token_ids_S is batches[1].token_ids_S
    assert waiting.shape == batches[1].shape
    assert held.take(0, 0).pixels_TCPP is batches[0].pixels_TCPP


def test_schedules_that_sharing_ranks_run_in_other_orders_are_refused():
    """Prevents deadlock: ranks of a shared pack must not use a schedule with varying pack order."""
    plan = chunk_plan(MODEL, 2, 2, name="zb-v", data=2)
    level = PlannedLevel(caps=Caps.of(tiles=9, tokens=400), context=2, recompute=((),) * 4)
    shared = plan.model_copy(update={"levels": (level,)})
    [_, obstacle] = training_obstacles(shared)
    assert "run in orders that depend on" in obstacle
    of_rule = {"schedule": PipelineSchedule(name="interleaved", chunks=2)}
    for fine in (shared.model_copy(update=of_rule), plan):
        assert len(training_obstacles(fine)) == 1

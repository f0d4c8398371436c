"""Stages of several chunks of the model, held against one process and against one chunk a stage."""

import pytest
from chunk_cases import chunk_plan, run_by_rule, whole_back_and_forth
from pipeline_cases import STEPS
from tensor_parallel_cases import compare_with_one_process
from toy import toy_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.measure.profiler import random_batch
from megatron.vlm.step.schedule import _HeldBatches
from omnibal.job.check import training_obstacles
from omnibal.job.plan import PlannedLevel
from omnibal.model.limits import Caps
from omnibal.pipeline.schedules import PipelineSchedule


@pytest.mark.parametrize(
    ("pipeline", "chunks", "data"), [(2, 2, 1), (2, 3, 1), (4, 2, 1), (2, 2, 2)]
)
def test_interleaved_chunks_equal_one_process(pipeline, chunks, data):
    """Prevents: a chunk that is given another one's tensors, gradients summed twice, and a bucket
    that is summed before its chunk's last backward, or in another order on a rank with other
    numbers of micro-batches."""
    compare_with_one_process(chunk_plan(toy_model(), pipeline, chunks, data=data), STEPS)


@pytest.mark.parametrize("pipeline", [2, 4])
def test_chunks_that_go_back_and_forth_equal_one_process(monkeypatch, pipeline):
    """Prevents: tensors that are lost, or spoilt, where two parts in a row are on one stage."""
    run_by_rule(monkeypatch, "zb-v", whole_back_and_forth)
    compare_with_one_process(chunk_plan(toy_model(), pipeline, 2, name="zb-v"), STEPS)


def test_a_micro_batch_that_waits_keeps_no_images():
    """Prevents: pixels that stay until all chunks have run, or that a chunk which embeds them does
    not have."""
    model = toy_model()
    plan = chunk_plan(model, 2, 2)
    first, second = (plan.stages[part] for part in plan.parts_of(0))
    batches = [random_batch(model, 2, (20, 5), 3, plan.units_of(0)) for _ in range(2)]
    held = _HeldBatches(MicroBatchStream.of(batches), [first, second])
    assert held.take(1, 0) is batches[1]
    waiting = held.take(1, 1)
    assert waiting.pixels_TCPP is None and waiting.token_ids_S is batches[1].token_ids_S
    assert waiting.shape == batches[1].shape
    assert held.take(0, 0).pixels_TCPP is batches[0].pixels_TCPP


def test_schedules_that_sharing_ranks_run_in_other_orders_are_refused():
    """Prevents: ranks that wait for each other in packs that they share, where one has more packs
    and so runs the shared ones in another order."""
    plan = chunk_plan(toy_model(), 2, 2, name="zb-v", data=2)
    level = PlannedLevel(caps=Caps.of(tiles=9, tokens=400), context=2, recompute=((),) * 4)
    shared = plan.model_copy(update={"levels": (level,)})
    [_, obstacle] = training_obstacles(shared)
    assert "run the shared ones in other orders" in obstacle
    of_rule = {"schedule": PipelineSchedule(name="interleaved", chunks=2)}
    assert len(training_obstacles(shared.model_copy(update=of_rule))) == 1
    assert len(training_obstacles(plan)) == 1

"""Stages of several chunks of the model, held against one process and against one chunk a stage."""

import pytest
from chunk_cases import chunk_plan, run_by_rule, whole_back_and_forth
from pipeline_cases import (
    STEPS,
    assert_same_results,
    assert_same_training,
    assert_same_weights,
    single_process,
    train_steps,
)
from ranks import run_ranks
from toy import toy_model


@pytest.mark.parametrize(("pipeline", "chunks"), [(2, 2), (2, 3), (4, 2)])
def test_interleaved_chunks_equal_one_process(pipeline, chunks):
    """Prevents: a chunk that is given another one's tensors, or gradients summed twice."""
    model = toy_model()
    plan = chunk_plan(model, pipeline, chunks)
    ranks = run_ranks(plan.parallel, train_steps, plan, STEPS)
    assert_same_training(ranks, single_process(model, STEPS))


@pytest.mark.parametrize("pipeline", [2, 4])
def test_chunks_that_go_back_and_forth_equal_one_process(monkeypatch, pipeline):
    """Prevents: tensors that are lost, or spoilt, where two parts in a row are on one stage."""
    run_by_rule(monkeypatch, "zb-v", whole_back_and_forth)
    model = toy_model()
    plan = chunk_plan(model, pipeline, 2, name="zb-v")
    ranks = run_ranks(plan.parallel, train_steps, plan, STEPS)
    assert_same_training(ranks, single_process(model, STEPS))


def test_two_pipelines_of_chunks_equal_one_process():
    """Prevents: a bucket that is summed before its chunk's last backward, or in another order on a
    rank with other numbers of micro-batches."""
    model = toy_model()
    plan = chunk_plan(model, 2, 2, data=2)
    ranks = run_ranks(plan.parallel, train_steps, plan, STEPS, 2)
    results, _, weights = single_process(model, STEPS)
    assert_same_results(ranks, results)
    assert_same_weights(ranks, weights)

"""Stopping and resuming: the same weights as if nothing had happened."""

from dataclasses import asdict, replace

import pytest
import torch
from megatron.core import parallel_state
from ranks import run_ranks
from toy import OPTIONS, counts_of, stages_of, toy_batch, toy_model, toy_plan

from megatron.vlm.checkpoint import (
    TRACKER_FILE,
    checkpoint_path,
    latest_step,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from megatron.vlm.initialize import global_parameter_name
from megatron.vlm.train import build_trainer, train_step
from omnibal.errors import UserError

TOTAL_STEPS = 6
PACKS = [[(2, 9), (0, 6)], [(0, 12)], [(1, 8)]]


def train_range(links, plan, first, last, load, save, seed=3):
    """Losses of steps first..last-1 and the weights after, by global name."""
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=seed)
    parts = (plan, trainer.stage, trainer.optimizer, trainer.scheduler, asdict(OPTIONS))
    if load is not None:
        assert load_checkpoint(load, *parts) == first
    losses = []
    for step in range(first, last):
        batches = [toy_batch(plan.model, pack, seed=10 * step + i) for i, pack in enumerate(PACKS)]
        own = batches[parallel_state.get_data_parallel_rank() :: plan.parallel.data]
        losses.append(train_step(trainer, iter(own), counts_of(own)).loss)
    if save is not None:
        save_checkpoint(save, last, *parts)
    weights = {
        global_parameter_name(trainer.stage, name): parameter.detach().clone()
        for name, parameter in trainer.stage.named_parameters()
    }
    return losses, weights


def run_range(plan, *arguments, **options):
    ranks = run_ranks(plan.parallel, train_range, plan, *arguments, **options)
    weights = {name: value for _, own in ranks for name, value in own.items()}
    return ranks[0][0], weights


@pytest.mark.parametrize("data", [1, 2], ids=["one-pipeline", "two-pipelines"])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path, data):
    """Prevents: optimizer, schedule or weights that a checkpoint does not bring back exactly."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model, 4), data=data)
    losses, weights = run_range(plan, 0, TOTAL_STEPS, None, None)
    first, _ = run_range(plan, 0, 3, None, tmp_path)
    assert latest_step(tmp_path) == 3
    rest, resumed = run_range(plan, 3, TOTAL_STEPS, tmp_path, None)
    assert first + rest == losses
    assert weights.keys() == resumed.keys()
    for name in weights:
        assert torch.equal(resumed[name], weights[name]), name


@pytest.mark.parametrize("cuts", [(), (8,), (3, 7)], ids=["one-stage", "other-cut", "three-stages"])
def test_resumes_under_another_split(tmp_path, cuts):
    """Prevents: a checkpoint that only the split that wrote it can read."""
    model = toy_model()
    run_range(toy_plan(model, stages_of(model, 4)), 0, 3, None, tmp_path)
    same, weights = run_range(toy_plan(model, stages_of(model, 4)), 3, TOTAL_STEPS, tmp_path, None)
    other = toy_plan(model, stages_of(model, *cuts))
    losses, resumed = run_range(other, 3, TOTAL_STEPS, tmp_path, None)
    assert losses == pytest.approx(same, rel=1e-5)
    for name in weights:
        torch.testing.assert_close(resumed[name], weights[name], rtol=1e-4, atol=1e-5, msg=name)


def refusal(links, plan, load):
    trainer = build_trainer(plan, links, OPTIONS, steps=TOTAL_STEPS, seed=0)
    with pytest.raises(UserError) as caught:
        load_weights(load, plan, trainer.stage)
    return str(caught.value)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    """Prevents: a load that half succeeds, or fails deep inside with tensor shapes."""
    model = toy_model()
    run_range(toy_plan(model, stages_of(model)), 0, 1, None, tmp_path)
    wider = toy_model(hidden_size=32)
    [message] = run_ranks(
        toy_plan(wider, stages_of(wider)).parallel,
        refusal, toy_plan(wider, stages_of(wider)), tmp_path,
    )  # fmt: skip
    assert "vision.hidden_size is 16 there and 32 in the plan" in message


def refused_options(links, plan, load):
    options = replace(OPTIONS, lr=5e-3)
    trainer = build_trainer(plan, links, options, steps=TOTAL_STEPS, seed=0)
    parts = (plan, trainer.stage, trainer.optimizer, trainer.scheduler, asdict(options))
    with pytest.raises(UserError) as caught:
        load_checkpoint(load, *parts)
    return str(caught.value)


def test_resuming_with_other_options_is_refused(tmp_path):
    """Prevents: a learning rate that is given and silently overruled by the checkpoint's."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    run_range(plan, 0, 1, None, tmp_path)
    [message] = run_ranks(plan.parallel, refused_options, plan, tmp_path)
    assert "lr is 0.01 there and 0.005 given" in message


def test_missing_and_broken_checkpoints_are_refused(tmp_path):
    """Prevents: training from scratch when a checkpoint was asked for."""
    model = toy_model()
    plan = toy_plan(model, stages_of(model))
    [message] = run_ranks(plan.parallel, refusal, plan, tmp_path)
    assert "holds no checkpoint" in message
    (tmp_path / TRACKER_FILE).write_text("seven")
    [message] = run_ranks(plan.parallel, refusal, plan, tmp_path)
    assert "must hold the step number" in message
    (tmp_path / TRACKER_FILE).write_text("7")
    checkpoint_path(tmp_path, 7).mkdir()
    [message] = run_ranks(plan.parallel, refusal, plan, tmp_path)
    assert "is not a whole checkpoint" in message

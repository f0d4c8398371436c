"""Checkpoints of sharded weights equal those of replicated weights, for all shardings."""

import pytest
import torch
from checkpoint_cases import content, parts_of, refusals
from conversion_file_cases import assert_equal_tensors
from megatron.core import parallel_state
from mixture_cases import plan_of as mixture_plan
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    STEPS,
    as_one_process,
    assert_same_training,
    batches_of,
    run,
    weights_of,
)
from toy import stages_of, toy_plan

from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint, load_weights
from megatron.vlm.checkpoint.stored_blocks import boxes
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.runlog import checkpoint_path

IN_PARTS = {"tensor": 2, "sequence_parallel": True}
MODEL = MODELS["6B-like"]


def plan_of(precision="fp32", model=MODEL, cuts=(), **sizes):
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    return plan.model_copy(update={"precision": precision, "frozen": ("vision",)})


CHANGES = {
    "full-to-tensor": (plan_of, {"data": 4, "sharded": 4}, {**IN_PARTS, "data": 2}),
    "whole-to-hybrid": (plan_of, {"data": 2}, {"data": 4, "sharded": 2}),
    "tensor-to-three": (plan_of, {**IN_PARTS, "data": 2, "sharded": 2}, {"data": 3, "sharded": 3}),
    "pipeline-to-full": (
        plan_of,
        {"cuts": (3,), "data": 2, "sharded": 2},
        {"data": 4, "sharded": 4},
    ),
    "experts": (
        mixture_plan,
        {"data": 4, "expert": 2, "sharded": 4},
        {**IN_PARTS, "data": 2, "expert": 4, "sharded": 2},
    ),
}
"""Plan function, and parallel sizes before and after."""


@pytest.mark.parametrize(("make", "before", "after"), CHANGES.values(), ids=CHANGES)
def test_resumes_under_another_way_of_dividing(tmp_path, make, before, after):
    """Prevents checkpoints that load only with their own sharding, and swapped experts."""
    results, gradients, weights = as_one_process(make())
    run(make(**before), STEPS[:1], save=tmp_path)
    plan = make(**after)
    ranks = run(plan, STEPS[1:], load=tmp_path, first=1)
    rel = 2e-5 if make is mixture_plan else 1e-5
    assert_same_training(ranks, plan, (results[1:], gradients[1:], weights), rel)


def load_train_save(links, plan, load, save, trains=0):
    """Load, train and save. Return the checkpoint's tensors and optimizer groups."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    parts = parts_of(trainer, OPTIONS)
    if load is not None:
        load_checkpoint(load, *parts)
    rank, ranks = parallel_state.get_data_parallel_rank(), plan.parallel.data
    batches = list(batches_of(plan.model, 0, STEPS[0]))[rank::ranks]
    for _ in range(trains):
        train_step(trainer, MicroBatchStream.of(batches))
    trainer.wait_for_weights()
    writer = CheckpointWriter(save, *parts, keep_last=None, asynchronous=True)
    writer.save(1, {})
    # The written values must be those at the time of the save.
    train_step(trainer, MicroBatchStream.of(batches))
    writer.finish()
    assert not writer.failures
    tensors, common = content(links, checkpoint_path(save, 1))
    return tensors, common["optimizer"]["optimizer"]["param_groups"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ways_of_dividing_have_one_format_to_the_bit(tmp_path, precision):
    """Prevents names, shapes, types or values in a checkpoint that depend on the sharding, and
    values that change during a background save."""
    chain = [{"data": 4, "sharded": 4}, {"data": 4}, {"data": 4, "sharded": 2}]
    load, found = None, []
    for number, sizes in enumerate(chain):
        plan, save = plan_of(precision, **sizes), tmp_path / str(number)
        ranks = run_ranks(plan.parallel, load_train_save, plan, load, save, number == 0)
        found.append(ranks[0])
        load = save
    (expected, groups), *others = found
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in expected)
    assert any(value.count_nonzero() for name, value in expected.items() if "exp_avg." in name)
    for tensors, own_groups in others:
        assert_equal_tensors(tensors, expected)
        assert own_groups == groups


def test_a_missing_part_is_one_line_on_every_rank(tmp_path):
    """Prevents ranks that wait for a rank with a missing file, and weights left random."""
    plan = plan_of(data=2, sharded=2)
    run(plan, STEPS[:1], save=tmp_path)
    part = sorted(checkpoint_path(tmp_path, 1).glob("*.distcp"))[-1]
    part.unlink()
    for told in run_ranks(plan.parallel, refusals, plan, [tmp_path], OPTIONS):
        assert all(part.name in line and "\n" not in line for line in told)


def start_finetuning(links, plan, folder):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=5)
    load_weights(folder, plan, trainer.stages)
    trainer.optimizers[0].reload_model_params()
    begun = weights_of(trainer)
    for own, main in trainer.optimizers[0].mains.items():
        assert torch.equal(main, own.flat.own_Q[own.place])
    return begun


def test_training_starts_from_other_weights(tmp_path):
    """Prevents a first step from the optimizer's copy of the random initial weights."""
    [(_, _, weights)] = run(plan_of(), STEPS[:1], save=tmp_path)
    plan = plan_of(data=2, sharded=2)
    for begun in run_ranks(plan.parallel, start_finetuning, plan, tmp_path):
        assert all(torch.equal(begun[name], weights[name]) for name in weights)


def test_boxes_are_the_run_in_its_order():
    """Prevents stored values that land at wrong offsets of a tensor."""
    generator = torch.Generator().manual_seed(0)
    for shape in [(7,), (3, 5), (4, 1), (2, 3, 4), (1, 5, 2), (3, 1, 2, 2)]:
        values = torch.arange(torch.Size(shape).numel()).view(shape)
        for first in range(values.numel() + 1):
            end = int(torch.randint(first, values.numel() + 1, (1,), generator=generator))
            runs = [
                values[tuple(slice(at, at + size) for at, size in zip(*box, strict=True))]
                for box in boxes(shape, first, end)
            ]
            assert len(runs) <= 2 * len(shape) - 1
            joined = torch.cat([values.new_zeros(0), *(run.flatten() for run in runs)])
            assert torch.equal(joined, values.flatten()[first:end])

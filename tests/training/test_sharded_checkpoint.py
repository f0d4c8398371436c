"""Checkpoints of weights that ranks divide: the files of whole ones, for any way of dividing."""

from dataclasses import asdict

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from mixture_cases import plan_of as mixture_plan
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    STEPS,
    assert_same_training,
    batches_of,
    run,
    weights_of,
)
from toy import stages_of, toy_plan

from megatron.vlm.checkpoint.files import checkpoint_path
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint, load_weights
from megatron.vlm.checkpoint.stored_blocks import boxes
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError

IN_PARTS = {"tensor": 2, "sequence_parallel": True}
MODEL = MODELS["6B-like"]


def plan_of(precision="fp32", model=MODEL, cuts=(), **sizes):
    plan = toy_plan(model, stages_of(model, *cuts), **sizes)
    return plan.model_copy(update={"precision": precision, "frozen": ("vision",)})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"data": 4, "sharded": 4}, {**IN_PARTS, "data": 2}),
        ({"data": 2}, {"data": 4, "sharded": 2}),
        ({**IN_PARTS, "data": 2, "sharded": 2}, {"data": 3, "sharded": 3}),
        ({"cuts": (3,), "data": 2, "sharded": 2}, {"data": 4, "sharded": 4}),
    ],
    ids=["full-to-tensor", "whole-to-hybrid", "tensor-to-three", "pipeline-to-full"],
)
def test_resumes_under_another_way_of_dividing(tmp_path, before, after):
    """Prevents: checkpoints whose weights or moments fit one way of dividing them."""
    [(results, gradients, weights)] = run(plan_of(), STEPS)
    run(plan_of(**before), STEPS[:1], save=tmp_path)
    ranks = run(plan_of(**after), STEPS[1:], load=tmp_path, first=1)
    rest = (results[1:], gradients[1:], weights)
    assert_same_training(ranks, plan_of(**after), rest)


def test_experts_resume_under_another_way_of_dividing(tmp_path):
    """Prevents: experts of other ranks that are taken for a rank's own."""
    [(results, gradients, weights)] = run(mixture_plan(), STEPS)
    run(mixture_plan(data=4, expert=2, sharded=4), STEPS[:1], save=tmp_path)
    plan = mixture_plan(**IN_PARTS, data=2, expert=4, sharded=2)
    ranks = run(plan, STEPS[1:], load=tmp_path, first=1)
    assert_same_training(ranks, plan, (results[1:], gradients[1:], weights), rel=2e-5)


def passed_on(links, plan, load, save, trains=0):
    """Load, train, save; the tensors of the checkpoint and the groups of its optimizer."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    if load is not None:
        load_checkpoint(load, *parts)
    rank, ranks = parallel_state.get_data_parallel_rank(), plan.parallel.data
    batches = list(batches_of(plan.model, 0, STEPS[0]))[rank::ranks]
    for _ in range(trains):
        train_step(trainer, MicroBatchStream.of(batches))
    trainer.wait_for_weights()
    writer = CheckpointWriter(save, *parts, keep_last=None, asynchronous=True)
    writer.save(1, {})
    # What is being written is of the moment of the save.
    train_step(trainer, MicroBatchStream.of(batches))
    writer.finish()
    assert not writer.failures
    path = str(checkpoint_path(save, 1))
    loaded = dist_checkpointing.load_plain_tensors(path)
    tensors = {name: value for name, value in loaded.items() if torch.is_tensor(value)}
    groups = dist_checkpointing.load_common_state_dict(path)["optimizer"]["optimizer"]
    return tensors, groups["param_groups"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ways_of_dividing_have_one_format_to_the_bit(tmp_path, precision):
    """Prevents: a name, shape, type or value in a checkpoint that tells how weights were divided,
    and values that change while a background save writes them."""
    chain = [{"data": 4, "sharded": 4}, {"data": 4}, {"data": 4, "sharded": 2}]
    load, found = None, []
    for number, sizes in enumerate(chain):
        plan, save = plan_of(precision, **sizes), tmp_path / str(number)
        ranks = run_ranks(plan.parallel, passed_on, plan, load, save, number == 0)
        found.append(ranks[0])
        load = save
    (expected, groups), *others = found
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in expected)
    assert any(value.count_nonzero() for name, value in expected.items() if "exp_avg." in name)
    for tensors, own_groups in others:
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert tensors[name].dtype == value.dtype, name
            assert torch.equal(tensors[name], value), name
        for own, group in zip(own_groups, groups, strict=True):
            assert own == group


def refused(links, plan, folder):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    with pytest.raises(UserError) as error:
        load_weights(folder, plan, trainer.stages)
    return str(error.value)


def test_a_missing_part_is_one_line_on_every_rank(tmp_path):
    """Prevents: ranks that wait for one which cannot read its part, or a part that stays random."""
    plan = plan_of(data=2, sharded=2)
    run(plan, STEPS[:1], save=tmp_path)
    part = sorted(checkpoint_path(tmp_path, 1).glob("*.distcp"))[-1]
    part.unlink()
    for told in run_ranks(plan.parallel, refused, plan, tmp_path):
        assert part.name in told and "\n" not in told


def finetuned(links, plan, folder):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=5)
    load_weights(folder, plan, trainer.stages)
    trainer.optimizers[0].reload_model_params()
    begun = weights_of(trainer)
    for one in trainer.optimizers[0].ranges:
        assert torch.equal(one.main, one.flat.own_Q[one.own.place])
    return begun


def test_training_starts_from_other_weights(tmp_path):
    """Prevents: a first step from the random weights that the optimizer was made with."""
    [(_, _, weights)] = run(plan_of(), STEPS[:1], save=tmp_path)
    plan = plan_of(data=2, sharded=2)
    for begun in run_ranks(plan.parallel, finetuned, plan, tmp_path):
        assert all(torch.equal(begun[name], weights[name]) for name in weights)


def test_boxes_are_the_run_in_its_order():
    """Prevents: values of a part that land in another place of a tensor."""
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

"""Checkpoints of every schedule, split, tied head and encoder placement under other plans."""

import random

import pytest
import torch
from checkpoint_cases import content, parts_of, save
from chunk_cases import with_chunks
from conversion_file_cases import assert_equal_tensors
from data_parallel_cases import data_parallel_plan
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_model, toy_plan

from megatron.vlm.checkpoint.save_load import load_checkpoint
from megatron.vlm.checkpoint.state import State
from megatron.vlm.step.train import build_trainer
from omnibal.job.runlog import checkpoint_path
from omnibal.model.parallel import Parallel

ZERO_3 = {"data": 2, "sharded": 2}
SCHEDULES = {"1f1b": (1, {}), "interleaved": (2, ZERO_3), "zb-h1": (1, {}), "zb-v": (2, {})}
"""(chunks per stage, sizes other than the pipeline's)."""


def draw_plans(draw, tied):
    """Yield a one-stage plan, then random cuts by schedule, half with data-parallel encoders."""
    model = toy_model().with_tower("language", tied_head=tied)
    yield toy_plan(model, stages_of(model))
    for number, (name, (chunks, sizes)) in enumerate(SCHEDULES.items()):
        if not tied and chunks == 1:
            continue
        parts, is_data_parallel = 2 * chunks, number % 2 == tied
        units = 5 if is_data_parallel else 11
        cuts = tuple(sorted(draw.sample(range(1, units), parts - 1)))
        if is_data_parallel:
            plan = data_parallel_plan(model, cuts, per_pass=2, kept=2, **sizes)
        else:
            plan = toy_plan(model, stages_of(model, *cuts), **sizes)
        yield with_chunks(plan, chunks, name)


def tensors_of(trainer):
    """Return all weights and moments, created if absent."""
    state = State(trainer.stages, trainer.optimizers)
    state.sharded_state_dict()
    # Step counters are excluded.
    return [t.detach() for t in state.changing_tensors() if t.dim() and t.is_floating_point()]


def save_and_reload(links, plan, load, folder):
    """Load another plan's checkpoint (None: draw values); save, zero, and load again."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    tensors = tensors_of(trainer)
    if load is None:
        for tensor in tensors:
            tensor.add_(torch.rand_like(tensor))
    else:
        load_checkpoint(load, *parts_of(trainer))
    save(trainer, folder, 1)
    saved = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    load_checkpoint(folder, *parts_of(trainer))
    assert all(map(torch.equal, tensors, saved))


@pytest.mark.parametrize("tied", [False, True])
def test_every_plan_reads_its_own_checkpoint_and_anothers(tmp_path, tied):
    """Prevents a refused load if several chunks of a stage hold a tower or both copies of a tied
    head, and weights or moments dropped, duplicated or misplaced by a plan."""
    first, *others = draw_plans(random.Random(49 + tied), tied)
    load = tmp_path / "first"
    run_ranks(first.parallel, save_and_reload, first, None, load)
    [(expected, _)] = run_ranks(Parallel(pipeline=1), content, checkpoint_path(load, 1))
    assert all(value.any() for value in expected.values())
    for number, plan in enumerate(others):
        folder = tmp_path / str(number)
        run_ranks(plan.parallel, save_and_reload, plan, load, folder)
        load = folder
    [(found, _)] = run_ranks(Parallel(pipeline=1), content, checkpoint_path(load, 1))
    assert_equal_tensors(found, expected)

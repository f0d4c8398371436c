"""Plans whose stages hold several chunks of the toy model, and schedules of them."""

from dataclasses import replace

import torch
from toy import stages_of, toy_plan

from omnibal.pipeline import schedules
from omnibal.pipeline.schedules import Pass, PipelineSchedule, Schedule, zero_bubble_v

# Units of the toy model: 0 vision embed, 1-4 vision layers, 5 projector, 6 language embed,
# 7-9 language layers, 10 head. A cut is the position of the first unit after it.
CUTS = {
    4: (3, 6, 8),
    6: (1, 3, 5, 7, 9),
    8: (1, 2, 4, 5, 7, 8, 10),
}
"""Cuts of the toy model into so many parts."""


def chunk_plan(model, pipeline, chunks, *, name="interleaved", cuts=None, recompute=None, **sizes):
    """A hand-written plan with several chunks a stage."""
    stages = stages_of(model, *(cuts or CUTS[pipeline * chunks]), **(recompute or {}))
    plan = toy_plan(model, stages, **sizes)
    parallel = plan.parallel.model_copy(update={"pipeline": pipeline})
    schedule = PipelineSchedule(name=name, chunks=chunks)
    return plan.model_copy(update={"parallel": parallel, "schedule": schedule})


def whole_back_and_forth(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """ZB-V with whole backwards, each where that of the input is."""
    in_two = zero_bubble_v(stages, chunks, micro_batches)
    operations = tuple(
        tuple(
            replace(one, kind=Pass.BACKWARD) if one.kind is Pass.BACKWARD_INPUT else one
            for one in own
            if one.kind is not Pass.BACKWARD_WEIGHT
        )
        for own in in_two.operations
    )
    return replace(in_two, operations=operations)


def run_by_rule(monkeypatch, name, rule):
    """Have plans of a schedule's name run another rule with its placement, in forked ranks too."""
    named = replace(schedules._NAMED[name], rule=rule)
    monkeypatch.setitem(schedules._NAMED, name, named)


def assert_equal_bits(ranks, gradients):
    """Every gradient of the first step, on all ranks."""
    found = {name: value for rank in ranks for name, value in rank[1][0].items()}
    assert found.keys() == gradients[0].keys()
    for name, value in gradients[0].items():
        assert torch.equal(found[name], value), name

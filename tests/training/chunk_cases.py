"""Plans with several chunks of the toy model per stage, and their schedules."""

from dataclasses import replace

from toy import stages_of, toy_plan

from omnibal.pipeline import schedules
from omnibal.pipeline.schedules import Pass, PipelineSchedule, StepSchedule, zero_bubble_v

CUTS = {4: (3, 6, 8), 6: (1, 3, 5, 7, 9), 8: (1, 2, 4, 5, 7, 8, 10)}
"""Cuts of the toy model by number of parts; see pipeline_plan for its units."""


def with_chunks(plan, chunks, name="interleaved"):
    """Return the plan with its stages as chunks, `chunks` per stage."""
    pipeline = len(plan.stages) // chunks
    parallel = plan.parallel.model_copy(update={"pipeline": pipeline})
    schedule = PipelineSchedule(name=name, chunks=chunks)
    return plan.model_copy(update={"parallel": parallel, "schedule": schedule})


def chunk_plan(model, pipeline, chunks, *, name="interleaved", **sizes):
    """Return a plan of the toy model with several chunks per stage."""
    stages = stages_of(model, *CUTS[pipeline * chunks])
    return with_chunks(toy_plan(model, stages, **sizes), chunks, name)


def whole_back_and_forth(stages: int, chunks: int, micro_batches: int) -> StepSchedule:
    """Return ZB-V with full backwards in place of input-gradient backwards."""
    in_two = zero_bubble_v(stages, chunks, micro_batches)
    operations = tuple(
        tuple(
            replace(op, kind=Pass.BACKWARD) if op.kind is Pass.BACKWARD_INPUT else op
            for op in own
            if op.kind is not Pass.BACKWARD_WEIGHT
        )
        for own in in_two.operations
    )
    return replace(in_two, operations=operations)


def run_by_rule(monkeypatch, name, rule):
    """Make plans of schedule `name` run another rule, in forked ranks too."""
    named = replace(schedules._SCHEDULES[name], rule=rule)
    monkeypatch.setitem(schedules._SCHEDULES, name, named)

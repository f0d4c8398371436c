"""Parts of a plan that a trainer cannot express (never after `omnibal plan --for`)."""

from collections.abc import Iterator

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.model.parallel import WeightSharding
from omnibal.model.targets import RecomputeFreedom, TrainerConstraints
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.packing.next_fit import largest_first, next_fit_packs
from omnibal.packing.packs import ScheduledPacks
from omnibal.trainers.export.layout import all_or_none, one_number
from omnibal.trainers.export.reading_order import packs_per_step, reading_order

PackedData = tuple[ScheduledPacks, Lengths]


def obstacles(plan: Plan, data: PackedData | None, target: TrainerConstraints) -> Iterator[str]:
    """Yield a clause for each part of a plan that the trainer cannot express."""
    unknown = target.model_obstacle(plan.model)
    yield from [] if unknown is None else [unknown]
    for _, name, size, most in target.limit_sizes(plan.parallel):
        yield (
            f"the plan has {name.removesuffix('-parallel')} size {size}, and {target.title} "
            f"takes at most {most}"
        )
    if plan.precision == "fp8" and not target.runtime.transformer_engine:
        yield f"the plan has products in FP8, which {target.title} does not support"
    yield from _adapter_obstacles(plan, target)
    yield from _level_obstacles(plan, target)
    sizes, name = plan.parallel, plan.schedule.name
    micro_batches = packs_per_step(plan) // sizes.data
    obstacle = target.schedule_obstacle(name, sizes.pipeline, micro_batches)
    if obstacle is not None:
        yield f"the plan's schedule is {name}, and {obstacle}"
    if target.stages.encoders_on_first:
        yield from _placement_obstacles(plan, target)
    yield from _recompute_obstacles(plan, target)
    yield from _sharding_obstacles(plan, target)
    if data is not None and plan.data is not None:
        yield from _step_obstacles(plan, data[0], target)
        if target.packs.next_fit:
            yield from _next_fit_obstacles(reading_order(data[0]), data[1], target)


def _adapter_obstacles(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    adapters = plan.adapters
    if adapters is None:
        return
    if not target.has_adapters:
        yield f"the plan has adapters, which are not exported for {target.title}"
    others = set(model_parts(plan.model)) - {LANGUAGE}
    if adapters.parts != (LANGUAGE,) or others - set(plan.frozen):
        yield (
            f"the plan has adapters of {', '.join(adapters.parts)}, and "
            f"{target.title} takes them in the language model, with all other parts frozen"
        )


def _level_obstacles(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    if plan.has_shared_packs:
        yield f"packs have several context-parallel sizes, and {target.title} takes one for all"
    elif len(plan.levels) > 1:
        yield f"the plan has {len(plan.levels)} levels of caps, and {target.title} takes one"
    if plan.data_parallel_encoders is not None:
        yield f"encoders are data-parallel, which {target.title} cannot do"


def _placement_obstacles(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    """Yield a clause per chunk with encoders, or a language embed, away from the first stage."""
    stages, schedule = plan.parallel.pipeline, plan.schedule
    for number, stage in enumerate(plan.stages):  # chunks in model order
        away = [span for span in stage.units if span.part != LANGUAGE]
        if number and away:
            place = f"stage {schedule.placement.stage_of(number, stages)}"
            if schedule.chunks > 1:
                place = f"chunk {number // stages} of {place}"
            yield f"{place} holds {away[0]}, and {target.title} has encoders on stage 0 only"
    if not plan.stages[0].holds("language embed"):
        yield f"the first stage does not hold the language embed, and {target.title} needs it there"


def _recompute_obstacles(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    stages, freedom = plan.stages_at(0), target.stages.recompute
    for tower in plan.pipeline_model.towers:
        counts = [len(stage.recomputed_in(tower)) for stage in stages]
        numbered = freedom is RecomputeFreedom.LANGUAGE and tower == LANGUAGE
        if numbered and one_number(stages, tower) is None:
            yield (
                f"stages recompute {', '.join(map(str, counts))} layers of {tower}, and "
                f"{target.title} recomputes the first min(n, held) of each stage, with one n"
            )
        elif not numbered and all_or_none(stages, tower) is None:
            yield f"{sum(counts)} layers of {tower} are recomputed: {target.title} does all or none"


def _sharding_obstacles(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    planned = plan.parallel.sharding
    # With one data-parallel rank nothing is sharded.
    if planned not in target.shardings and plan.parallel.data > 1:
        divided = {
            WeightSharding.REPLICATED: "the optimizer's state only",
            WeightSharding.FULL: "weights and gradients too",
            WeightSharding.HYBRID: f"weights and gradients in groups of {plan.parallel.sharded}",
        }
        able = " or ".join(divided[sharding] for sharding in target.shardings)
        yield (
            f"the plan is predicted with {plan.parallel.data} data-parallel ranks that shard "
            f"{divided[planned]}, and {target.title} shards {able}"
        )


def _step_obstacles(plan: Plan, packs: ScheduledPacks, target: TrainerConstraints) -> Iterator[str]:
    """Yield the first uneven step: a trainer would fill it with packs of the next step."""
    assert plan.data is not None
    ranks, full = plan.parallel.data, packs_per_step(plan)
    if plan.data.window is not None:
        yield (
            f"a step is a window of {plan.data.window:,} samples in a varying number of packs, and "
            f"{target.title} needs equally many packs per step"
        )
        return
    counts = np.bincount(packs.step)  # [steps]
    odd = np.flatnonzero(counts[:-1] != full)  # the last step may be incomplete: it is dropped
    if full % ranks or len(odd):
        step = int(odd[0]) if len(odd) else 0
        yield (
            f"step {step} has {counts[step]:,} packs on {ranks:,} data-parallel ranks, and "
            f"every step but the last must have {full:,}, equally many on every rank"
        )
        return
    order = reading_order(packs)
    whole = len(order) // full * full  # packs of full steps
    other = np.flatnonzero(order.dp_rank[:whole] != np.arange(whole) % ranks)
    if len(other):
        yield f"step {order.step[other[0]]} has unequal numbers of packs by rank for {target.title}"


def _next_fit_obstacles(
    order: ScheduledPacks, lengths: Lengths, target: TrainerConstraints
) -> Iterator[str]:
    """Yield the first pack that differs from next-fit in reading order."""
    packs = largest_first(order.packs, lengths.tokens)
    tokens = lengths.tokens[packs.samples].astype(np.int64)  # [samples], in reading order
    length = int(packs.sums(lengths.tokens).max())
    made = next_fit_packs(tokens, length)
    if np.array_equal(made, packs.offsets):
        return
    same = min(len(made), len(packs.offsets))
    # Offset k ends pack k - 1: the first that differs ends too late.
    pack = int((made[:same] != packs.offsets[:same]).argmax()) - 1
    yield (
        f"{target.title} packs by next fit to {length:,} tokens, and would put the first sample of "
        f"pack {pack + 1:,} (step {order.step[pack + 1]}) into pack {pack:,}, where it fits"
    )

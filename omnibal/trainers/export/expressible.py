"""Parts of a plan that a trainer cannot express (never after `omnibal plan --for`)."""

from collections.abc import Iterator

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.plan import Plan
from omnibal.model.parallel import WeightSharding
from omnibal.model.targets import RecomputeFreedom, TrainerConstraints
from omnibal.model.units import LANGUAGE, LANGUAGE_EMBED, model_parts
from omnibal.packing.packs import ScheduledPacks
from omnibal.steps.next_fit import largest_first, next_fit_packs
from omnibal.trainers.export.reading_order import packs_per_step, reading_order
from omnibal.trainers.export.recomputed_layers import all_or_none, one_number

Data = tuple[ScheduledPacks, Lengths]


def obstacles(plan: Plan, data: Data | None, target: TrainerConstraints) -> Iterator[str]:
    """Yield a sentence for each part of a plan that the trainer cannot express."""
    unknown = target.model_obstacle(plan.model)
    yield from [] if unknown is None else [unknown]
    yield from _of_sizes(plan, target)
    if plan.precision == "fp8" and not target.runtime.transformer_engine:
        yield f"the plan has products in FP8, and {target.title} none"
    yield from _of_adapters(plan, target)
    yield from _of_levels(plan, target)
    yield from _of_schedule(plan, target)
    yield from _of_stages(plan, target)
    yield from _of_recomputation(plan, target)
    yield from _of_sharding(plan, target)
    if data is not None and plan.data is not None:
        yield from _of_steps(plan, data[0])
        if target.packs.next_fit:
            yield from _merged(reading_order(data[0]), data[1], target)


def _of_sizes(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    sizes = plan.parallel
    for name, size, most in (
        ("pipeline", sizes.pipeline, target.most_pipeline),
        ("tensor", sizes.tensor, target.most_tensor),
        ("expert", sizes.expert, None if target.has_experts else 1),
    ):
        if most is not None and size > most:
            yield f"the plan has {name} size {size}, and {target.title} takes at most {most}"


def _of_adapters(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    adapters = plan.adapters
    if adapters is None:
        return
    if not target.has_adapters:
        yield f"the plan has adapters, and no flags of {target.title} are written for them"
    others = set(model_parts(plan.model)) - {LANGUAGE}
    if adapters.parts != (LANGUAGE,) or others - set(plan.frozen):
        yield (
            f"the plan has adapters of {', '.join(adapters.parts)} with "
            f"{', '.join(plan.frozen) or 'nothing'} frozen, and {target.title} is told adapters of "
            "the language model, with all else frozen"
        )


def _of_levels(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    if plan.has_shared_packs:
        yield (
            "ranks share packs of some levels and not of others, and no context-parallel size of "
            f"{target.title} says so"
        )
    elif len(plan.levels) > 1:
        yield (
            f"the plan has packs of {len(plan.levels)} levels, each with its own caps and "
            f"recomputed layers, and {target.title} takes one"
        )
    if plan.beside is not None:
        yield f"encoders are data-parallel, which {target.title} cannot do"


def _of_schedule(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    schedule, sizes = plan.schedule, plan.parallel
    micro_batches = 0
    if plan.shapes is not None:
        micro_batches = plan.shapes.micro_batches_per_step
    elif plan.data is not None:
        micro_batches = packs_per_step(plan.data, sizes.data) // sizes.data
    obstacle = target.schedule_obstacle(schedule.name, sizes.pipeline, micro_batches)
    if obstacle is not None:
        yield f"the plan's schedule is {schedule.name}, and {obstacle}"


def _place(plan: Plan, part: int) -> str:
    place, stages = plan.schedule.placement, plan.parallel.pipeline
    stage = f"stage {place.stage_of(part, stages)}"
    return stage if plan.schedule.chunks == 1 else f"chunk {part // stages} of {stage}"


def _of_stages(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    rules, stages = target.stages, plan.stages
    # A model's only projector has no encoder's name.
    beginning = {"projector", *plan.pipeline_model.encoders}
    beginning |= {f"{name}_projector" for name in plan.pipeline_model.encoders}
    for number, stage in enumerate(stages):
        away = [span for span in stage.units if span.part in beginning]
        if rules.encoders_on_first and number and away:
            yield (
                f"{_place(plan, number)} holds {away[0]}, and {target.title} has encoders on its "
                "first stage alone"
            )
    embed = LANGUAGE_EMBED.replace("_", " ")
    if rules.encoders_on_first and not stages[0].holds(embed):
        yield f"the first stage does not hold the {embed}, as it does in {target.title}"


def _of_recomputation(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    stages, freedom = plan.stages_at(0), target.stages.recompute
    towers = plan.pipeline_model.towers
    for tower in towers:
        numbered = freedom is RecomputeFreedom.LANGUAGE and tower == LANGUAGE
        if numbered and one_number(stages, tower) is None:
            of_stages = ", ".join(str(len(stage.recomputed(tower))) for stage in stages)
            yield (
                f"stages recompute {of_stages} layers of {tower}, and {target.title} takes one "
                "number for all stages, of the first layers that each holds"
            )
        elif not numbered and all_or_none(stages, tower) is None:
            count = sum(len(stage.recomputed(tower)) for stage in stages)
            yield (
                f"{count} layers of {tower} are recomputed and others are not, and "
                f"{target.title} recomputes all of them or none"
            )


def _of_sharding(plan: Plan, target: TrainerConstraints) -> Iterator[str]:
    planned = plan.parallel.sharding
    if planned not in target.shardings and plan.parallel.data > 1:
        divided = {
            WeightSharding.REPLICATED: "the optimizer's state alone",
            WeightSharding.FULL: "weights and gradients too",
            WeightSharding.HYBRID: f"weights and gradients in groups of {plan.parallel.sharded}",
        }
        able = " or ".join(divided[each] for each in target.shardings)
        yield (
            f"the plan is predicted with {plan.parallel.data} data-parallel ranks that divide "
            f"{divided[planned]}, and those of {target.title} divide {able}"
        )


def _of_steps(plan: Plan, packs: ScheduledPacks) -> Iterator[str]:
    """Yield incomplete steps: a trainer would read on into the next step."""
    assert plan.data is not None
    ranks = plan.parallel.data
    full = packs_per_step(plan.data, ranks)
    if plan.data.window is not None:
        yield (
            f"a step is a window of {plan.data.window:,} samples, with more or fewer packs, and a "
            "trainer's steps have equally many"
        )
        return
    counts = np.bincount(packs.step)
    odd = np.flatnonzero(counts[:-1] != full)
    if full % ranks or len(odd):
        step = int(odd[0]) if len(odd) else 0
        yield (
            f"step {step} has {counts[step]:,} packs on {ranks:,} data-parallel ranks, and "
            f"every step but the last must have {full:,}, equally many on every rank"
        )
        return
    order = reading_order(packs)
    whole = len(order) // full * full
    other = np.flatnonzero(order.dp_rank[:whole] != np.arange(whole) % ranks)
    if len(other):
        yield (
            f"in step {order.step[other[0]]} ranks have unequally many packs, and a trainer gives "
            "them packs in turn"
        )


def _merged(order: ScheduledPacks, lengths: Lengths, target: TrainerConstraints) -> Iterator[str]:
    """Yield packs that differ from next-fit in reading order."""
    packs = largest_first(order.packs, lengths.tokens)
    tokens = lengths.tokens[packs.samples].astype(np.int64)
    length = int(packs.sums(lengths.tokens).max())
    made = next_fit_packs(tokens, length)
    if np.array_equal(made, packs.offsets):
        return
    same = min(len(made), len(packs.offsets))
    pack = int((made[:same] != packs.offsets[:same]).argmax()) - 1
    yield (
        f"{target.title} packs samples one after another to {length:,} tokens, and would put the "
        f"first sample of pack {pack + 1:,} (step {order.step[pack + 1]}) into pack {pack:,}, "
        "which has room for it"
    )

"""Cost of another trainer's limits: rate of its plan compared with plans with limits lifted.

Fewer limits never make a plan slower, so if a search finds otherwise, the faster of both counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Self

from omnibal.base.errors import UserError
from omnibal.job.plan_data import MockData, PlanData, SampleData
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.config import ModelConfig
from omnibal.model.levels import Level
from omnibal.model.limits import words
from omnibal.model.parallel import Parallel, WeightSharding
from omnibal.model.targets import (
    FREE,
    OWN,
    Padding,
    RecomputeFreedom,
    StageRules,
    TrainerConstraints,
)
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import Packs
from omnibal.search.goal import Goal, GoalData, Samples, ShapesAlone
from omnibal.search.level_estimates import LevelRule
from omnibal.search.strategy import FreeSizes

NAMED_COST = 0.002  # min share of the rate for a limit to be named as a reason
_MOST_NAMED = 3  # longer sentences are not read
_COMPARED_SAMPLES, _COMPARED_STEPS = 8_000, 8
"""Min samples and min full steps of the subset to compare limits on: the larger of both."""
_MOST_OF_IT = 0.6  # min share of the total cost for named limits to be called the reason


class LimitName(StrEnum):
    """Limits of trainers, in the order of evaluation."""

    ENCODERS_ON_FIRST = "encoders_on_first"
    ENCODERS_WHOLE = "encoders_whole"
    HEAD = "head_on_all_tokens"
    RECOMPUTE = "recompute"
    TOKENS_ALONE = "tokens_alone"
    PADDED = "padded"
    ORDER = "next_fit"
    FULL_STEPS = "full_steps"
    SHARDING = "sharding"
    SCHEDULES = "schedules"


_LIMIT_WORDS = {
    LimitName.ENCODERS_ON_FIRST: "the encoder stays on the first stage",
    LimitName.ENCODERS_WHOLE: "every tensor-parallel rank computes the whole encoder",
    LimitName.HEAD: "the head runs on all tokens, with and without loss",
    LimitName.TOKENS_ALONE: "packs are limited by their tokens alone",
    LimitName.PADDED: "every pack is padded to the longest",
    LimitName.ORDER: "the trainer packs in its own way, in steps of equally many packs",
    LimitName.FULL_STEPS: "every step has equally many packs",
    LimitName.SHARDING: "weights are gathered from all ranks for every pass, instead of a pipeline",
    LimitName.SCHEDULES: "the pipeline runs in a slower schedule",
}
_RECOMPUTE_WORDS = {
    RecomputeFreedom.LANGUAGE: "all stages recompute equally many layers",
    RecomputeFreedom.ALL: "either all layers are recomputed or none",
}


_OFF: dict[LimitName, dict[str, object]] = {
    LimitName.RECOMPUTE: {"recompute": RecomputeFreedom.LAYERS},
    LimitName.PADDED: {"padded": Padding.NOWHERE},
    LimitName.ORDER: {"next_fit": False, "full_steps": False},
}
"""Fields that lift a limit. Other limits are switches: fields named as the limit's value."""


def lift_limit(trainer: TrainerConstraints, limit: LimitName) -> TrainerConstraints:
    """Return a trainer's constraints without one limit.

    `ORDER` also lifts equal packs per step. `SHARDING` lifts all limits except on stages and packs.
    """
    if limit is LimitName.SHARDING:
        return OWN.model_copy(update={"stages": trainer.stages, "packs": trainer.packs})
    if limit is LimitName.SCHEDULES:
        free = {"schedules": OWN.schedules, "fills_groups": OWN.fills_groups}
        return trainer.model_copy(update=free)
    off = _OFF.get(limit, {limit.value: False})
    if off.keys() <= StageRules.model_fields.keys():
        return trainer.model_copy(update={"stages": trainer.stages.model_copy(update=off)})
    return trainer.model_copy(update={"packs": trainer.packs.model_copy(update=off)})


def binding_limits(
    trainer: TrainerConstraints, model: ModelConfig, parallel: Parallel, *, has_samples: bool
) -> list[LimitName]:
    """Return a trainer's limits, except on schedules, that may affect a plan of these sizes."""
    stages, packs, has_encoders = trainer.stages, trainer.packs, bool(model.encoders)
    is_split = parallel.pipeline > 1
    binding = {
        LimitName.ENCODERS_ON_FIRST: stages.encoders_on_first and has_encoders and is_split,
        LimitName.ENCODERS_WHOLE: stages.encoders_whole and has_encoders and parallel.tensor > 1,
        LimitName.HEAD: stages.head_on_all_tokens,
        LimitName.RECOMPUTE: stages.recompute is not RecomputeFreedom.LAYERS,
        LimitName.TOKENS_ALONE: packs.tokens_alone and has_encoders and has_samples,
        LimitName.PADDED: packs.padded.applies(parallel.pipeline) and has_samples,
        LimitName.ORDER: packs.next_fit and has_samples,
        LimitName.FULL_STEPS: packs.full_steps and not packs.next_fit and has_samples,
        LimitName.SHARDING: trainer.always_shards,
    }
    return [limit for limit, binds in binding.items() if binds]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    limit: LimitName
    words: str
    slower: float  # share of the rate lost, at least 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOfLimits:
    """Plan for a trainer, compared with plans without its limits."""

    title: str
    rate: float
    """Samples per second and device of the plan. Packs if it has no samples."""
    free_rate: float  # rate without limits, at least the plan's
    limits: tuple[Cost, ...]  # limits that may have a cost, in the order of `LimitName`
    gap: float  # max share of time that a better search without limits may still save

    @classmethod
    def compare(
        cls,
        trainer: TrainerConstraints,
        rate: float,
        free_rate: float,
        lifted: Mapping[LimitName, float],
        gap: float,
    ) -> Self:
        """Compare the plan's rate with rates without any limit and without single limits."""
        words_of = _LIMIT_WORDS | {
            LimitName.RECOMPUTE: _RECOMPUTE_WORDS.get(trainer.stages.recompute, "")
        }
        costs = tuple(
            Cost(limit=limit, words=words_of[limit], slower=1 - rate / max(rate, lifted_rate))
            for limit, lifted_rate in lifted.items()
        )
        return cls(
            title=trainer.title,
            rate=rate,
            free_rate=max(rate, free_rate, *lifted.values()),
            limits=costs,
            gap=gap,
        )

    @property
    def slower(self) -> float:
        """Share of the limit-free rate that the plan loses, at least 0."""
        return 1 - self.rate / self.free_rate

    @property
    def sentence(self) -> str:
        """Slowdown of the plan and its causes."""
        said = "no slower than this plan could be without limits"
        if self.slower >= NAMED_COST:
            slower = f"{_percent(self.slower)} slower than this plan could be"
            said = f"{slower}, because {self._reasons}"
        if self.gap:
            said += f"; without limits up to {_percent(self.gap)} more is not ruled out"
        return f"for {self.title}: {said}"

    @property
    def _reasons(self) -> str:
        costly = [cost for cost in self.limits if cost.slower >= NAMED_COST]
        costly.sort(key=lambda cost: -cost.slower)
        if not costly:
            return "of its limits together, of which none alone costs anything"
        if len(costly) == 1 and costly[0].slower >= _MOST_OF_IT * self.slower:
            return costly[0].words
        named = [f"{cost.words} ({_percent(cost.slower)})" for cost in costly[:_MOST_NAMED]]
        if sum(cost.slower for cost in costly) < _MOST_OF_IT * self.slower:
            named.append("its limits cost more together than each alone")
        return words(named)

    def as_dict(self) -> dict[str, object]:
        return {
            "slower_than_free": self.slower,
            "free_gap": self.gap,
            "limits": [asdict(cost) for cost in self.limits],
        }


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def rate_of(result: PlanResult) -> float:
    """Return samples per second and device of a plan. Packs if it has no samples."""
    plan = result.plan
    per_second = plan.known_prediction.samples_per_second_per_gpu
    if per_second is not None:
        return per_second
    packs = samples_per_step(result)
    return 1e3 * packs / plan.known_prediction.step_ms / plan.parallel.world_size


def samples_per_step(result: PlanResult) -> int:
    """Return the mean samples per step, rounded. Packs if a plan has no samples."""
    if result.data is not None:
        packs = result.data[0]
        return round(len(packs.packs.samples) / packs.steps)
    shapes = result.plan.shapes
    assert shapes is not None
    return shapes.micro_batches_per_step * result.plan.parallel.data


def without_trainer(goal: Goal, result: PlanResult) -> Goal:
    """Return the goal without another trainer's limits, for comparison.

    A trainer that always shards weights allows few sizes, so sizes on the same GPUs become free, at
    the same samples per step.
    """
    job = replace(goal.job, trainer=OWN)
    always_shards = goal.job.trainer.always_shards
    # Weights stay replicated unless the trainer always shards: only then is sharding a limit.
    ways = tuple(WeightSharding) if always_shards else (WeightSharding.REPLICATED,)
    if not always_shards or goal.free.sizes is not None:
        return replace(goal, job=job, free=replace(goal.free, shardings=ways))
    data: GoalData = goal.data
    if isinstance(data, Samples):
        data = replace(data, micro_batches=None, samples_per_step=samples_per_step(result))
    elif isinstance(data, ShapesAlone):
        data = replace(data, micro_batches=None, packs_per_step=samples_per_step(result))
    sizes = FreeSizes(gpus=result.plan.parallel.world_size)
    tensor = job.cost_source.tensor or 1
    free = replace(goal.free, sizes=sizes, shardings=ways, levels=LevelRule(count=1))
    return Goal(job=job.with_sizes(Parallel(pipeline=1, tensor=tensor)), data=data, free=free)


def requests_lifted(
    trainer: TrainerConstraints, result: PlanResult, packing: PackingMethod, free: PlanResult
) -> dict[LimitName, PlanRequest]:
    """Return requests for a plan with one limit lifted, by limits that may have a cost.

    Without `TOKENS_ALONE`, caps are those of the plan `free` of limits; skipped if they are equal.
    Without `SHARDING` its sizes and caps are used, without `SCHEDULES` its schedule.
    """
    plan, free_data = result.plan, free.plan.data
    names = binding_limits(trainer, plan.model, plan.parallel, has_samples=plan.data is not None)
    if free.plan.schedule != plan.schedule and plan.parallel.pipeline > 1:
        names.append(LimitName.SCHEDULES)
    if plan.data is None or free_data is None or free_data.caps == plan.data.caps:
        names = [name for name in names if name is not LimitName.TOKENS_ALONE]
    requests = {}
    for name in names:
        of = free if name is LimitName.SHARDING else result
        request = _request_of(lift_limit(trainer, name), of, packing)
        if name is LimitName.TOKENS_ALONE and free_data is not None:
            assert isinstance(request.data, SampleData)
            # Packs for the same samples per step as that plan, rounded to a multiple of ranks.
            share = free_data.packs / (free_data.samples * free_data.epochs)
            of_rank = max(round(samples_per_step(result) * share / plan.parallel.data), 1)  # packs
            data = request.data.with_caps(free_data.caps)
            data = replace(data, packs_per_step=of_rank * plan.parallel.data)
            request = replace(request, data=data)
        if name is LimitName.SCHEDULES:
            request = replace(request, schedule=free.plan.schedule)
        requests[name] = request
    return requests


def _request_of(
    trainer: TrainerConstraints, result: PlanResult, packing: PackingMethod
) -> PlanRequest:
    """Return a request for a plan's sizes and data under other constraints."""
    plan, shapes, ranks = result.plan, result.plan.shapes, result.plan.parallel.data
    data: PlanData
    if result.data is None or plan.data is None:
        assert shapes is not None
        data = MockData(**dict(shapes))
    else:
        data = SampleData(
            lengths=result.data[1],
            settings=PackSettings(packing=packing, epochs=plan.data.epochs, seed=plan.data.seed),
            levels=(Level(caps=plan.data.caps),),
            packs_per_step=max(plan.data.packs_per_step // ranks, 1) * ranks,
            rules=trainer.packs,
        )
    if trainer.stages != FREE:  # such a trainer has no data-parallel encoders
        plan = plan.model_copy(update={"data_parallel_encoders": None})
    job = replace(replace(result, plan=plan).job, trainer=trainer)
    return PlanRequest(job=job, data=data, schedule=plan.schedule)


def rates_lifted(
    trainer: TrainerConstraints,
    result: PlanResult,
    packing: PackingMethod,
    requests: Mapping[LimitName, PlanRequest],
    on_progress: Callable[[int], None],
) -> dict[LimitName, float]:
    """Return rates of plans with one limit lifted, comparable to the plan's rate.

    With many samples, limits are compared on a random subset, and the gain there scales the plan's
    rate.

    Returns:
        Samples per second and device. 0 if no plan fits.
    """
    most = max(_COMPARED_SAMPLES, _COMPARED_STEPS * samples_per_step(result))
    whole, packed, drawn = _request_of(trainer, result, packing), _Packed(), 0.0
    if isinstance(whole.data, SampleData) and len(whole.data.lengths) > most and requests:
        drawn = _rate(whole, most, packed)
    rates, all_packed = {}, _Packed()
    for name, request in requests.items():
        if drawn:
            # The gain on the subset scales the rate on all samples.
            rates[name] = rate_of(result) / drawn * _rate(request, most, packed)
        else:
            rates[name] = _rate(request, None, all_packed)
        on_progress(1)
    return rates


_Packed = dict[tuple[object, ...], list[Packs]]  # packs of the same samples, by their settings


def _rate(request: PlanRequest, most: int | None, packed: _Packed) -> float:
    """Return the rate of a request's plan on up to `most` samples. 0 if it cannot be made."""
    data, job = request.data, request.job
    try:
        if isinstance(data, SampleData):
            data = data if most is None else data.subsample(most)
            # Padding does not change the contents of packs.
            rules = data.rules.model_copy(update={"padded": Padding.NOWHERE})
            key = data.levels, data.settings, rules
            if key not in packed:
                packed[key] = data.pack(job)
            request = replace(request, data=data.with_steps(job, packed[key]))
        return rate_of(make_plan(request))
    except UserError:
        return 0.0

"""Advice for a job that does not fit into memory: the smallest change of each kind that would fit.

Feasibility is the minimal peak over all splits with all useful recomputation. Each change is tried
alone. At given sizes these are smaller caps, more sharding, larger tensor, pipeline and data sizes,
and larger devices. If no size is enough alone, tensor and pipeline sizes are tried together. If a
trainer's first stage runs all encoders, fewer stages are tried too.

At free sizes they are adapters and frozen parts on one device, then smaller caps, fewer given
sizes, sharding, up to four times the devices in whole nodes, and larger devices. The first sizes
that fit are named, by ascending state. A plan may choose faster sizes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import smallest_caps
from omnibal.job.planner import PlanRequest
from omnibal.model.adapter_settings import adapters_of
from omnibal.model.config import load_cluster, preset_names
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import are_plain
from omnibal.model.limits import Caps, option_of, words
from omnibal.model.parallel import SIZE_OPTIONS, Parallel, WeightSharding, expert_sizes
from omnibal.model.units import LANGUAGE, model_parts
from omnibal.pipeline.baselines import JOINT
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search.caps import cap_space
from omnibal.search.goal import Earlier, Goal, ShapesAlone
from omnibal.search.memory_need import gib_text, least_need_gib, least_state_gib
from omnibal.search.parallel_sizes import layouts_of, possible_sizings
from omnibal.search.strategy import Setting, StrategyRequest, possible_choices

SAMPLES = 20_000  # max samples that changes of given sizes are tried on, unless steps are given

_CAP_UNIT = 256
"""Unit of token caps to try. Smaller for small caps."""
_CAP_STEPS = 16  # steps to lower caps in
_LARGER_DATA = (2, 3, 4)  # factors: more ranks shard optimizer state
_MOST_SAME_DEVICES, _MOST_FREE = 4, 12
"""Max sizes to try per change, with the least state, which dominates there."""
_EVERY_PIPELINE = 16  # up to this or twice the given size, every pipeline size is tried
_MOST_DEVICES = 4  # max factor on free devices
_LORA_RANK = 16
_ROOMIER = "a preset device with more memory"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """Request that fits, with a description of its change."""

    text: str
    request: PlanRequest
    need_gib: float  # memory of one device in the split with minimal peak

    @classmethod
    def if_it_fits(cls, text: str, request: PlanRequest, tried: PlanRequest) -> "Change | None":
        """Return a change if `tried` fits: the request, maybe on part of its samples. Else None.

        `{}` in the description is replaced by the memory needed and available.
        """
        need_gib, cap_gib = least_need_gib(tried), tried.job.memory_cap_gib
        if not fits_cap(need_gib, cap_gib):
            return None
        need = f"needs {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"
        return cls(text=text.format(need), request=request, need_gib=need_gib)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """Changes that would make a job fit, and the kinds of changes tried."""

    changes: tuple[Change, ...]
    tried: tuple[str, ...]  # kinds of changes tried, successful or not

    def message(self, error: DoesNotFit) -> str:
        """Return the error with changes that would fit, or with kinds tried in vain."""
        if self.changes:
            return f"{error.need}; what would fit: {'; or '.join(c.text for c in self.changes)}"
        if not self.tried:
            return str(error)
        return (
            f"{error.need}; of these, no single one that was tried is enough: "
            f"{', '.join(self.tried)}; combine several of them or use a smaller model"
        )


Changed = TypeVar("Changed", PlanRequest, Goal)
Fit = Callable[[str, Changed], Change | None]
"""Function of a description and a changed request or goal. Returns the change if it fits."""
Kind = tuple[str, Iterable[tuple[str, Changed]]]
"""Name of a kind of changes, and its descriptions and changed requests or goals."""


def _first_of_each(
    kinds: Iterable[Kind[Changed]], fit: Fit[Changed], found: list[Change]
) -> tuple[str, ...]:
    """Add each kind's first change that fits to `found`, and return the names of tried kinds."""
    tried = dict[str, None]()
    for kind, candidates in kinds:
        for text, changed in candidates:
            tried[kind] = None  # a dict as an ordered set
            change = fit(text, changed)
            if change is not None:
                found.append(change)
                break
    return tuple(tried)


def _fewer_caps(
    caps: Caps, least: Caps, change: Callable[[Caps], Changed], fit: Fit[Changed]
) -> Kind[Changed]:
    """Return the largest caps that fit, by bisection. Approximate: packing is not monotonic."""
    names = list(reversed(caps.names))
    instead = words([str(caps[name]) for name in names])
    candidates = [
        (f"{' '.join(reversed(smaller.options))} instead of {instead}", change(smaller))
        for smaller in smaller_caps(caps, least)
    ]
    # Candidates descend, so the first fits come last.
    place = bisect_left(candidates, True, key=lambda candidate: fit(*candidate) is not None)
    kind = f"smaller {words([option_of(name) for name in names])}"
    return kind, candidates[place : place + 1] or candidates[-1:]


def smaller_caps(caps: Caps, least: Caps) -> list[Caps]:
    """Return smaller caps in proportion and round tokens, descending to the minimum."""
    # A power of two.
    unit = min(_CAP_UNIT, 1 << max(caps["tokens"] // _CAP_STEPS, 1).bit_length() - 1)
    first = -(-least["tokens"] // unit) * unit
    # Largest round number below the cap.
    last = (caps["tokens"] - 1) // unit * unit
    return [
        Caps.of(
            **{
                name: max(round(caps[name] * tokens / caps["tokens"]), least[name])
                for name in caps.names[:-1]
            },
            tokens=tokens,
        )
        for tokens in range(last, first - 1, -unit)
    ]


def roomier_devices(job: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yield options and job of presets with more memory, ascending. None for measured profiles."""
    if job.cost_source.profile is not None:
        return
    own = job.cluster
    presets = [load_cluster(name) for name in preset_names("clusters")]
    roomier = [preset for preset in presets if preset.memory_gib > own.memory_gib]
    larger = [preset for preset in roomier if preset.name != own.name]
    # A lower memory limit was given, and would apply to another device too.
    also = " and no --memory-gib" if len(larger) < len(roomier) else ""
    for preset in sorted(larger, key=lambda preset: preset.memory_gib):
        with suppress(UserError):
            changed = replace(job, cluster=preset)
            yield f"--cluster {preset.name}{also} instead of {own.name}", changed


# Given sizes.


def find_changes(request: PlanRequest) -> Advice:
    """Return the smallest change of every kind that makes a request fit.

    Changes without more devices come first, then by devices, then other kinds of devices. For other
    methods, the joint search is tried alone first. More than `SAMPLES` samples are subsampled, so a
    change that barely fits may need slightly more memory on all samples.
    """
    job, split, prefix, found = request.job, request.split, "", list[Change]()
    request = replace(request, split=JOINT)
    packed = _draw_samples(request).pack()

    def fit(text: str, changed: PlanRequest) -> Change | None:
        devices = changed.job.parallel.world_size
        more = "" if devices == job.parallel.world_size else f"{devices:,} devices, "
        with suppress(UserError):
            tried = _draw_samples(changed)
            same_packs = changed.data.caps == request.data.caps
            tried = tried.with_steps(packed if same_packs else tried.pack())
            return Change.if_it_fits(f"{prefix}{text} ({more}{{}})", changed, tried)
        return None

    tried: tuple[str, ...] = ()
    if not split.is_joint:
        text = (
            f"the partition method {JOINT.method} with recompute rule {JOINT.recompute} instead of "
            f"{split.method} with {split.recompute}"
        )
        kind = "the joint partition and recomputation"
        tried = _first_of_each([(kind, [(text, request)])], fit, found)
        prefix = f"{text}, and "
    if not found:
        tried += _first_of_each(_kinds_of_request(request, fit, found), fit, found)
        found.sort(
            key=lambda change: (
                change.request.job.cluster is not job.cluster,
                change.request.job.parallel.world_size,
            )
        )
    return Advice(changes=tuple(found), tried=tried)


def _draw_samples(request: PlanRequest) -> PlanRequest:
    return replace(request, data=request.data.subsample(SAMPLES))


def _kinds_of_request(
    request: PlanRequest, fit: Fit[PlanRequest], found: list[Change]
) -> Iterator[Kind[PlanRequest]]:
    """Yield kinds of changes at given sizes. Some depend on the changes found before."""
    job, data, parallel = request.job, request.data, request.job.parallel
    if data.steps is None and are_plain(data.levels):  # caps of several levels are searched
        least = smallest_caps(data.lengths, data.caps.names)
        yield _fewer_caps(data.caps, least, request.with_caps, fit)
    experts = expert_sizes(job.model, parallel.tensor, parallel.data)
    larger = [{"expert": size} for size in experts if size > parallel.expert]
    yield "a larger --ep", _at_sizes(request, larger)
    if job.has_data_parallel_encoders and job.encoder_shardings == (WeightSharding.REPLICATED,):
        divided = replace(job, encoder_shardings=tuple(WeightSharding))
        text = f"--sharding auto instead of {WeightSharding.REPLICATED}"
        yield "--sharding auto", [(text, replace(request, job=divided))]
    ways = (WeightSharding.HYBRID, WeightSharding.FULL)
    layouts = [layout for way in ways if (layout := parallel.with_sharding(way, job.cluster))]
    more = [{"sharded": new.sharded} for new in layouts if new.sharded > parallel.sharded]
    yield "--sharding hybrid or full", _at_sizes(request, more)
    if job.trainer.stages.encoders_on_first:
        # The first stage keeps encoder activations of one micro-batch per stage.
        ranks, fewer = parallel.data * parallel.pipeline, range(parallel.pipeline - 1, 0, -1)
        sizes = [{"pipeline": size, "data": ranks // size} for size in fewer if ranks % size == 0]
        yield "a smaller --pp with a larger --dp", _at_sizes(request, sizes)
    only_caps = all(change.request.job is job for change in found)  # no other sizes fit yet
    if only_caps:
        same = map(dict, _same_devices(request))
        yield "other sizes on the same devices", _at_sizes(request, same)
    same_devices = len(found)
    tensors = range(parallel.tensor + 1, job.cluster.gpus_per_node + 1)
    # Consecutive pipeline sizes, then doubled ones.
    layers, dense = job.pipeline_model.layers, max(2 * parallel.pipeline, _EVERY_PIPELINE)
    pipelines = list(range(parallel.pipeline + 1, min(dense, layers) + 1))
    while (dense := 2 * dense) <= layers:
        pipelines.append(dense)
    yield "a larger --tp", _at_sizes(request, [{"tensor": size} for size in tensors])
    yield "a larger --pp", _at_sizes(request, [{"pipeline": size} for size in pipelines])
    ranks_of_data = [factor * parallel.data for factor in _LARGER_DATA]
    whole = [{"data": ranks} for ranks in ranks_of_data]
    yield "a larger --dp", _at_sizes(request, whole)
    if only_caps and parallel.sharded == 1:
        full = [{"data": ranks, "sharded": ranks} for ranks in ranks_of_data]
        yield "a larger --dp with --sharding full", _at_sizes(request, full)
    if len(found) == same_devices:
        pairs = [(tensor, pipeline) for tensor in tensors for pipeline in pipelines]
        pairs.sort(key=lambda pair: (pair[0] * pair[1], pair))  # fewest devices first
        both = [{"tensor": tensor, "pipeline": pipeline} for tensor, pipeline in pairs]
        yield "a larger --tp and --pp together", _at_sizes(request, both)
    roomier = ((text, replace(request, job=changed)) for text, changed in roomier_devices(job))
    yield _ROOMIER, roomier


def _at_sizes(
    request: PlanRequest, every: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, PlanRequest]]:
    """Yield the request with some sizes changed, without changes that are impossible.

    Micro-batches per rank stay unless steps are given. Full sharding stays over all ranks, and
    data-parallel encoders are sharded as the weights.
    """
    job, old = request.job, request.job.parallel
    options = {**SIZE_OPTIONS, "sharding": "--sharding"}
    for sizes in every:
        usual: dict[str, Any] = {}
        if old.tensor == 1 < sizes.get("tensor", 1):
            usual["sequence_parallel"] = True  # the default with --tp > 1
        if old.sharded == old.data > 1:
            usual["sharded"] = sizes.get("data", old.data)
        with suppress(UserError):
            new = job.trainer.with_default_sharding(old.with_sizes(**{**usual, **sizes}))
            changed = request
            if new.sharding is not old.sharding:
                changed = replace(request, job=replace(job, encoder_shardings=(new.sharding,)))
            pairs = {name: (getattr(old, name), getattr(new, name)) for name in options}
            pairs = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            text = " ".join(f"{options[name]} {now}" for name, (_, now) in pairs.items())
            before = words([str(size) for size, _ in pairs.values()])
            yield f"{text} instead of {before}", changed.with_sizes(new)


def _same_devices(request: PlanRequest) -> list[Parallel]:
    """Return layouts on the same devices with any sharding, those with the least state first."""
    job, context = request.job, max(level.context for level in request.data.levels)
    layouts = layouts_of(job, job.parallel.world_size, tuple(WeightSharding))
    allowed = [layout for layout in layouts if layout.data % context == 0 and job.allows(layout)]
    allowed.sort(
        key=lambda layout: (least_state_gib(job.with_sizes(layout)), layout.pipeline, layout.tensor)
    )
    return allowed[:_MOST_SAME_DEVICES]


# Free sizes.

RequestOf = Callable[[Goal], StrategyRequest]
"""Function that returns the strategy request of a goal with free sizes."""


def find_changes_of_goal(goal: Goal, request_of: RequestOf) -> Advice:
    """Return the smallest change of every kind that makes some sizes of a goal fit."""
    found = list[Change]()

    def fit(text: str, changed: Goal) -> Change | None:
        with suppress(UserError):
            return _first_fit(text, request_of(changed).draw_samples())
        return None

    tried = _first_of_each(_kinds_of_goal(goal, fit), fit, found)
    return Advice(changes=tuple(found), tried=tried)


def _kinds_of_goal(goal: Goal, fit: Fit[Goal]) -> Iterator[Kind[Goal]]:
    """Yield kinds of changes of a goal with free sizes."""
    job, data, sizes, parts = goal.job, goal.data, goal.free.sizes, model_parts(goal.job.model)
    assert sizes is not None
    if sizes.gpus == 1 and job.adapters is None and not job.frozen:
        others = tuple(part for part in parts if part != LANGUAGE)
        adapted = replace(job, frozen=others, adapters=adapters_of(rank=_LORA_RANK))
        yield "--lora-rank", [(f"--lora-rank {_LORA_RANK}", replace(goal, job=adapted))]
        for_each = parts if len(parts) > 1 else ()  # a model of one part has nothing left to train
        frozen = ((part, replace(job, frozen=(part,))) for part in for_each)
        yield "--freeze", ((f"--freeze {part}", replace(goal, job=less)) for part, less in frozen)
    if not isinstance(data, Earlier) and data.caps is not None:
        lengths = None if isinstance(data, ShapesAlone) else data.lengths
        least = smallest_caps(lengths, data.caps.names)
        yield _fewer_caps(
            data.caps, least, lambda caps: replace(goal, data=replace(data, caps=caps)), fit
        )

    def free(**changes: Any) -> Goal:
        return replace(goal, free=replace(goal.free, **changes))

    without: dict[str, Any] = dict.fromkeys(SIZE_OPTIONS)
    fewer = (
        (f"no {SIZE_OPTIONS[name]} {size}", free(sizes=replace(sizes, **{name: without[name]})))
        for name in SIZE_OPTIONS
        if (size := getattr(sizes, name)) is not None
    )
    yield "other sizes than those given", fewer
    if set(goal.shardings) != set(job.trainer.shardings):
        text = f"--sharding auto instead of {' or '.join(goal.shardings)}"
        yield "--sharding auto", [(text, free(shardings=tuple(WeightSharding)))]
    # Whole nodes, in steps of at most a quarter of the devices but at least a node.
    gpus, node = sizes.gpus, job.cluster.gpus_per_node
    unit = max(gpus // 4 // node, 1) * node
    numbers = range(gpus // unit * unit + unit, _MOST_DEVICES * max(gpus, node) + 1, unit)
    yield (
        "more --gpus",
        (
            (f"--gpus {more} instead of {gpus}", free(sizes=replace(sizes, gpus=more)))
            for more in numbers
        ),
    )
    roomier = ((text, replace(goal, job=changed)) for text, changed in roomier_devices(job))
    yield _ROOMIER, roomier


def _first_fit(text: str, request: StrategyRequest) -> Change | None:
    """Return the first sizes that fit, by placement and ascending state. None if none fit."""
    sizings, setting = possible_sizings(request), Setting(request=request, packs={})
    caps = request.caps
    if caps is None:
        caps = cap_space(request).grid()[0]  # the smallest need least memory
    choices = possible_choices(setting, [(sizing, caps) for sizing in sizings], processes=1)
    for placement in EncoderPlacement:
        placed = [choice for choice in choices if choice[0].placement is placement]
        states = {choice: least_state_gib(setting.job(choice[0])) for choice in placed}
        least = sorted(placed, key=lambda choice: (states[choice], str(choice[0].parallel)))
        for choice in least[:_MOST_FREE]:
            if not fits_cap(states[choice], request.job.memory_cap_gib):
                break
            tried = setting.request_of(choice)
            sized = f"{text}, as in {choice[0].options} ({{}})"
            change = Change.if_it_fits(sized, tried, tried)
            if change is not None:
                return change
    return None

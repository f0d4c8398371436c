"""Advice for a job that does not fit into memory: the smallest change of each kind that would.

Whether a change fits is decided by the least peak over all splits, with all recomputation that
helps, on packs as a plan would have them. Tried are, each alone: smaller caps in round numbers,
weights divided over more data-parallel ranks, every larger tensor size that the model allows, every
pipeline size up to twice the given or 16 and then doubles, data sizes of two to four times, and
preset devices with more memory; where none of the sizes is enough, tensor and pipeline sizes
together. Where a trainer's first stage holds all encoders, fewer stages on the same devices too.
Where the same devices are not enough so, other sizes on them, and then more data-parallel ranks
that all divide weights.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.planner import PlanRequest, placement_problem
from omnibal.model.config import ClusterConfig, load_cluster, preset_names
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import Caps, option_of, words
from omnibal.model.parallel import SIZE_OPTIONS, Parallel, WeightSharding, expert_sizes
from omnibal.model.units import unit_names
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.encoder_search import least_peak_with_encoders
from omnibal.pipeline.least_peak import least_peak_of_splits, peak_vs_budget
from omnibal.pipeline.stage_memory import GIB, fits_cap, tied_state_bytes, unit_bytes
from omnibal.pipeline.workload import Workload

SAMPLES = 20_000
"""Most samples that changes are tried on; more are subsampled unless steps are given."""

_CAP_UNIT = 256
"""Unit of the token caps to try; smaller where caps are small."""
_CAP_STEPS = 16  # caps are lowered in so many steps
_LARGER_DATA = (2, 3, 4)  # more ranks to divide optimizer state over
_MOST_SIZES = 4
"""Sizes on the same devices that are looked at, those of least state first: of these, the least is
nearly the state's."""
_EVERY_PIPELINE = 16
"""Pipeline size up to which, as up to twice the given size, every size is tried."""
_DIGITS = 3  # of GiB, so that small devices have figures too
_METHOD = "the joint partition and recomputation"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """A request that fits, and a description of what is changed."""

    text: str
    request: PlanRequest
    need_gib: float
    """Memory of one device in the split that needs least."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """Changes with which a job would fit, and the kinds of changes that were tried."""

    changes: tuple[Change, ...]
    tried: tuple[str, ...]
    """Kinds of changes of which at least one was tried, successful or not."""

    def message(self, error: DoesNotFit) -> str:
        """Say that a job does not fit, and which changes would make it fit."""
        return what_would_fit(error, [change.text for change in self.changes], self.tried)


def least_need_gib(job: JobSpec, workload: Workload, levels: Sequence[Level]) -> float:
    """Memory of the fullest device in the split and with the recomputation that need least, for a
    workload of packs of these levels."""
    if job.has_data_parallel_encoders and job.beside is None:
        return least_peak_with_encoders(placement_problem(job, workload, levels)) / GIB
    cost, stages = job.cost_of_all(levels), job.parallel.pipeline
    return (
        least_peak_of_splits(cost, job.pipeline_model, workload, stages, job.trainer.stages) / GIB
    )


def need_vs_budget_gib(job: JobSpec, workload: Workload, levels: Sequence[Level]) -> float:
    """Memory of the fullest device by which a job fits its cap or does not: of some split at most,
    or of all at least."""
    if not are_plain(levels) or (job.has_data_parallel_encoders and job.beside is None):
        return least_need_gib(job, workload, levels)
    model, stages, cap_bytes = job.pipeline_model, job.parallel.pipeline, job.memory_cap_gib * GIB
    return peak_vs_budget(job.cost, model, workload, stages, cap_bytes, job.trainer.stages) / GIB


def least_state_gib(job: JobSpec) -> float:
    """Weights, gradients and optimizer state of the fullest device, at least, in any split: no
    split does better than equal stages."""
    units = [job.cost.units[name] for name in unit_names(job.pipeline_model)]
    state_bytes = sum(unit_bytes(job.cost, unit) for unit in units)
    return (state_bytes - tied_state_bytes(job.cost)) / job.parallel.pipeline / GIB


def gib_text(gib: float) -> str:
    """Format GiB with three significant digits, so that small devices have figures too.

    Example:
        >>> gib_text(125.06), gib_text(72.0), gib_text(0.00123)
        ('125', '72.0', '0.00123')
    """
    decimals = _DIGITS - 1 - math.floor(math.log10(gib)) if gib > 0 else 0
    return f"{gib:,.{max(decimals, 0)}f}"


def need_text(need_gib: float, cap_gib: float) -> str:
    """What a device needs, of what it may fill."""
    return f"needs {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"


def what_would_fit(error: DoesNotFit, changes: Sequence[str], tried: Sequence[str]) -> str:
    """Say that something does not fit, and what would, or what was tried without success."""
    if changes:
        return f"{error.need}; what would fit: {'; or '.join(changes)}"
    if not tried:
        return str(error)
    return (
        f"{error.need}; of these, no single one that was tried is enough: {', '.join(tried)}; "
        "combine several of them or use a smaller model"
    )


Candidate = tuple[str, Callable[[], PlanRequest]]
"""Description of a change, and a function that makes the changed request or raises UserError."""


def find_changes(request: PlanRequest) -> Advice:
    """Find the smallest change of every kind with which a request that does not fit would.

    Those that need no more devices come first, then by devices; another kind of device is the last.
    For a method other than the joint search, that search is tried alone and, where it is not
    enough, together with all else. Where there are more than `SAMPLES` samples, they
    are tried on `SAMPLES` drawn ones: what only just fits these may need slightly more on all.
    """
    if request.is_joint:
        changes = _Changes(request)
    else:
        joint = replace(request, method=PartitionMethod.OMNIBAL, recompute=RecomputeRule.CHEAPEST)
        changes = _Changes(joint)
        text = (
            f"the partition method {PartitionMethod.OMNIBAL} with recompute rule "
            f"{RecomputeRule.CHEAPEST} instead of {request.method} with {request.recompute}"
        )
        changes.first(_METHOD, [(text, lambda: joint)])
        changes.prefix = f"{text}, and "
    if not changes.found:
        _try_all(changes)
    return Advice(changes=tuple(changes.found), tried=tuple(changes.tried))


def _try_all(changes: "_Changes") -> None:
    request = changes.request
    _try_smaller_caps(changes)
    job, parallel = request.job, request.job.parallel
    experts = expert_sizes(job.model, parallel.tensor, parallel.data)
    larger_experts = (changes.sized(expert=size) for size in experts if size > parallel.expert)
    changes.first("a larger --ep", larger_experts)
    if job.has_data_parallel_encoders and job.encoder_shardings == (WeightSharding.REPLICATED,):
        changes.first("--sharding auto", [changes.with_divided_encoders()])
    changes.first("--sharding hybrid or full", map(changes.held, _more_shards(job)))
    if request.job.trainer.stages.encoders_on_first:
        # The first stage holds encoders' activations of as many micro-batches as there are stages.
        fewer = (changes.sized(**sizes) for sizes in _fewer_stages(parallel))
        changes.first("a smaller --pp with a larger --dp", fewer)
    in_place = [each for each in changes.found if each.request.job is not request.job]
    if not in_place:
        others = map(changes.shared_out, _same_devices(request))
        changes.first("other sizes on the same devices", others)
    same_devices = len(changes.found)
    tensors, pipelines = _larger_tensors(request.job), _larger_pipelines(request.job)
    changes.first("a larger --tp", (changes.sized(tensor=size) for size in tensors))
    changes.first("a larger --pp", (changes.sized(pipeline=size) for size in pipelines))
    more_data = (changes.sized(data=factor * parallel.data) for factor in _LARGER_DATA)
    changes.first("a larger --dp", more_data)
    if not in_place:
        dividing = map(changes.shared_out, _larger_shards(request.job))
        changes.first("a larger --dp with --sharding full", dividing)
    if len(changes.found) == same_devices:
        pairs = sorted(
            ((tensor, pipeline) for tensor in tensors for pipeline in pipelines),
            key=lambda pair: (pair[0] * pair[1], pair),
        )
        both = (changes.sized(tensor=tensor, pipeline=pipeline) for tensor, pipeline in pairs)
        changes.first("a larger --tp and --pp together", both)
    larger = sorted(
        changes.found[same_devices:],
        key=lambda change: change.request.job.parallel.world_size,
    )
    changes.found[same_devices:] = larger
    changes.first("a preset device with more memory", _roomier(request))


class _Changes:
    """Changed requests, and what they need; the packs of the request's own caps are made once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.prefix = ""
        """Description of what is changed already."""
        self.packed = _sampled(request).packed()
        self.found: list[Change] = []
        self.tried: dict[str, None] = {}

    def sized(self, **sizes: int) -> Candidate:
        """Change the parallel sizes, but not micro-batches per rank unless steps are given."""
        parallel = self.request.job.parallel
        changes = dict(sizes)
        if parallel.tensor == 1 < sizes.get("tensor", 1):
            # The default of `omnibal plan`.
            changes["sequence_parallel"] = True
        if parallel.sharded == parallel.data > 1:
            changes["sharded"] = sizes.get("data", parallel.data)
        old = dict(parallel)
        text = " ".join(f"{SIZE_OPTIONS[name]} {size}" for name, size in sizes.items())
        instead = " and ".join(str(old[name]) for name in sizes)
        held = self.request.job.trainer.held

        def larger() -> PlanRequest:
            return self.request.sized(held(parallel.changed(**changes)))

        return f"{text} instead of {instead}", larger

    def held(self, way: WeightSharding) -> Candidate:
        """Divide weights over more data-parallel ranks, and those of data-parallel encoders."""
        job = self.request.job
        parallel = job.parallel.held(way, job.cluster)
        assert parallel is not None
        request = replace(self.request, job=replace(job, encoder_shardings=(way,)))
        text = f"--sharding {way} instead of {job.parallel.sharding}"
        return text, lambda: request.sized(parallel)

    def with_divided_encoders(self) -> Candidate:
        """Divide the weights of data-parallel encoders, as suits them best."""
        job = replace(self.request.job, encoder_shardings=tuple(WeightSharding))
        text = f"--sharding auto instead of {WeightSharding.REPLICATED}"
        return text, lambda: replace(self.request, job=job)

    def shared_out(self, parallel: Parallel) -> Candidate:
        """Change the parallel sizes and how weights are held, all at once."""
        old = self.request.job.parallel
        text = f"{_options_beside(parallel, old)} instead of {_options_beside(old, parallel)}"
        return text, lambda: self.request.sized(parallel)

    def first(self, kind: str, candidates: Iterable[Candidate]) -> None:
        """Keep the first candidate of a kind that fits, if any."""
        for candidate in candidates:
            self.tried[kind] = None
            change = self.change(*candidate)
            if change is not None:
                self.found.append(change)
                return

    def change(self, text: str, make: Callable[[], PlanRequest]) -> Change | None:
        """Try a change; None where the request does not fit or is otherwise impossible."""
        try:
            request = make()
            sampled = _sampled(request)
            same_packs = request.data.caps == self.request.data.caps
            packed = self.packed if same_packs else sampled.packed()
            workload = sampled.drawn(packed).workload()
            need_gib = least_need_gib(sampled.job, workload, sampled.data.levels)
        except UserError:
            return None
        cap_gib = request.job.memory_cap_gib
        if not fits_cap(need_gib, cap_gib):
            return None
        figures = need_text(need_gib, cap_gib)
        devices = request.job.parallel.world_size
        if devices != self.request.job.parallel.world_size:
            figures = f"{devices:,} devices, {figures}"
        return Change(text=f"{self.prefix}{text} ({figures})", request=request, need_gib=need_gib)


def _sampled(request: PlanRequest) -> PlanRequest:
    """Limit a request to `SAMPLES` samples, unless steps are given."""
    return replace(request, data=request.data.sampled(SAMPLES))


def _larger_tensors(job: JobSpec) -> list[int]:
    """Larger tensor-parallel sizes that the model and a node allow."""
    sizes = range(job.parallel.tensor + 1, job.cluster.gpus_per_node + 1)
    return [
        size
        for size in sizes
        if job.allows(Parallel(tensor=size, pipeline=1, sequence_parallel=size > 1))
        and job.parallel.expert in expert_sizes(job.model, size, job.parallel.data)
    ]


def _more_shards(job: JobSpec) -> list[WeightSharding]:
    """Ways in which more ranks divide weights, the fewest first."""
    held = {
        way: job.parallel.held(way, job.cluster)
        for way in (WeightSharding.HYBRID, WeightSharding.FULL)
    }
    return [
        way
        for way, each in held.items()
        if each is not None and each.sharded > job.parallel.sharded and job.allows(each)
    ]


def _options_beside(parallel: Parallel, other: Parallel) -> str:
    """Options that give sizes, but for those that are the same in others."""
    own, others = ({**dict(each), "sharding": each.sharding} for each in (parallel, other))
    options = {**SIZE_OPTIONS, "sharding": "--sharding"}
    return " ".join(
        f"{option} {own[name]}" for name, option in options.items() if own[name] != others[name]
    )


def _same_devices(request: PlanRequest) -> list[Parallel]:
    """Other sizes on as many devices, with weights held in any way, those of least state first."""
    job = request.job
    devices, context = job.parallel.world_size, max(each.context for each in request.data.levels)
    stages = [
        (tensor, pipeline)
        for tensor in range(1, job.cluster.gpus_per_node + 1)
        for pipeline in range(1, job.pipeline_model.layers + 1)
        if devices % (tensor * pipeline * context) == 0
    ]
    whole = [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            sequence_parallel=tensor > 1,
            expert=expert,
        )
        for tensor, pipeline in stages
        for data in [devices // (tensor * pipeline)]
        for expert in expert_sizes(job.model, tensor, data)
    ]
    held = (each.held(way, job.cluster) for each in whole for way in WeightSharding)
    allowed = [each for each in dict.fromkeys(held) if each is not None and job.allows(each)]
    allowed.sort(key=lambda each: (least_state_gib(job.sized(each)), each.pipeline, each.tensor))
    return allowed[:_MOST_SIZES]


def _larger_shards(job: JobSpec) -> list[Parallel]:
    """Sizes of the job with more data-parallel ranks, all of which divide weights."""
    data = [factor * job.parallel.data for factor in _LARGER_DATA]
    full = [job.parallel.model_copy(update={"data": size, "sharded": size}) for size in data]
    return [each for each in full if job.parallel.sharded == 1 and job.allows(each)]


def _larger_pipelines(job: JobSpec) -> list[int]:
    """Larger pipeline sizes: every one at first, then doubles, up to the number of layers."""
    layers, size = job.pipeline_model.layers, job.parallel.pipeline
    dense = max(2 * size, _EVERY_PIPELINE)
    sizes = list(range(size + 1, min(dense, layers) + 1))
    while (dense := 2 * dense) <= layers:
        sizes.append(dense)
    return sizes


def _fewer_stages(parallel: Parallel) -> list[dict[str, int]]:
    """Sizes with fewer pipeline stages on the same devices, the most stages first."""
    size = parallel.pipeline
    return [
        {"pipeline": fewer, "data": parallel.data * size // fewer}
        for fewer in range(size - 1, 0, -1)
        if parallel.data * size % fewer == 0
    ]


def _roomier(request: PlanRequest) -> list[Candidate]:
    return [
        (text, partial(request.on_cluster, preset)) for text, preset in roomier_devices(request.job)
    ]


def roomier_devices(job: JobSpec) -> list[tuple[str, ClusterConfig]]:
    """Preset devices of more memory, the smallest first, with the options that name them; a
    measured profile is of one device."""
    if job.cost_source.is_of_one_device:
        return []
    own = job.cluster
    presets = [load_cluster(name) for name in preset_names("clusters")]
    roomier = [preset for preset in presets if preset.memory_gib > own.memory_gib]
    larger = [preset for preset in roomier if preset.name != own.name]
    # A smaller memory than the device's was asked for, and would be of the other device too.
    also = " and no --memory-gib" if len(larger) < len(roomier) else ""
    return [
        (f"--cluster {preset.name}{also} instead of {own.name}", preset)
        for preset in sorted(larger, key=lambda preset: preset.memory_gib)
    ]


def _try_smaller_caps(changes: _Changes) -> None:
    """Smaller caps that fit where the next larger ones do not, by bisection.

    Larger packs need more memory, so these are about the largest; packing is not that regular.
    Levels have caps of their own, which are searched for elsewhere.
    """
    data = changes.request.data
    if data.steps is not None or not are_plain(data.levels):
        return
    candidates = smaller_caps(data.caps, data.least_caps())
    found: list[Change] = []
    low, high = 0, len(candidates)
    while low < high:
        changes.tried[f"smaller {words([option_of(n) for n in reversed(data.caps.names)])}"] = None
        middle = (low + high) // 2
        caps, old = candidates[middle], data.caps
        new = " ".join(reversed(caps.options))
        text = f"{new} instead of {words([str(old[name]) for name in reversed(old.names)])}"
        change = changes.change(text, partial(changes.request.capped, caps))
        if change is None:
            low = middle + 1
        else:
            found, high = [change], middle
    changes.found += found


def smaller_caps(caps: Caps, least: Caps) -> list[Caps]:
    """List smaller caps in equal proportion and round numbers, down to the least."""
    unit = min(_CAP_UNIT, 1 << max(caps["tokens"] // _CAP_STEPS, 1).bit_length() - 1)
    first = -(-least["tokens"] // unit) * unit
    # The largest round number below the cap itself.
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

"""Advice for a job that does not fit into memory: the smallest change of each kind that would fit.

Feasibility is the minimal peak over all splits with all useful recomputation. Each change is tried
alone: smaller caps, more sharding, larger tensor, pipeline and data sizes, and larger devices. If
no size is enough alone, tensor and pipeline sizes are tried together. If a trainer's first stage
runs all encoders, fewer stages are tried too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from omnibal.base.errors import DoesNotFit, UserError
from omnibal.job.job import JobSpec
from omnibal.job.planner import PlanRequest, placement_problem
from omnibal.model.config import ClusterConfig, ModelConfig, load_cluster, preset_names
from omnibal.model.levels import Level, are_plain
from omnibal.model.limits import Caps, option_of, words
from omnibal.model.parallel import SIZE_OPTIONS, Parallel, WeightSharding, expert_sizes
from omnibal.model.units import unit_names
from omnibal.pipeline.baselines import JOINT
from omnibal.pipeline.encoder_search import least_peak_with_encoders
from omnibal.pipeline.least_peak import least_peak_of_splits
from omnibal.pipeline.stage_memory import GIB, fits_cap, tied_state_bytes, unit_bytes
from omnibal.pipeline.workload import Workload

SAMPLES = 20_000
"""Max samples that changes are tried on, unless steps are given."""

_CAP_UNIT = 256
"""Unit of token caps to try. Smaller for small caps."""
_CAP_STEPS = 16  # steps to lower caps in
_LARGER_DATA = (2, 3, 4)  # factors: more ranks shard optimizer state
_MOST_SIZES = 4
"""Max sizes to try on the same devices, by ascending state, which dominates there."""
_EVERY_PIPELINE = 16
"""Every pipeline size is tried up to this and up to twice the given size."""
_DIGITS = 3  # significant digits of GiB
_METHOD = "the joint partition and recomputation"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """Request that fits, with a description of its change."""

    text: str
    request: PlanRequest
    need_gib: float
    """Memory of one device in the split with minimal peak."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """Changes that would make a job fit, and the kinds of changes tried."""

    changes: tuple[Change, ...]
    tried: tuple[str, ...]
    """Kinds of changes tried, successful or not."""

    def message(self, error: DoesNotFit) -> str:
        """Format the error with the changes that would fit."""
        return what_would_fit(error, [change.text for change in self.changes], self.tried)


def least_need_gib(job: JobSpec, workload: Workload, levels: Sequence[Level]) -> float:
    """Return the minimal peak memory over splits and recomputation, for packs of these levels."""
    if job.has_data_parallel_encoders and job.beside is None:
        return least_peak_with_encoders(placement_problem(job, workload, levels)) / GIB
    cost, stages = job.cost_of_all(levels), job.parallel.pipeline
    return (
        least_peak_of_splits(cost, job.pipeline_model, workload, stages, job.trainer.stages) / GIB
    )


def need_vs_budget_gib(job: JobSpec, workload: Workload, levels: Sequence[Level]) -> float:
    """Return a peak that decides fitting: of some split if it fits, else a lower bound of all."""
    if not are_plain(levels) or (job.has_data_parallel_encoders and job.beside is None):
        return least_need_gib(job, workload, levels)
    sizes = job.pipeline_model, workload, job.parallel.pipeline, job.trainer.stages
    return least_peak_of_splits(job.cost, *sizes, job.memory_cap_gib * GIB) / GIB


def least_state_gib(job: JobSpec) -> float:
    """Return min weights, gradients and optimizer state of a device: the state of equal stages."""
    units = [job.cost.units[name] for name in unit_names(job.pipeline_model)]
    state_bytes = sum(unit_bytes(job.cost, unit) for unit in units)
    return (state_bytes - tied_state_bytes(job.cost)) / job.parallel.pipeline / GIB


def gib_text(gib: float) -> str:
    """Format GiB with three significant digits.

    Example:
        >>> gib_text(125.06), gib_text(72.0), gib_text(0.00123)
        ('125', '72.0', '0.00123')
    """
    decimals = _DIGITS - 1 - math.floor(math.log10(gib)) if gib > 0 else 0
    return f"{gib:,.{max(decimals, 0)}f}"


def need_text(need_gib: float, cap_gib: float) -> str:
    """Format needed and available memory."""
    return f"needs {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"


def what_would_fit(error: DoesNotFit, changes: Sequence[str], tried: Sequence[str]) -> str:
    """Format the error with changes that would fit, or with kinds tried in vain."""
    if changes:
        return f"{error.need}; what would fit: {'; or '.join(changes)}"
    if not tried:
        return str(error)
    return (
        f"{error.need}; of these, no single one that was tried is enough: {', '.join(tried)}; "
        "combine several of them or use a smaller model"
    )


Candidate = tuple[str, Callable[[], PlanRequest]]
"""Description of a change, and a function that returns the changed request or raises UserError."""


def find_changes(request: PlanRequest) -> Advice:
    """Find the smallest change of every kind that makes a request fit.

    Changes without more devices come first, then by devices, then other kinds of devices. For other
    methods, the joint search is tried alone first. More than `SAMPLES` samples are subsampled, so a
    change that barely fits may need slightly more memory on all samples.
    """
    if request.split.is_joint:
        changes = _Changes(request)
    else:
        joint = replace(request, split=JOINT)
        changes = _Changes(joint)
        text = (
            f"the partition method {JOINT.method} with recompute rule {JOINT.recompute} instead of "
            f"{request.split.method} with {request.split.recompute}"
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
        # The first stage keeps encoder activations of one micro-batch per stage.
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
    changes.found[same_devices:] = sorted(
        changes.found[same_devices:], key=lambda change: change.request.job.parallel.world_size
    )
    changes.first("a preset device with more memory", _roomier(request))


class _Changes:
    """Changed requests and their memory. Packs at the request's own caps are made once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.prefix = ""
        """Description of earlier changes."""
        self.packed = _sampled(request).packed()
        self.found: list[Change] = []
        self.tried: dict[str, None] = {}

    def sized(self, **sizes: int) -> Candidate:
        """Change parallel sizes, keeping micro-batches per rank unless steps are given."""
        parallel = self.request.job.parallel
        changes = dict(sizes)
        if parallel.tensor == 1 < sizes.get("tensor", 1):
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
        """Shard weights and data-parallel encoders over more data-parallel ranks."""
        job = self.request.job
        parallel = job.parallel.held(way, job.cluster)
        assert parallel is not None
        request = replace(self.request, job=replace(job, encoder_shardings=(way,)))
        text = f"--sharding {way} instead of {job.parallel.sharding}"
        return text, lambda: request.sized(parallel)

    def with_divided_encoders(self) -> Candidate:
        """Shard data-parallel encoders in their best way."""
        job = replace(self.request.job, encoder_shardings=tuple(WeightSharding))
        text = f"--sharding auto instead of {WeightSharding.REPLICATED}"
        return text, lambda: replace(self.request, job=job)

    def shared_out(self, parallel: Parallel) -> Candidate:
        """Change parallel sizes and sharding together."""
        old = self.request.job.parallel
        text = f"{_options_beside(parallel, old)} instead of {_options_beside(old, parallel)}"
        return text, lambda: self.request.sized(parallel)

    def first(self, kind: str, candidates: Iterable[Candidate]) -> None:
        """Keep the first candidate of a kind that fits."""
        for candidate in candidates:
            self.tried[kind] = None
            change = self.change(*candidate)
            if change is not None:
                self.found.append(change)
                return

    def change(self, text: str, make: Callable[[], PlanRequest]) -> Change | None:
        """Try a change. None if it does not fit or is impossible."""
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
    """Shardings over more ranks, fewest first."""
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
    """Options of sizes that differ from another layout."""
    own, others = ({**dict(each), "sharding": each.sharding} for each in (parallel, other))
    options = {**SIZE_OPTIONS, "sharding": "--sharding"}
    return " ".join(
        f"{option} {own[name]}" for name, option in options.items() if own[name] != others[name]
    )


def layouts_of(
    model: ModelConfig, devices: int, sizes: Iterable[tuple[int, int]], divides: bool = True
) -> list[Parallel]:
    """Return layouts of tensor and pipeline sizes, with sequence parallelism if it `divides`."""
    return [
        Parallel(
            tensor=tensor,
            pipeline=pipeline,
            data=data,
            sequence_parallel=tensor > 1 and divides,
            expert=expert,
        )
        for tensor, pipeline in sizes
        for data in [devices // (tensor * pipeline)]
        for expert in expert_sizes(model, tensor, data)
    ]


def _same_devices(request: PlanRequest) -> list[Parallel]:
    """Layouts on the same devices with any sharding, by ascending state."""
    job = request.job
    devices, context = job.parallel.world_size, max(each.context for each in request.data.levels)
    stages = [
        (tensor, pipeline)
        for tensor in range(1, job.cluster.gpus_per_node + 1)
        for pipeline in range(1, job.pipeline_model.layers + 1)
        if devices % (tensor * pipeline * context) == 0
    ]
    whole = layouts_of(job.model, devices, stages)
    held = (each.held(way, job.cluster) for each in whole for way in WeightSharding)
    allowed = [each for each in dict.fromkeys(held) if each is not None and job.allows(each)]
    allowed.sort(key=lambda each: (least_state_gib(job.sized(each)), each.pipeline, each.tensor))
    return allowed[:_MOST_SIZES]


def _larger_shards(job: JobSpec) -> list[Parallel]:
    """Layouts with more data-parallel ranks that all shard weights."""
    data = [factor * job.parallel.data for factor in _LARGER_DATA]
    full = [job.parallel.model_copy(update={"data": size, "sharded": size}) for size in data]
    return [each for each in full if job.parallel.sharded == 1 and job.allows(each)]


def _larger_pipelines(job: JobSpec) -> list[int]:
    """Larger pipeline sizes: consecutive, then doubling, up to the number of layers."""
    layers, size = job.pipeline_model.layers, job.parallel.pipeline
    dense = max(2 * size, _EVERY_PIPELINE)
    sizes = list(range(size + 1, min(dense, layers) + 1))
    while (dense := 2 * dense) <= layers:
        sizes.append(dense)
    return sizes


def _fewer_stages(parallel: Parallel) -> list[dict[str, int]]:
    """Sizes with fewer pipeline stages on the same devices, by descending stages."""
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
    """Return presets with more memory by size, with options. Empty for a measured profile."""
    if job.cost_source.is_of_one_device:
        return []
    own = job.cluster
    presets = [load_cluster(name) for name in preset_names("clusters")]
    roomier = [preset for preset in presets if preset.memory_gib > own.memory_gib]
    larger = [preset for preset in roomier if preset.name != own.name]
    # A lower memory limit was given, and would apply to another device too.
    also = " and no --memory-gib" if len(larger) < len(roomier) else ""
    return [
        (f"--cluster {preset.name}{also} instead of {own.name}", preset)
        for preset in sorted(larger, key=lambda preset: preset.memory_gib)
    ]


def _try_smaller_caps(changes: _Changes) -> None:
    """Find the largest smaller caps that fit, by bisection.

    Approximate, as packing is not monotonic. Caps of several levels are searched elsewhere.
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
    """Return smaller caps in proportion and round numbers, down to the minimum."""
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

"""What would make a job fit into memory that does not: the smallest change of each kind.

Whether a change fits is decided by the least peak over all splits, with all recomputation that
helps, on the very packs that a plan would be made of.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.cap_search import least_caps
from omnibal.config import ModelConfig, load_cluster, preset_names
from omnibal.cost.model import CostModel, pack_features
from omnibal.data.lengths import Lengths
from omnibal.data.packing import pack_samples
from omnibal.data.packs import Packs, ScheduledPacks
from omnibal.data.steps import Steps, deal_steps, match_packs
from omnibal.errors import DoesNotFit, UserError
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.partition import least_peak_of_splits
from omnibal.pipeline.stage_cost import GIB, model_ms
from omnibal.pipeline.workload import Workload
from omnibal.plan import Caps, Shapes, memory_cap_gib
from omnibal.planner import PlanRequest, check_parallel, data_at_caps, job_cost, model_of_origin

_CAP_UNIT = 256
"""Token caps to try are multiples of it, or of less where caps are small."""
_CAP_STEPS = 16
_LARGER_DATA = (2, 4)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """A request that fits, and in words what is changed."""

    text: str
    request: PlanRequest
    need_gib: float
    """Of one device, in the split that needs least."""


def least_need_gib(
    cost: CostModel, model: ModelConfig, workload: Workload, pipeline_size: int
) -> float:
    """Memory of the fullest device in the split and with the recomputation that need least."""
    return least_peak_of_splits(cost, model, workload, pipeline_size) / GIB


def does_not_fit_message(error: DoesNotFit, changes: Sequence[str]) -> str:
    """The error, with the changes that would do."""
    if not changes:
        return f"{error}; no single larger parallel size, smaller caps or preset device is enough"
    return f"{error}; what would fit: {'; or '.join(changes)}"


def changes_that_fit(request: PlanRequest) -> list[str]:
    """In words, what `fitting_changes` finds."""
    return [change.text for change in fitting_changes(request)]


def fitting_changes(request: PlanRequest) -> list[Change]:
    """The smallest change of every kind with which a request that does not fit would.

    Those that need no more devices come first, then by devices; another kind of device is the last.
    Where no parallel size alone is enough, a larger tensor and pipeline size together are tried.

    Raises:
        UserError: the request is wrong in another way than that it does not fit.
    """
    jobs = _Jobs(request)
    if not _is_joint(request):
        return jobs.first([(_text_of_method(request), _joint(request))])
    parallel = request.parallel
    tensors, pipelines = _larger_tensors(request), _larger_pipelines(request)
    larger = [
        *jobs.first(jobs.sized(tensor=tensor) for tensor in tensors),
        *jobs.first(jobs.sized(pipeline=pipeline) for pipeline in pipelines),
        *jobs.first(jobs.sized(data=factor * parallel.data) for factor in _LARGER_DATA),
    ]
    if not larger:
        pairs = sorted(
            ((tensor, pipeline) for tensor in tensors for pipeline in pipelines),
            key=lambda pair: (pair[0] * pair[1], pair),
        )
        larger = jobs.first(jobs.sized(tensor=t, pipeline=p) for t, p in pairs)
    larger.sort(key=lambda change: change.request.parallel.world_size)
    return [*_smaller_caps(request, jobs), *larger, *jobs.first(_roomier(request))]


class _Jobs:
    """Changed requests, and what they need; the packs of the request's own caps are made once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.packed = _packed(request)

    def sized(self, **sizes: int) -> tuple[str, PlanRequest]:
        """With other parallel sizes, and as many micro-batches per rank unless steps are given."""
        request = self.request
        parallel = request.parallel.model_copy(update=sizes)
        packs_per_step = request.packs_per_step
        if request.steps is None:
            packs_per_step = request.micro_batches * parallel.data
        options = {"tensor": "--tp", "pipeline": "--pp", "data": "--dp"}
        old = request.parallel.model_dump()
        text = " ".join(f"{options[name]} {size}" for name, size in sizes.items())
        instead = " and ".join(str(old[name]) for name in sizes)
        changed = replace(request, parallel=parallel, packs_per_step=packs_per_step)
        return f"{text} instead of {instead}", changed

    def first(self, candidates: Iterable[tuple[str, PlanRequest]]) -> list[Change]:
        """The first of them that fits, if any."""
        for text, request in candidates:
            change = self.change(text, request)
            if change is not None:
                return [change]
        return []

    def change(self, text: str, request: PlanRequest) -> Change | None:
        """None where the request does not fit, or is impossible for another reason."""
        packed = self.packed if request.caps == self.request.caps else _packed(request)
        try:
            need_gib = _need_gib(request, packed)
        except UserError:
            return None
        cap_gib = memory_cap_gib(request.cluster)
        if need_gib > cap_gib:
            return None
        figures = f"needs {need_gib:.1f} of {cap_gib:.1f} GiB"
        return Change(text=f"{text} ({figures})", request=request, need_gib=need_gib)


def _packed(request: PlanRequest) -> list[Packs]:
    """Packs of every epoch, as `draw_steps` makes them; none where steps are given or made up."""
    if request.lengths is None or request.steps is not None:
        return []
    return [
        pack_samples(request.lengths, request.caps, request.packing, _seeds(request, epoch)[0])
        for epoch in range(request.epochs)
    ]


def _need_gib(request: PlanRequest, packed: Sequence[Packs]) -> float:
    """Of one device in the best split, on the packs that a plan would have."""
    check_parallel(request.model, request.parallel, request.cluster)
    origin = request.lengths.origin if request.lengths is not None else None
    model = model_of_origin(request.model, origin)
    job = model, request.cluster, request.parallel, request.precision
    cost = job_cost(request.profile, *job, request.frozen)
    if request.lengths is None:
        shapes = Shapes(caps=request.caps, micro_batches_per_step=request.micro_batches)
        dealt, lengths = data_at_caps(shapes, request.parallel.data)
    else:
        lengths = request.lengths
        dealt = _dealt(request, lengths, packed, lambda packs: _load(cost, model, packs, lengths))
    features = pack_features(dealt.packs, lengths)
    workload = Workload.of(dealt, features, request.parallel.data)
    return least_need_gib(cost, model, workload, request.parallel.pipeline)


def _load(cost: CostModel, model: ModelConfig, packs: Packs, lengths: Lengths) -> np.ndarray:
    return model_ms(cost, model, pack_features(packs, lengths))


def _dealt(
    request: PlanRequest,
    lengths: Lengths,
    packed: Sequence[Packs],
    load: Callable[[Packs], np.ndarray],
) -> ScheduledPacks:
    """As `make_plan` does, on packs that are there."""
    ranks = request.parallel.data
    if request.steps is not None:
        return deal_steps(request.steps, lengths, load, ranks)
    step: list[np.ndarray] = []
    first_step = 0
    for epoch, packs in enumerate(packed):
        order_seed = _seeds(request, epoch)[1]
        tiles = packs.sums(lengths.tiles)
        step.append(match_packs(tiles, load(packs), request.packs_per_step, ranks, order_seed))
        step[-1] += first_step
        first_step = int(step[-1].max()) + 1
    epochs = np.repeat(np.arange(len(packed), dtype=np.int32), list(map(len, packed)))
    steps = Steps.of(Packs.join(packed), np.concatenate(step), epochs)
    return deal_steps(steps, lengths, load, ranks)


def _seeds(request: PlanRequest, epoch: int) -> list[np.random.SeedSequence]:
    """Of an epoch's packing and order, as `draw_steps` takes them."""
    return np.random.SeedSequence([request.seed, epoch]).spawn(2)


def _is_joint(request: PlanRequest) -> bool:
    return (request.method, request.recompute) == (PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST)


def _joint(request: PlanRequest) -> PlanRequest:
    return replace(request, method=PartitionMethod.OMNIBAL, recompute=RecomputeRule.CHEAPEST)


def _text_of_method(request: PlanRequest) -> str:
    return (
        f"the partition method {PartitionMethod.OMNIBAL} with recompute rule "
        f"{RecomputeRule.CHEAPEST} instead of {request.method} with {request.recompute}"
    )


def _larger_tensors(request: PlanRequest) -> list[int]:
    """Twice, four times and so on, up to the devices of a node."""
    return _doubled(request.parallel.tensor, request.cluster.gpus_per_node)


def _larger_pipelines(request: PlanRequest) -> list[int]:
    """Twice, four times and so on, up to the layers."""
    layers = request.model.vision.layers + request.model.language.layers
    return _doubled(request.parallel.pipeline, layers)


def _doubled(size: int, most: int) -> list[int]:
    sizes = []
    while (size := 2 * size) <= most:
        sizes.append(size)
    return sizes


def _roomier(request: PlanRequest) -> list[tuple[str, PlanRequest]]:
    """Preset devices of more memory, the smallest first; a measured profile is of one device."""
    if request.profile is not None:
        return []
    own = request.cluster
    presets = [load_cluster(name) for name in preset_names("clusters")]
    larger = [
        preset
        for preset in presets
        if preset.name != own.name and preset.memory_gib > own.memory_gib
    ]
    return [
        (f"--cluster {preset.name} instead of {own.name}", replace(request, cluster=preset))
        for preset in sorted(larger, key=lambda preset: preset.memory_gib)
    ]


def _smaller_caps(request: PlanRequest, jobs: _Jobs) -> list[Change]:
    """Smaller caps that fit where the next larger ones do not, by bisection.

    Larger packs need more memory, so these are about the largest; packing is not that regular.
    """
    if request.steps is not None:
        return []
    candidates = smaller_caps(request.caps, request.lengths)
    found: list[Change] = []
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        caps, old = candidates[middle], request.caps
        text = (
            f"--max-tokens {caps.max_tokens} --max-tiles {caps.max_tiles} instead of "
            f"{old.max_tokens} and {old.max_tiles}"
        )
        change = jobs.change(text, replace(request, caps=caps))
        if change is None:
            low = middle + 1
        else:
            found, high = [change], middle
    return found


def smaller_caps(caps: Caps, lengths: Lengths | None) -> list[Caps]:
    """Caps in equal proportion and round numbers, the largest first; every sample fits them."""
    unit = min(_CAP_UNIT, 1 << max(caps.max_tokens // _CAP_STEPS, 1).bit_length() - 1)
    least = least_caps(lengths) if lengths is not None else Caps(max_tiles=1, max_tokens=1)
    first = -(-least.max_tokens // unit) * unit
    # The largest round number below the cap itself.
    last = (caps.max_tokens - 1) // unit * unit
    return [
        Caps(
            max_tiles=max(round(caps.max_tiles * tokens / caps.max_tokens), least.max_tiles),
            max_tokens=tokens,
        )
        for tokens in range(last, first - 1, -unit)
    ]

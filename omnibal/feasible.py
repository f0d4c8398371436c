"""What would make a job fit into memory that does not: the smallest change of each kind tried.

Whether a change fits is decided by the least peak over all splits, with all recomputation that
helps, on packs as a plan would have them. Tried are, each alone: smaller caps in round numbers,
every larger tensor size that the model allows, every pipeline size up to twice the given or 16 and
then doubles, data sizes of two to four times, and preset devices with more memory; where none of
the sizes is enough, tensor and pipeline sizes together.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from omnibal.cap_search import draw_samples, least_caps
from omnibal.config import ModelConfig, load_cluster, preset_names
from omnibal.cost.model import CostModel
from omnibal.data.lengths import Lengths
from omnibal.data.packs import Packs
from omnibal.errors import DoesNotFit, UserError
from omnibal.limits import Caps, memory_cap_gib
from omnibal.parallel import Parallel, check_parallel
from omnibal.pipeline.baselines import PartitionMethod, RecomputeRule
from omnibal.pipeline.partition import least_peak_of_splits
from omnibal.pipeline.stage_cost import GIB, fits_cap
from omnibal.pipeline.workload import Workload
from omnibal.planner import PlanRequest
from omnibal.trial import Job, packs_of

SAMPLES = 20_000
"""Drawn to decide on, where there are more and no steps are given."""

_CAP_UNIT = 256
"""Token caps to try are multiples of it, or of less where caps are small."""
_CAP_STEPS = 16
_LARGER_DATA = (2, 3, 4)
_EVERY_PIPELINE = 16
"""Up to here, and up to twice the given size, no pipeline size is left out."""
_DIGITS = 3
_METHOD = "the joint partition and recomputation"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """A request that fits, and in words what is changed."""

    text: str
    request: PlanRequest
    need_gib: float
    """Of one device, in the split that needs least."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Advice:
    """What was found."""

    changes: tuple[Change, ...]
    tried: tuple[str, ...]
    """In words, the kinds of changes of which at least one was tried, found or not."""


def least_need_gib(
    cost: CostModel, model: ModelConfig, workload: Workload, pipeline_size: int
) -> float:
    """Memory of the fullest device in the split and with the recomputation that need least."""
    return least_peak_of_splits(cost, model, workload, pipeline_size) / GIB


def gib_text(gib: float) -> str:
    """Three significant digits, so that small devices have figures too.

    Example:
        >>> gib_text(125.06), gib_text(72.0), gib_text(0.00123)
        ('125', '72.0', '0.00123')
    """
    decimals = _DIGITS - 1 - math.floor(math.log10(gib)) if gib > 0 else 0
    return f"{gib:,.{max(decimals, 0)}f}"


def does_not_fit_message(error: DoesNotFit, advice: Advice) -> str:
    """The error, with the changes that would do in place of general advice."""
    if advice.changes:
        changes = "; or ".join(change.text for change in advice.changes)
        return f"{error.need}; what would fit: {changes}"
    if not advice.tried:
        return str(error)
    return (
        f"{error.need}; of these, no single one that was tried is enough: "
        f"{', '.join(advice.tried)}; combine several of them or use a smaller model"
    )


def find_changes(request: PlanRequest) -> Advice:
    """The smallest change of every kind tried with which a request that does not fit would.

    Those that need no more devices come first, then by devices; another kind of device is the last.
    For a method other than the joint search, that search is tried alone and, where it is not
    enough, together with all else. Where there are more than `SAMPLES` samples, so many are drawn
    to decide on: what only just fits them may need slightly more on all.

    Raises:
        UserError: the request is wrong in another way than that it does not fit.
    """
    if _is_joint(request):
        trials = _Trials(request)
    else:
        joint = replace(request, method=PartitionMethod.OMNIBAL, recompute=RecomputeRule.CHEAPEST)
        trials = _Trials(joint)
        text = _text_of_method(request)
        trials.first(_METHOD, [(text, joint)])
        trials.prefix = f"{text}, and "
    if not trials.found:
        _try_all(trials)
    return Advice(changes=tuple(trials.found), tried=tuple(trials.tried))


def _try_all(trials: "_Trials") -> None:
    request = trials.request
    _try_smaller_caps(trials)
    same_devices = len(trials.found)
    tensors, pipelines = _larger_tensors(request), _larger_pipelines(request)
    data = request.parallel.data
    trials.first("a larger --tp", (trials.sized(tensor=size) for size in tensors))
    trials.first("a larger --pp", (trials.sized(pipeline=size) for size in pipelines))
    more_data = (trials.sized(data=factor * data) for factor in _LARGER_DATA)
    trials.first("a larger --dp", more_data)
    if len(trials.found) == same_devices:
        pairs = sorted(
            ((tensor, pipeline) for tensor in tensors for pipeline in pipelines),
            key=lambda pair: (pair[0] * pair[1], pair),
        )
        both = (trials.sized(tensor=tensor, pipeline=pipeline) for tensor, pipeline in pairs)
        trials.first("a larger --tp and --pp together", both)
    larger = sorted(
        trials.found[same_devices:], key=lambda change: change.request.parallel.world_size
    )
    trials.found[same_devices:] = larger
    trials.first("a preset device with more memory", _roomier(request))


class _Trials:
    """Changed requests, and what they need; the packs of the request's own caps are made once."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.prefix = ""
        """What is changed already, in words."""
        self.packed = packs_of(_drawn(request))
        self.found: list[Change] = []
        self.tried: list[str] = []

    def sized(self, **sizes: int) -> tuple[str, PlanRequest]:
        """With other parallel sizes, and as many micro-batches per rank unless steps are given."""
        request = self.request
        changes = dict(sizes)
        if request.parallel.tensor == 1 < sizes.get("tensor", 1):
            # As `omnibal plan` does unless told otherwise.
            changes["sequence_parallel"] = True
        parallel = request.parallel.model_copy(update=changes)
        packs_per_step = request.packs_per_step
        if request.steps is None:
            packs_per_step = request.micro_batches * parallel.data
        options = {"tensor": "--tp", "pipeline": "--pp", "data": "--dp"}
        old = request.parallel.model_dump()
        text = " ".join(f"{options[name]} {size}" for name, size in sizes.items())
        instead = " and ".join(str(old[name]) for name in sizes)
        changed = replace(request, parallel=parallel, packs_per_step=packs_per_step)
        return f"{text} instead of {instead}", changed

    def first(self, kind: str, candidates: Iterable[tuple[str, PlanRequest]]) -> None:
        """Keep the first candidate of a kind that fits, if any."""
        for text, request in candidates:
            self.note(kind)
            change = self.change(text, request)
            if change is not None:
                self.found.append(change)
                return

    def note(self, kind: str) -> None:
        if kind not in self.tried:
            self.tried.append(kind)

    def change(self, text: str, request: PlanRequest) -> Change | None:
        """None where the request does not fit, or is impossible for another reason."""
        drawn = _drawn(request)
        same_packs = request.caps == self.request.caps
        try:
            need_gib = _need_gib(drawn, self.packed if same_packs else packs_of(drawn))
        except UserError:
            return None
        cap_gib = memory_cap_gib(request.cluster)
        if not fits_cap(need_gib, cap_gib):
            return None
        figures = f"needs {gib_text(need_gib)} of {gib_text(cap_gib)} GiB"
        return Change(text=f"{self.prefix}{text} ({figures})", request=request, need_gib=need_gib)


def _drawn(request: PlanRequest) -> PlanRequest:
    """On no more than `SAMPLES` samples, unless steps name them."""
    if request.lengths is None or request.steps is not None:
        return request
    return replace(request, lengths=draw_samples(request.lengths, SAMPLES, request.seed))


def _need_gib(request: PlanRequest, packed: Sequence[Packs]) -> float:
    """Of one device in the best split."""
    job = Job.of(request, packed)
    return least_need_gib(job.cost, job.model, job.workload(), request.parallel.pipeline)


def _is_joint(request: PlanRequest) -> bool:
    return (request.method, request.recompute) == (PartitionMethod.OMNIBAL, RecomputeRule.CHEAPEST)


def _text_of_method(request: PlanRequest) -> str:
    return (
        f"the partition method {PartitionMethod.OMNIBAL} with recompute rule "
        f"{RecomputeRule.CHEAPEST} instead of {request.method} with {request.recompute}"
    )


def _larger_tensors(request: PlanRequest) -> list[int]:
    """All that the model and a node allow."""
    sizes = range(request.parallel.tensor + 1, request.cluster.gpus_per_node + 1)
    return [size for size in sizes if _allows_tensor(request, size)]


def _allows_tensor(request: PlanRequest, size: int) -> bool:
    if request.profile is not None and request.profile.tensor != size:
        return False
    try:
        check_parallel(request.model, Parallel(tensor=size, pipeline=1), request.cluster)
    except UserError:
        return False
    return True


def _larger_pipelines(request: PlanRequest) -> list[int]:
    """Every size at first, then doubles, up to the layers."""
    layers = request.model.vision.layers + request.model.language.layers
    size = request.parallel.pipeline
    dense = max(2 * size, _EVERY_PIPELINE)
    sizes = list(range(size + 1, min(dense, layers) + 1))
    while (dense := 2 * dense) <= layers:
        sizes.append(dense)
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


def _try_smaller_caps(trials: _Trials) -> None:
    """Smaller caps that fit where the next larger ones do not, by bisection.

    Larger packs need more memory, so these are about the largest; packing is not that regular.
    """
    request = trials.request
    if request.steps is not None:
        return
    candidates = smaller_caps(request.caps, request.lengths)
    found: list[Change] = []
    low, high = 0, len(candidates)
    while low < high:
        trials.note("smaller --max-tokens and --max-tiles")
        middle = (low + high) // 2
        caps, old = candidates[middle], request.caps
        text = (
            f"--max-tokens {caps.max_tokens} --max-tiles {caps.max_tiles} instead of "
            f"{old.max_tokens} and {old.max_tiles}"
        )
        change = trials.change(text, replace(request, caps=caps))
        if change is None:
            low = middle + 1
        else:
            found, high = [change], middle
    trials.found += found


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

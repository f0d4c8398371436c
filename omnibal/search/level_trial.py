"""Trial of a set of levels: pack, draw steps and simulate."""

import math
from dataclasses import dataclass, replace

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, draw_samples
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import placement_problem
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.by_level import levels_of_packs
from omnibal.packing.packing import PackingMethod
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.encoder_search import search_encoders
from omnibal.pipeline.partition import SearchResult, search_stages
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import per_step_costs, workload_times
from omnibal.pipeline.stage_memory import GIB
from omnibal.pipeline.workload import Workload

_SEARCHED_STEPS = 8
"""Steps for searching stages in a trial. All steps are simulated."""
_BESIDE_EFFORT = 0.1
"""Effort of the search for data-parallel encoders in a trial."""
_LEAST_ROWS = 4
"""Min rows of full unshared packs from a trial's samples, if available."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelTrial:
    levels: tuple[Level, ...]
    """Levels with packs."""
    ms_per_sample: float
    """Time per sample of all ranks."""
    packs: tuple[int, ...]
    """Packs of every level."""
    recomputed_layers: tuple[int, ...]
    """Recomputed layers of all stages, by level."""
    micro_batches: int
    """Micro-batches per rank and step, for equal tokens per step in all trials."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelTrials:
    """Picklable job and samples for trials of sets of levels."""

    job: JobSpec
    data: SampleData
    """Samples, at one level of the longest packs."""
    tokens_per_step: float
    """Tokens per rank and step, similar in all trials, so that larger steps gain nothing."""
    longest: Caps
    """Min caps that fit every sample of the plan, including samples not in the trial."""
    least_rows: float = 0.0
    """Min rows of packs per step. Larger steps are rejected."""
    curriculum_steps: float = 0
    """First steps with packs of the shortest level, scaled to the sampled share."""

    def drawn(self, samples: int) -> "LevelTrials":
        """Draw samples, more if needed for packs on all ranks, and pack by ISF, which is fast."""
        row_tokens = self.job.parallel.data * self.data.caps["tokens"]
        least = math.ceil(_LEAST_ROWS * row_tokens / float(self.data.lengths.tokens.mean()))
        settings = self.data.settings
        lengths = draw_samples(self.data.lengths, max(samples, least), settings.seed)
        fast = replace(settings, packing=PackingMethod.ISF, epochs=1, curriculum_steps=0)
        data = replace(self.data, lengths=lengths, settings=fast)
        part = len(lengths) / len(self.data.lengths)
        return replace(self, data=data, curriculum_steps=part * self.curriculum_steps)

    def __call__(
        self, levels: tuple[Level, ...]
    ) -> tuple[tuple[Level, ...], LevelTrial | UserError]:
        """Try a set of levels, without levels that get no packs, or return the error."""
        try:
            return levels, self._tried(levels)
        except UserError as error:
            return levels, error

    def _tried(self, levels: tuple[Level, ...]) -> LevelTrial:
        job, data = self.job, replace(self.data, levels=levels)
        (packed,) = data.packed(job)
        of_packs = levels_of_packs(packed, data.lengths, levels)
        in_use = levels_in_use(levels, of_packs, self.longest)
        if in_use != levels:
            return self._tried(in_use)
        contexts = np.array([level.context for level in levels])
        shares = int(contexts[of_packs].sum())
        mean_tokens = float(data.lengths.tokens.mean())
        share_tokens = mean_tokens * len(data.lengths) / shares
        if self.tokens_per_step < self.least_rows * share_tokens:
            raise UserError("a step has fewer packs than data-parallel ranks")
        micro_batches = max(round(self.tokens_per_step / share_tokens), 1)
        self._check_curriculum(levels, int((of_packs == 0).sum()), micro_batches)
        data = replace(data, packs_per_step=micro_batches * job.parallel.data)
        packs, lengths = data.drawn(job, [packed]).schedule(job)
        workload, found = _searched(job, packs, lengths, levels)
        cost = job.cost_of_all(levels)
        times = workload_times(cost, found.stages_at, workload)
        once = per_step_costs(cost, found.stages)
        whole_ms = predict_steps(times, workload, once).step_ms
        compute_ms = predict_steps(times, workload, once.nothing()).step_ms
        once_ms = float((whole_ms - compute_ms).mean())
        of_packs = levels_of_packs(packs.packs, lengths, levels)
        samples_per_step = job.parallel.data * self.tokens_per_step / mean_tokens
        return LevelTrial(
            levels=levels,
            # Steps differ slightly due to whole rows, so normalize to equal steps.
            ms_per_sample=float(compute_ms.sum()) / len(lengths) + once_ms / samples_per_step,
            micro_batches=micro_batches,
            packs=tuple(np.bincount(of_packs, minlength=len(levels)).tolist()),
            recomputed_layers=tuple(
                sum(stage.recomputed_layers for stage in stages) for stages in found.stages_at
            ),
        )

    def _check_curriculum(
        self, levels: tuple[Level, ...], shortest: int, micro_batches: int
    ) -> None:
        """Raise if the shortest level has too few packs for the curriculum."""
        if not self.curriculum_steps:
            return
        if len(levels) < 2:
            raise UserError(
                "a curriculum begins with packs of the shortest level, and there is one level; "
                "leave --curriculum-steps out"
            )
        rows = shortest * levels[0].context // self.job.parallel.data
        share = min(rows / micro_batches / self.curriculum_steps, 1)
        if share < 1:
            raise UserError(
                f"packs of the shortest level are enough for about {share:.0%} of the curriculum; "
                "give fewer --curriculum-steps"
            )


def _searched(
    job: JobSpec, packs: ScheduledPacks, lengths: Lengths, levels: tuple[Level, ...]
) -> tuple[Workload, SearchResult]:
    """Workload of all packs, and stages searched on some of its steps."""
    workload = job.workload(packs, lengths, levels)
    some = workload.some_steps(_SEARCHED_STEPS)
    if job.has_data_parallel_encoders:
        beside = search_encoders(placement_problem(job, some, levels), _BESIDE_EFFORT)
        placed = replace(job, beside=beside.beside)
        return placed.workload(packs, lengths, levels), beside.search
    return workload, search_stages(
        job.cost_of_all(levels),
        job.model,
        some,
        job.parallel.pipeline,
        job.memory_cap_gib * GIB,
        rules=job.trainer.stages,
        prove=False,
    )


def levels_in_use(
    levels: tuple[Level, ...], of_packs: np.ndarray, longest: Caps
) -> tuple[Level, ...]:
    """Return levels with packs. The last level fits every sample."""
    counts = np.bincount(of_packs, minlength=len(levels)).tolist()
    used = [level for level, packs in zip(levels, counts, strict=True) if packs]
    if len(levels) == 1 or (used and holds(used[-1].caps, longest)):
        return tuple(used)
    last = next(level for level in levels if holds(level.caps, longest))
    return (*(level for level in used if level is not last), last)


def holds(caps: Caps, other: Caps) -> bool:
    """Whether caps are at least `other` for every feature."""
    return all(caps[name] >= other[name] for name in other.names)

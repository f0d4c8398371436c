"""Trial of a set of levels: its packs, its steps, and what these take when simulated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from omnibal.data.by_level import levels_of_packs
from omnibal.data.lengths import draw_samples
from omnibal.data.packing import PackingMethod
from omnibal.errors import UserError
from omnibal.job import JobSpec
from omnibal.levels import Level
from omnibal.pipeline.partition import search_stages
from omnibal.pipeline.simulate import predict_steps
from omnibal.pipeline.stage_cost import once_a_step, workload_times
from omnibal.pipeline.stage_memory import GIB
from omnibal.plan_data import SampleData

_SEARCHED_STEPS = 8
"""Steps that stages are searched for in a trial; all are simulated."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelTrial:
    """A set of levels, simulated."""

    levels: tuple[Level, ...]
    """Empty for one level of context size 1."""
    ms_per_sample: float
    """Time per sample of all ranks together."""
    packs: tuple[int, ...]
    """Packs of every level."""
    recomputed_layers: tuple[int, ...]
    """Recomputed layers of all stages, by level."""
    micro_batches: int
    """Micro-batches of one rank in a step, so that a step has as many tokens as in other trials."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelTrials:
    """A job and samples that sets of levels are tried on; can be sent to another process."""

    job: JobSpec
    data: SampleData
    """Samples, without levels."""
    tokens_per_step: float
    """Tokens of one rank in a step, about equally many in all trials: larger packs are not taken
    for making fewer steps of more samples."""

    def drawn(self, samples: int) -> "LevelTrials":
        """Take so many of the samples, drawn at random, and pack them by ISF, which is fast."""
        lengths = draw_samples(self.data.lengths, samples, self.data.seed)
        data = replace(
            self.data, lengths=lengths, packing=PackingMethod.ISF, epochs=1, curriculum_steps=0
        )
        return replace(self, data=data)

    def __call__(self, levels: tuple[Level, ...]) -> tuple[tuple[Level, ...], LevelTrial | str]:
        """Try a set of levels, or say why it cannot be used."""
        try:
            return levels, self._tried(levels)
        except UserError as error:
            return levels, str(error)

    def _tried(self, levels: tuple[Level, ...]) -> LevelTrial:
        job, data = self.job, replace(self.data, levels=levels)
        (packed,) = data.packed(job)
        contexts = np.array([level.context for level in levels] or [1])
        shares = int(contexts[levels_of_packs(packed, data.lengths, levels)].sum())
        mean_tokens = float(data.lengths.tokens.mean())
        share_tokens = mean_tokens * len(data.lengths) / shares
        micro_batches = max(round(self.tokens_per_step / share_tokens), 1)
        data = replace(data, packs_per_step=micro_batches * job.parallel.data)
        packs, lengths = data.drawn(job, [packed]).schedule(job)
        workload = job.workload(packs, lengths, levels)
        cost = job.cost_of_all(levels)
        found = search_stages(
            cost,
            job.model,
            workload.some_steps(_SEARCHED_STEPS),
            job.parallel.pipeline,
            job.memory_cap_gib * GIB,
            prove=False,
        )
        times = workload_times(cost, found.stages_at, workload)
        once = once_a_step(cost, found.stages)
        whole_ms = predict_steps(times, workload, once).step_ms
        compute_ms = predict_steps(times, workload, once.nothing()).step_ms
        once_ms = float((whole_ms - compute_ms).mean())
        of_packs = levels_of_packs(packs.packs, lengths, levels)
        samples_per_step = job.parallel.data * self.tokens_per_step / mean_tokens
        return LevelTrial(
            levels=levels,
            # Rows are whole numbers, so that steps differ a little: this is at equal ones.
            ms_per_sample=float(compute_ms.sum()) / len(lengths) + once_ms / samples_per_step,
            micro_batches=micro_batches,
            packs=tuple(np.bincount(of_packs, minlength=max(len(levels), 1)).tolist()),
            recomputed_layers=tuple(
                sum(stage.recomputed_layers for stage in stages) for stages in found.stages_at
            ),
        )


def shorter_first(trials: Sequence[LevelTrial], least_gain: float) -> list[LevelTrial]:
    """Sort trials by time; the first has the fewest levels of those within a gain of the best."""
    ranked = sorted(trials, key=lambda trial: trial.ms_per_sample)
    near = [t for t in ranked if t.ms_per_sample <= ranked[0].ms_per_sample * (1 + least_gain)]
    chosen = min(near, key=lambda trial: len(trial.levels))
    return [chosen, *(trial for trial in ranked if trial is not chosen)]

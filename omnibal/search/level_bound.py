"""A lower bound on the time of all sets of levels: no caps, context sizes or stages take less."""

import numpy as np

from omnibal.cost.model import pack_features
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.limits import Caps
from omnibal.model.units import EXCHANGED
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_memory import GIB
from omnibal.search.level_choice import WholeModel, level_forms, possible_contexts

_CHUNK = 1 << 17
"""Samples at a time, which bounds memory."""


def least_ms_per_sample(job: JobSpec, lengths: Lengths) -> float:
    """Bound the time per sample of all ranks together from below.

    A sample takes at least its forward and backward, wherever it runs, spread evenly over all
    devices. Shared by c ranks, it takes besides the least exchange of c ranks, and the least
    recomputation with which c ranks can hold this sample alone, one micro-batch in flight; the
    best c counts. What packs, steps and the pipeline take besides is left out.
    """
    total_ms = 0.0
    for first in range(0, len(lengths), _CHUNK):
        some = lengths.take(np.arange(first, min(first + _CHUNK, len(lengths))))
        total_ms += float(_least_ms(job, some).sum())
    devices = job.parallel.data * job.parallel.pipeline
    return total_ms / devices / len(lengths)


def _least_ms(job: JobSpec, lengths: Lengths) -> np.ndarray:
    """Least device time of every sample, [samples]."""
    whole = WholeModel.of(job, job.cost)
    alone = Packs(samples=np.arange(len(lengths)), offsets=np.arange(len(lengths) + 1))
    features = pack_features(alone, lengths, job.cost.features)
    # Packs share what is fixed; of a sample there may be next to nothing.
    features[:, 0] = 0
    added_ms = np.full(len(lengths), np.inf)
    for context in possible_contexts(job):
        exchange_ms = _least_exchange_ms(job, context) * lengths.tokens
        again_ms = _least_recompute_ms(job, whole, features, context)
        added_ms = np.minimum(added_ms, exchange_ms + again_ms)
    return features @ whole.pass_ms + added_ms


def _least_exchange_ms(job: JobSpec, context: int) -> float:
    """Least device time to exchange one token of a divided sample."""
    if context == 1:
        return 0.0
    each_ms = []
    for level in level_forms(job, Caps.of(tokens=1), [context]):
        (cost,) = job.costs_at([level])
        whole = WholeModel.of(job, cost)
        each_ms.append(float(whole.pass_ms[cost.features.index(EXCHANGED)]))
    return min(each_ms)


def _least_recompute_ms(
    job: JobSpec, whole: WholeModel, features: np.ndarray, context: int
) -> np.ndarray:
    """Least device time to recompute where so many ranks hold a sample; infinite where they cannot.

    Together the stages hold at least the sample's activations once. What is missing is saved by the
    layers that save most for their time.
    """
    stages = job.parallel.pipeline
    room = stages * job.memory_cap_gib * GIB - whole.state_bytes
    missing = features @ whole.kept_bytes / context - room
    saved, again_ms = features @ whole.saved_bytes.T, features @ whole.recompute_ms.T
    per_ms = np.divide(saved, again_ms, out=np.zeros_like(saved), where=again_ms > 0).max(axis=1)
    needed_ms = context * np.divide(
        missing, per_ms, out=np.full(len(missing), np.inf), where=per_ms > 0
    )
    fits = missing <= saved.sum(axis=1) / context
    return np.where(missing <= 0, 0.0, np.where(fits, needed_ms, np.inf))

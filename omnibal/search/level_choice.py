"""Choice of context size, cut and exchange for the packs of a level, by an estimate of their time.

Whole sets of levels are simulated (`omnibal.search.level_sets`); here one level is looked at
alone, on the packs of its own samples, so that few of its many forms have to be simulated. The
model is taken as evenly divided over the stages, without their bubble, and a share of all layers
recomputes, just enough for the fullest share to fit.

A bound on the time of all sets of levels is here too: no caps, context sizes or stages take less.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from omnibal.cost.context import exchange_mistake
from omnibal.cost.model import CostModel, is_attended, pack_features
from omnibal.cost.share_features import part_features
from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.levels import MAX_CONTEXT, ContextExchange, CutRule, Level
from omnibal.model.limits import Caps
from omnibal.model.units import EXCHANGED, unit_names
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_memory import GIB, unit_bytes

_FORMS = (
    (CutRule.WHOLE, ContextExchange.GATHER),
    (CutRule.ZIGZAG, ContextExchange.GATHER),
    (CutRule.WHOLE, ContextExchange.HEADS),
    (CutRule.CONTIGUOUS, ContextExchange.HEADS),
)
"""Cuts and exchanges that are tried. Where heads are exchanged, attention is balanced by itself."""
_LEAST_SHARE_TOKENS = 1_024
"""Least tokens that a rank has of a full pack: smaller shares are not looked at."""
GOOD_SHARE_TOKENS = 4_096
"""Packs are divided into smaller shares only where larger ones do not fit: kernels' fixed times, of
which counted costs have little, are not to outweigh the recomputation that is saved. It is the
smallest share of HBP's table 19."""
_MOST_WORSE = 2
"""Context sizes in a row that may be slower than the best one before larger ones are given up."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholeModel:
    """Time and memory of all units on one share; vectors have one coefficient per feature."""

    cost: CostModel
    pass_ms: np.ndarray
    """Forward and backward without recomputation, [features]."""
    recompute_ms: np.ndarray
    """What recomputing all layers of a kind adds, [layer kinds, features]."""
    kept_bytes: np.ndarray
    """Activations kept where nothing is recomputed, [features]."""
    saved_bytes: np.ndarray
    """What recomputing all layers of a kind saves of them, [layer kinds, features]."""
    working_bytes: np.ndarray
    """Working memory of every moment of every unit, [moments, features]."""
    state_bytes: float
    """Weights, gradients and optimizer state of all stages."""

    @classmethod
    def of(cls, job: JobSpec, cost: CostModel) -> Self:
        """Add up the units of a job's model, at the costs of one level."""
        counts = Counter(unit_names(job.model))
        units = [(counts[name], unit) for name, unit in cost.units.items()]
        layers = [
            (counts[kind.name], cost.units[kind.name]) for kind in cost.kinds if kind.is_layer
        ]
        return cls(
            cost=cost,
            pass_ms=np.sum([n * (u.forward_ms + u.backward_ms) for n, u in units], axis=0),
            recompute_ms=np.stack([n * u.recompute_ms for n, u in layers]),
            kept_bytes=np.sum([n * u.activation_bytes for n, u in units], axis=0),
            saved_bytes=np.stack([n * (u.activation_bytes - u.boundary_bytes) for n, u in layers]),
            working_bytes=np.vstack([u.transient_bytes for _, u in units]),
            state_bytes=sum(n * unit_bytes(cost, u) for n, u in units),
        )

    def recomputed_share(self, features: np.ndarray, job: JobSpec, micro_batches: float) -> float:
        """Share of the layers that must recompute for shares [shares, features] to fit; infinite
        where all do not do."""
        stages = job.parallel.pipeline
        in_flight = min(stages, micro_batches) / stages
        room = job.memory_cap_gib * GIB - self.state_bytes / stages
        working = (features @ self.working_bytes.T).max(axis=1)
        missing = in_flight * features @ self.kept_bytes + working - room
        saved = in_flight * features @ self.saved_bytes.sum(axis=0)
        share = np.divide(missing, saved, out=np.full(len(saved), np.inf), where=saved > 0)
        most = float(np.where(missing <= 0, 0.0, share).max())
        return most if most <= 1 else np.inf


def attention_weights(job: JobSpec) -> dict[str, float]:
    """Time of one squared token relative to that of one, on the whole model, by the name that a
    level has it under: of the language model's tokens, and of an image's."""
    whole = WholeModel.of(job, job.cost)
    each_ms = dict(zip(job.cost.features, whole.pass_ms.tolist(), strict=True))
    attention_ms = sum(time for name, time in each_ms.items() if is_attended(name))
    weights = {"attention_weight": attention_ms / each_ms["tokens"]}
    images = job.model.images
    if images is not None and each_ms[images.feature]:  # of data-parallel encoders, elsewhere
        weights["image_weight"] = each_ms[images.squares] / each_ms[images.feature]
    return weights


def possible_contexts(job: JobSpec, caps: Caps | None = None) -> list[int]:
    """Context sizes that blocks of the job's data-parallel ranks may have: powers of two.

    Args:
        caps: of packs, whose shares are to be no smaller than is of use; None for all sizes.
    """
    ranks, most = job.parallel.data, MAX_CONTEXT
    if caps is not None:
        most = min(most, max(caps["tokens"] // _LEAST_SHARE_TOKENS, 1))
    powers = (1 << power for power in range(ranks.bit_length()))
    return [context for context in powers if context <= most and ranks % context == 0]


def has_good_shares(level: Level) -> bool:
    """Whether a rank's share of a full pack is large enough to be chosen without need."""
    return level.caps["tokens"] >= GOOD_SHARE_TOKENS * level.context


def level_forms(job: JobSpec, caps: Caps, contexts: Sequence[int] | None = None) -> Iterator[Level]:
    """Yield a level of these caps with every context size, cut and exchange that is tried."""
    weights = attention_weights(job)
    for context in possible_contexts(job, caps) if contexts is None else contexts:
        if context == 1:
            yield Level(caps=caps)
            continue
        for cut, exchange in _FORMS:
            level = Level(caps=caps, context=context, cut=cut, exchange=exchange, **weights)
            if exchange_mistake(job.model, job.parallel, level) is None:
                yield level


@dataclass(frozen=True, kw_only=True, slots=True)
class FormEstimate:
    """Estimated time of all packs of a level in one form: context size, cut and exchange."""

    level: Level
    rows_ms: float
    """Time of all rows of packs, one after another on the whole model; infinite where a pack does
    not fit."""
    rows: float
    """Rows of packs: each takes all data-parallel ranks."""


def estimated_form(
    job: JobSpec, level: Level, packs: Packs, lengths: Lengths, tokens_per_step: float
) -> FormEstimate:
    """Estimate the time that packs of one level take.

    Packs of like time form a row, which takes as long as its slowest share.

    Args:
        tokens_per_step: of one rank.
    """
    (cost,) = job.costs_at([level])
    whole = WholeModel.of(job, cost)
    parts = job.with_exposed(part_features(packs, lengths, level, cost.features))
    micro_batches = max(tokens_per_step * level.context / level.caps["tokens"], 1.0)
    again = whole.recomputed_share(parts.reshape(-1, parts.shape[2]), job, micro_batches)
    rows = len(packs) * level.context / job.parallel.data
    if not np.isfinite(again):
        return FormEstimate(level=level, rows_ms=np.inf, rows=rows)
    share_ms = parts @ (whole.pass_ms + again * whole.recompute_ms.sum(axis=0))
    slowest_first = np.sort(share_ms.max(axis=1))[::-1]
    width = job.parallel.data // level.context
    rows_ms = slowest_first[::width]
    return FormEstimate(level=level, rows_ms=float(rows_ms.sum()) * rows / len(rows_ms), rows=rows)


def good_forms(
    job: JobSpec,
    caps: Caps,
    packs: Packs,
    lengths: Lengths,
    tokens_per_step: float,
    contexts: Sequence[int] | None = None,
) -> list[FormEstimate]:
    """Forms of a level that its packs fit, the fastest of each context size, by rising context
    size; none where no form fits.

    Times fall with the context size, as less is recomputed, and then rise, as more is exchanged:
    after two that are slower than the best, or where shares would be small without need, no more
    are looked at.
    """
    found: list[FormEstimate] = []
    worse = 0
    for context in possible_contexts(job, caps) if contexts is None else contexts:
        forms = level_forms(job, caps, [context])
        each = [estimated_form(job, form, packs, lengths, tokens_per_step) for form in forms]
        best = min(each, key=lambda form: form.rows_ms, default=None)
        if best is None or not np.isfinite(best.rows_ms):
            continue
        if found and not has_good_shares(best.level):
            break
        is_worse = bool(found) and best.rows_ms >= min(form.rows_ms for form in found)
        worse = worse + 1 if is_worse else 0
        found.append(best)
        if worse == _MOST_WORSE:
            break
    return found


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
        # The least to exchange one token of a divided sample.
        each_ms = []
        for level in level_forms(job, Caps.of(tokens=1), [context]) if context > 1 else ():
            (cost,) = job.costs_at([level])
            form = WholeModel.of(job, cost)
            each_ms.append(float(form.pass_ms[cost.features.index(EXCHANGED)]))
        exchange_ms = (min(each_ms) if context > 1 else 0.0) * lengths.tokens
        again_ms = _least_recompute_ms(job, whole, features, context)
        added_ms = np.minimum(added_ms, exchange_ms + again_ms)
    return features @ whole.pass_ms + added_ms


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

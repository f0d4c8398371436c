"""Choice of context size, cut and exchange for the packs of a level, by estimated time.

Levels are considered alone, to limit the forms that `omnibal.search.level_sets` simulates. The
model is assumed evenly split over stages without bubble, with the minimal share of recomputed
layers. Also bounds the time of all sets of levels from below.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from omnibal.data.lengths import Lengths
from omnibal.job.job import JobSpec
from omnibal.model.levels import MAX_CONTEXT, ContextExchange, CutRule, Level, exchange_mistake
from omnibal.model.limits import Caps
from omnibal.model.units import EXCHANGED, unit_names
from omnibal.packing.features import is_attended, pack_features, part_features
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_memory import GIB, state_bytes

_FORMS = (
    (CutRule.WHOLE, ContextExchange.GATHER),
    (CutRule.ZIGZAG, ContextExchange.GATHER),
    (CutRule.WHOLE, ContextExchange.HEADS),
    (CutRule.CONTIGUOUS, ContextExchange.HEADS),
)
"""Cuts and exchanges to try. With head exchange attention is balanced anyway."""
_LEAST_SHARE_TOKENS = 1_024  # min tokens per rank of a full pack
GOOD_SHARE_TOKENS = 4_096
"""Min tokens per rank if memory allows: kernels have fixed times. Smallest in HBP's table 19."""
_MOST_WORSE = 2  # consecutive slower context sizes that end the search


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WholeModel:
    """Time and memory of all units for one rank's share of a pack, linear in its features."""

    features: tuple[str, ...]  # of a micro-batch
    pass_ms: np.ndarray  # forward and backward without recomputation, [features]
    recompute_ms: np.ndarray
    """Added time for recomputing all layers of a kind, [layer kinds, features]."""
    kept_bytes: np.ndarray  # activations kept without recomputation, [features]
    saved_bytes: np.ndarray
    """Activations saved by recomputing all layers of a kind, [layer kinds, features]."""
    working_bytes: np.ndarray  # working memory of every moment of every unit, [moments, features]
    state_bytes: float  # weights, gradients and optimizer state of all stages

    @classmethod
    def from_job(cls, job: JobSpec, level: Level | None = None) -> Self:
        """Add up the units of a job's model, without or with a level's context exchanges."""
        cost = job.cost if level is None else job.costs_at([level])[0]
        counts = Counter(unit_names(job.model))
        units = [(counts[name], unit) for name, unit in cost.units.items()]
        layers = [
            (counts[kind.name], cost.units[kind.name]) for kind in cost.kinds if kind.is_layer
        ]
        return cls(
            features=cost.features,
            pass_ms=np.sum([n * (u.forward_ms + u.backward_ms) for n, u in units], axis=0),
            recompute_ms=np.stack([n * u.recompute_ms for n, u in layers]),
            kept_bytes=np.sum([n * u.activation_bytes for n, u in units], axis=0),
            saved_bytes=np.stack([n * (u.activation_bytes - u.boundary_bytes) for n, u in layers]),
            working_bytes=np.vstack([u.transient_bytes for _, u in units]),
            state_bytes=sum(n * float(state_bytes(cost, u).sum()) for n, u in units),
        )

    def recomputed_share(self, features: np.ndarray, job: JobSpec, micro_batches: float) -> float:
        """Fraction of layers to recompute so that all shares [shares, features] fit, else inf."""
        stages = job.parallel.pipeline
        in_flight = min(stages, micro_batches) / stages  # 1F1B, mean over stages
        room = job.memory_cap_gib * GIB - self.state_bytes / stages
        working = (features @ self.working_bytes.T).max(axis=1)
        missing = in_flight * features @ self.kept_bytes + working - room  # [shares]
        saved = in_flight * features @ self.saved_bytes.sum(axis=0)  # [shares]
        share = np.divide(missing, saved, out=np.full(len(saved), np.inf), where=saved > 0)
        most = float(np.where(missing <= 0, 0.0, share).max())
        return most if most <= 1 else np.inf


def possible_contexts(job: JobSpec, caps: Caps | None = None) -> list[int]:
    """Return powers of two that divide DP, with at least _LEAST_SHARE_TOKENS of `caps` per rank."""
    ranks, most = job.parallel.data, MAX_CONTEXT
    if caps is not None:
        most = min(most, max(caps["tokens"] // _LEAST_SHARE_TOKENS, 1))
    powers = (1 << power for power in range(ranks.bit_length()))
    return [context for context in powers if context <= most and ranks % context == 0]


def has_good_shares(level: Level) -> bool:
    """Return whether a full pack has at least GOOD_SHARE_TOKENS tokens per rank."""
    return level.caps["tokens"] >= GOOD_SHARE_TOKENS * level.context


def level_forms(job: JobSpec, caps: Caps, contexts: Sequence[int] | None = None) -> Iterator[Level]:
    """Yield a level of these caps with every context size, cut and exchange to try."""
    # Weights: time per squared text or image token over time per token.
    whole = WholeModel.from_job(job)
    each_ms = dict(zip(job.cost.features, whole.pass_ms.tolist(), strict=True))
    attention_ms = sum(time for name, time in each_ms.items() if is_attended(name))  # per token^2
    weights = {"attention_weight": attention_ms / each_ms["tokens"]}
    images = job.model.images
    if images is not None and each_ms[images.feature]:  # 0 if encoders are data-parallel
        weights["image_weight"] = each_ms[images.squares] / each_ms[images.feature]
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
    """Sequential time of all rows of packs on the whole model. Infinite if a pack does not fit."""
    rows: float
    """Rows of packs. A row occupies all data-parallel ranks."""


def estimated_form(
    job: JobSpec, level: Level, packs: Packs, lengths: Lengths, tokens_per_step: float
) -> FormEstimate:
    """Return the estimated time of all packs of one level.

    Packs with similar times form a row, with the time of its slowest share. `tokens_per_step` are
    per rank.
    """
    whole = WholeModel.from_job(job, level)
    # [packs, ranks, features]
    parts = job.with_exposed(part_features(packs, lengths, level, whole.features))
    micro_batches = max(tokens_per_step * level.context / level.caps["tokens"], 1.0)
    again = whole.recomputed_share(parts.reshape(-1, parts.shape[2]), job, micro_batches)
    rows = len(packs) * level.context / job.parallel.data
    if not np.isfinite(again):
        return FormEstimate(level=level, rows_ms=np.inf, rows=rows)
    share_ms = parts @ (whole.pass_ms + again * whole.recompute_ms.sum(axis=0))  # [packs, ranks]
    slowest_first = np.sort(share_ms.max(axis=1))[::-1]
    width = job.parallel.data // level.context  # packs that run side by side
    rows_ms = slowest_first[::width]  # a row takes its slowest pack's time
    return FormEstimate(level=level, rows_ms=float(rows_ms.sum()) * rows / len(rows_ms), rows=rows)


def good_forms(
    job: JobSpec,
    caps: Caps,
    packs: Packs,
    lengths: Lengths,
    tokens_per_step: float,
    contexts: Sequence[int] | None = None,
) -> list[FormEstimate]:
    """Return the fastest form that fits of each context size, by ascending context size.

    Times first fall with the context size (less recomputation) and then rise (more communication),
    so the search ends after two sizes slower than the best, or at small shares without need.
    """
    found: list[FormEstimate] = []
    worse = 0
    for context in possible_contexts(job, caps) if contexts is None else contexts:
        forms = level_forms(job, caps, [context])
        estimates = [estimated_form(job, form, packs, lengths, tokens_per_step) for form in forms]
        best = min(estimates, key=lambda form: form.rows_ms, default=None)
        if best is None or not np.isfinite(best.rows_ms):
            continue
        if found and not has_good_shares(best.level):
            break
        is_worse = bool(found) and best.rows_ms >= min(form.rows_ms for form in found)
        worse = worse + 1 if is_worse else 0  # consecutive
        found.append(best)
        if worse == _MOST_WORSE:
            break
    return found


_CHUNK = 1 << 17  # samples at a time, to bound memory


def least_ms_per_sample(job: JobSpec, lengths: Lengths) -> float:
    """Return a lower bound on the job's time per sample in ms, with all devices at work.

    Counts each sample's forward and backward, evenly spread over devices. With context size c, it
    adds the minimal exchange and the minimal recomputation to fit this sample alone with one
    micro-batch in flight, for the best c. Ignores overhead of packs, steps and the pipeline.
    """
    total_ms = 0.0
    for first in range(0, len(lengths), _CHUNK):
        some = lengths.take(np.arange(first, min(first + _CHUNK, len(lengths))))
        total_ms += float(_least_ms(job, some).sum())
    devices = job.parallel.data * job.parallel.pipeline
    return total_ms / devices / len(lengths)


def _least_ms(job: JobSpec, lengths: Lengths) -> np.ndarray:
    """Lower bounds on samples' times in ms, summed over PP and DP ranks, [samples]."""
    whole = WholeModel.from_job(job)
    alone = Packs(samples=np.arange(len(lengths)), offsets=np.arange(len(lengths) + 1))
    features = pack_features(alone, lengths, job.cost.features)
    # Samples of a pack share its fixed costs, so a bound per sample has none.
    features[:, 0] = 0
    room = job.parallel.pipeline * job.memory_cap_gib * GIB - whole.state_bytes  # of all stages
    saved, layers_ms = features @ whole.saved_bytes.T, features @ whole.recompute_ms.T
    per_ms = np.divide(saved, layers_ms, out=np.zeros_like(saved), where=layers_ms > 0).max(axis=1)
    added_ms = np.full(len(lengths), np.inf)
    for context in possible_contexts(job):
        # Min time to exchange one token of a divided sample.
        each_ms = []
        for level in level_forms(job, Caps.of(tokens=1), [context]) if context > 1 else ():
            form = WholeModel.from_job(job, level)
            each_ms.append(float(form.pass_ms[form.features.index(EXCHANGED)]))
        exchange_ms = (min(each_ms) if context > 1 else 0.0) * lengths.tokens
        # All stages together hold a sample's activations at least once. Missing memory is freed by
        # the layers with the best ratio of memory to time.
        missing = features @ whole.kept_bytes / context - room
        missing_ms = context * np.divide(
            missing, per_ms, out=np.full(len(missing), np.inf), where=per_ms > 0
        )
        fits = missing <= saved.sum(axis=1) / context  # with all layers recomputed
        again_ms = np.where(missing <= 0, 0.0, np.where(fits, missing_ms, np.inf))
        added_ms = np.minimum(added_ms, exchange_ms + again_ms)
    return features @ whole.pass_ms + added_ms

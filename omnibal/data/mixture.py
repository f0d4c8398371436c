"""Mixtures of sources, by weight or epochs.

    samples = 1_000_000      # of the whole mixture (default: all of the weighted sources)
    most_epochs = 4          # max epochs of a weighted source

    [sources.ocr]
    weight = 2               # share of the samples left by sources with epochs

    [sources.books]
    epochs = 1.5             # every sample once, and a random half twice

Weights count samples, as in Energon's `blend` and Megatron's `--data-path`; `epochs` is Energon's
repetitions in `blend_epochized`. Repeated samples have repeated rows, spread over the run.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from omnibal.base.errors import UserError
from omnibal.base.files import read_toml_model
from omnibal.base.frozen import Count, Frozen
from omnibal.data.lengths import Lengths
from omnibal.model.limits import words

_Times = Annotated[float, Field(gt=0, allow_inf_nan=False, le=1e6)]


class SourceRule(Frozen):
    """Weight or epochs of a source."""

    weight: _Times | None = None
    # Passes over the source, 0 to drop it.
    epochs: Annotated[float, Field(ge=0, allow_inf_nan=False, le=1e6)] | None = None

    @model_validator(mode="after")
    def _check_rule(self) -> "SourceRule":
        if (self.weight is None) == (self.epochs is None):
            raise ValueError("a source has either a weight or epochs")
        return self


class Mixture(Frozen):
    samples: Count | None = None
    most_epochs: _Times | None = None  # max passes; other weighted sources get the excess
    sources: dict[str, SourceRule]


def read_mixture(path: Path) -> Mixture:
    remedy = "a mixture has a table [sources.NAME] a source, with weight or epochs"
    return read_toml_model(Mixture, path, remedy)


def samples_of_sources(mixture: Mixture, names: Sequence[str], available: np.ndarray) -> np.ndarray:
    """Return samples drawn per source, int64 [sources], of `available` ones; raises UserError."""
    missing = [name for name in names if name not in mixture.sources]
    unknown = [name for name in mixture.sources if name not in names]
    if missing or unknown:
        problem, wrong = ("no rule for", missing) if missing else ("a rule for", unknown)
        raise UserError(
            f"the mixture has {problem} {', '.join(wrong[:5])}; it must name every source of the "
            f"lengths, which are {', '.join(names[:20])}: epochs = 0 leaves one out"
        )
    rules = [mixture.sources[name] for name in names]
    seen = np.rint(np.array([rule.epochs or 0.0 for rule in rules]) * available)
    weight = np.array([rule.weight or 0.0 for rule in rules])
    weighted = (weight > 0) & (available > 0)
    left = float(available[weighted].sum())
    if mixture.samples is not None:
        left = mixture.samples - seen.sum()
        if left < 0 or (left > 0 and not weighted.any()):
            raise UserError(
                f"the mixture has {mixture.samples:,} samples, and sources with epochs alone "
                f"{int(seen.sum()):,}; leave samples out, or give weights and fewer epochs"
            )
    if weighted.any():
        seen[weighted] = split_by_weight(
            left, weight[weighted], _max_samples(mixture, available[weighted])
        )
    if not seen.any():
        raise UserError("the mixture has no sample; give a source a weight, or epochs above 0")
    return seen.astype(np.int64)


def _max_samples(mixture: Mixture, available: np.ndarray) -> np.ndarray:
    """Return max samples per source by `most_epochs`, whole numbers, infinite if unlimited."""
    max_epochs = math.inf if mixture.most_epochs is None else mixture.most_epochs
    return np.floor(max_epochs * available + 1e-9)  # 0.29 x 100 is 28.999...


def shortfalls(mixture: Mixture, names: Sequence[str], available: np.ndarray) -> list[str]:
    """Return notes on how the samples deviate from the mixture's weights and number."""
    seen, max_epochs = samples_of_sources(mixture, names, available), mixture.most_epochs
    rules, notes = [mixture.sources[name] for name in names], []
    if max_epochs is not None:
        full = np.flatnonzero(seen == _max_samples(mixture, available)).tolist()
        limited = [names[i] for i in full if rules[i].weight is not None]
        if limited:
            limit = f"most_epochs = {max_epochs:g}"
            notes.append(f"{limit} limits {words(limited)}, whatever the weights are")
    if mixture.samples is not None and seen.sum() < mixture.samples:
        notes.append(f"samples are {seen.sum():,}, not {mixture.samples:,}, by most_epochs")
    empty = np.flatnonzero(seen == 0).tolist()
    unseen = [names[i] for i in empty if rules[i].weight or rules[i].epochs]
    if unseen:
        notes.append(f"no sample of {words(unseen)} is seen: of so few, the share is less than one")
    return notes


def split_by_weight(samples: float, weight: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return samples per source by weight, at most `most`, as whole numbers, [sources]."""
    # Sources above their limit are fixed there, and the others share the remainder again.
    share, free = np.zeros(len(weight)), np.ones(len(weight), bool)
    while free.any():
        left = samples - share[~free].sum()
        share[free] = left * weight[free] / weight[free].sum()
        over = free & (share > most)
        if not over.any():
            break
        share[over] = most[over]
        free &= ~over
    whole = np.floor(share + 1e-9)
    # Give the rounding remainder to the largest fractions.
    largest = np.argsort(whole - share, kind="stable")[: round(share.sum() - whole.sum())]
    whole[largest] += 1
    return whole


def mix_samples(lengths: Lengths, mixture: Mixture, seed: int) -> Lengths:
    """Return the mixture's samples in dataset order, with repeats; partial epochs are random."""
    sources = len(lengths.source_names)
    available = np.bincount(lengths.source, minlength=sources)
    seen = samples_of_sources(mixture, lengths.source_names, available)
    copies = np.zeros(len(lengths), np.int64)
    for source, (wanted, samples) in enumerate(zip(seen.tolist(), available.tolist(), strict=True)):
        if not samples:
            continue
        rows = np.flatnonzero(lengths.source == source)
        copies[rows] = wanted // samples
        rng = np.random.default_rng([seed, source])
        copies[rng.permutation(rows)[: wanted % samples]] += 1
    rows = np.repeat(np.arange(len(lengths)), copies)
    return replace(lengths.take(rows), repeats=bool((copies > 1).any()))

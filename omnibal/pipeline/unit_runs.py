"""The model as an ordered list of units, and stages as cuts in it.

A cut at position c is between units c - 1 and c. Counts are int64 [kinds], in the order of
`omnibal.model.units.unit_kinds`.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise

import numpy as np

from omnibal.base.errors import UserError
from omnibal.model.config import ModelConfig
from omnibal.model.units import HEAD, LANGUAGE_EMBED, UnitKind, unit_kinds, unit_names
from omnibal.pipeline.stage_units import Span, Stage, merge_spans


def layer_kinds(kinds: Sequence[UnitKind]) -> list[int]:
    """Return the indices of the kinds that are layers."""
    return [index for index, kind in enumerate(kinds) if kind.is_layer]


def unit_spans(model: ModelConfig) -> tuple[Span, ...]:
    """Return every unit of the model as stages name it, in model order."""
    kinds = {kind.name: kind for kind in unit_kinds(model)}
    numbers: defaultdict[str, count[int]] = defaultdict(count)  # next layer of every tower
    spans = []
    for name in unit_names(model):
        kind = kinds[name]
        if kind.is_layer:
            layer = next(numbers[kind.tower])
            spans.append(Span(kind.tower, range(layer, layer + 1)))
        else:
            spans.append(Span(kind.plan_name))
    return tuple(spans)


def unit_counts(kinds: Sequence[UnitKind], spans: Sequence[Span]) -> np.ndarray:
    """Return the number of units of each kind in a stage's units or recomputed layers. [kinds]"""
    names = stage_units(kinds, spans)
    return np.array([names.count(kind.name) for kind in kinds], np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRun:
    """Consecutive units of one kind, recomputed at the same levels."""

    kind: int
    number: int
    recomputed: tuple[bool, ...]  # whether recomputed at each level
    is_inside: bool = False  # whether the unit before, maybe on another stage, is of this kind


def unit_runs(kinds: Sequence[UnitKind], stage_at: Sequence[Stage]) -> tuple[UnitRun, ...]:
    """Return a stage's runs of equal units in model order. `stage_at` has the stage by level."""
    names = [kind.name for kind in kinds]
    again = [{unit for span in stage.recompute for unit in span.units} for stage in stage_at]
    units = [unit for span in stage_at[0].units for unit in span.units]

    def kind_and_recompute(unit: Span) -> tuple[int, tuple[bool, ...]]:
        return names.index(_kind_of(kinds, unit).name), tuple(unit in units for units in again)

    runs = []
    for (kind, recomputed), equal in groupby(units, kind_and_recompute):
        first, *others = equal
        before = first.layers.start - 1 if first.layers else -1
        runs.append(
            UnitRun(
                kind=kind,
                number=1 + len(others),
                recomputed=recomputed,
                is_inside=before >= 0 and kinds[kind].has_layer(before),
            )
        )
    return tuple(runs)


def counts_of_runs(kinds: int, runs: Sequence[UnitRun]) -> tuple[np.ndarray, np.ndarray]:
    """Return unit counts [kinds] and recomputed counts [levels * kinds] of a stage's runs."""
    counts = np.zeros(kinds, np.int64)
    recomputed = np.zeros((len(runs[0].recomputed), kinds), np.int64)
    for run in runs:
        counts[run.kind] += run.number
        recomputed[:, run.kind] += run.number * np.array(run.recomputed)
    return counts, recomputed.ravel()


def stage_units(kinds: Sequence[UnitKind], spans: Sequence[Span]) -> tuple[str, ...]:
    """Return the kind name of every unit, in the order of `spans`."""
    return tuple(_kind_of(kinds, unit).name for span in spans for unit in span.units)


def _kind_of(kinds: Sequence[UnitKind], unit: Span) -> UnitKind:
    if unit.layers is None:
        return next(kind for kind in kinds if kind.plan_name == unit.name)
    (layer,) = unit.layers
    return next(kind for kind in kinds if kind.tower == unit.name and kind.has_layer(layer))


def count_ends(kinds: Sequence[UnitKind], counts: np.ndarray) -> np.ndarray:
    """Return how many of language embed and head stages [..., kinds] hold: 0 to 2. [...]"""
    names = [kind.name for kind in kinds]
    return (counts[..., [names.index(LANGUAGE_EMBED), names.index(HEAD)]] > 0).sum(axis=-1)


def stages_from_cuts(
    model: ModelConfig, cuts: Sequence[int], recomputed: Sequence[Sequence[int]] | None = None
) -> tuple[Stage, ...]:
    """Return the stages between strictly increasing cuts.

    `recomputed` has each stage's recompute counts per layer kind. Its earliest layers of a kind are
    recomputed, so that equal searches give equal plans.
    """
    units, names = unit_spans(model), unit_names(model)
    layers = [kind.name for kind in unit_kinds(model) if kind.is_layer]
    edges = (0, *cuts, len(units))
    recomputed = recomputed or [[0] * len(layers)] * (len(edges) - 1)
    stages = []
    for (start, end), counts in zip(pairwise(edges), recomputed, strict=True):
        left = dict(zip(layers, counts, strict=True))
        again = []
        for unit, name in zip(units[start:end], names[start:end], strict=True):
            if left.get(name, 0) > 0:
                left[name] -= 1
                again.append(unit)
        stages.append(Stage(units=merge_spans(units[start:end]), recompute=merge_spans(again)))
    return tuple(stages)


def encoders_stage(model: ModelConfig) -> Stage:
    """Return all units of a model's encoders as a stage."""
    units = len(unit_spans(model)) - len(unit_spans(model.without_encoders()))
    return stages_from_cuts(model, (units,))[0]


def check_stages(model: ModelConfig, stages: Sequence[Stage]) -> None:
    """Raise UserError unless stages hold all units in order and recompute their own layers."""
    position, units = 0, unit_spans(model)
    for index, stage in enumerate(stages):
        held = tuple(unit for span in stage.units for unit in span.units)
        if not held or held != units[position : position + len(held)]:
            raise UserError(
                f"stage {index} holds {_format_units(held) or 'nothing'}, but after the stages "
                f"before it {model.name} has {_format_units(units[position:]) or 'nothing'}; "
                "stages must hold all units in model order: correct the stages' units in "
                "plan.json, or plan again"
            )
        layers = [unit for unit in held if unit.layers]
        again = [unit for span in stage.recompute for unit in span.units]
        if len(set(again)) != len(again) or not set(again) <= set(layers):
            raise UserError(
                f"stage {index} recomputes {_format_units(stage.recompute)} but holds "
                f"{_format_units(layers) or 'no layer'}; recompute must name layers of the stage, "
                "each once: correct it in plan.json"
            )
        position += len(held)
    if position != len(units):
        raise UserError(
            f"the {len(stages)} stages end before {_format_units(units[position:])} of the model "
            f"{model.name}; together they must hold all of it: add the missing units to the last "
            "stage, or plan again"
        )


def _format_units(units: Sequence[Span]) -> str:
    return ", ".join(map(str, merge_spans(units)))

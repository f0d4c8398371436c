"""The model as one ordered list of units, and pipeline stages as cuts in that list.

    vision_embed, vision_layer * Lv, projector, language_embed, language_layer * Ll, head

A cut at position c lies between units c - 1 and c. Counts are int64 vectors [kinds], in the order
of `UNITS`.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from omnibal.config import ModelConfig
from omnibal.cost.model import Unit
from omnibal.errors import UserError
from omnibal.pipeline.stage import Span, Stage, joined
from omnibal.units import HEAD as HEAD_NAME
from omnibal.units import LANGUAGE, projector_name, unit_kinds, unit_names

UNITS = tuple(Unit)
VISION_LAYER = UNITS.index(Unit.VISION_LAYER)
LANGUAGE_EMBED = UNITS.index(Unit.LANGUAGE_EMBED)
LANGUAGE_LAYER = UNITS.index(Unit.LANGUAGE_LAYER)
HEAD = UNITS.index(Unit.HEAD)


def unit_sequence(model: ModelConfig) -> tuple[Unit, ...]:
    """List every unit of the model, in order."""
    counts = (1, model.vision.layers, 1, 1, model.language.layers, 1)
    return tuple(unit for unit, count in zip(UNITS, counts, strict=True) for _ in range(count))


def unit_counts(stage: Stage) -> np.ndarray:
    """Number of units of each kind that the stage holds. [kinds]"""
    return np.array(
        [
            stage.holds("vision embed"),
            len(stage.layers("vision")),
            stage.holds("projector"),
            stage.holds("language embed"),
            len(stage.layers("language")),
            stage.holds("head"),
        ],
        np.int64,
    )


def holds_both_ends(counts: np.ndarray) -> np.ndarray:
    """Whether stages of unit counts [..., kinds] hold both language embed and head. [...]"""
    return (counts[..., LANGUAGE_EMBED] > 0) & (counts[..., HEAD] > 0)


def holds_one_end(counts: np.ndarray) -> np.ndarray:
    """Whether stages of unit counts [..., kinds] hold one of language embed and head. [...]"""
    return (counts[..., LANGUAGE_EMBED] > 0) != (counts[..., HEAD] > 0)


def recomputed_counts(stage: Stage) -> np.ndarray:
    """Number of units of each kind that the stage recomputes. [kinds]"""
    counts = np.zeros(len(UNITS), np.int64)
    counts[VISION_LAYER] = len(stage.recomputed("vision"))
    counts[LANGUAGE_LAYER] = len(stage.recomputed("language"))
    return counts


def stage_units(stage: Stage) -> tuple[Unit, ...]:
    """The stage's units, in model order."""
    counts = unit_counts(stage)
    return tuple(unit for unit, count in zip(UNITS, counts, strict=True) for _ in range(count))


def unit_words(model: ModelConfig) -> tuple[Span, ...]:
    """Every unit of the model as stages name it, in model order."""
    words: list[Span] = []
    for name, tower in model.encoders.items():
        projector = projector_name(model, name).replace("_projector", " projector")
        words += [Span(f"{name} embed"), *Span(name, range(tower.layers)).units, Span(projector)]
    language = Span(LANGUAGE, range(model.language.layers)).units
    return (*words, Span(f"{LANGUAGE} embed"), *language, Span(HEAD_NAME))


def stages_from_cuts(
    model: ModelConfig,
    cuts: Sequence[int],
    recomputed: Sequence[Sequence[int]] | None = None,
) -> tuple[Stage, ...]:
    """Stages between the cuts; cuts must rise strictly within the model.

    `recomputed` gives each stage's number of recomputed layers of every kind of layer of the model;
    they are the earliest of the stage, so that equal searches give equal plans.
    """
    words, names = unit_words(model), unit_names(model)
    layer_kinds = [kind.name for kind in unit_kinds(model) if kind.is_layer]
    edges = (0, *cuts, len(words))
    recomputed = recomputed or [[0] * len(layer_kinds)] * (len(edges) - 1)
    stages = []
    for (start, end), counts in zip(pairwise(edges), recomputed, strict=True):
        left = dict(zip(layer_kinds, counts, strict=True))
        again = []
        for word, name in zip(words[start:end], names[start:end], strict=True):
            if left.get(name, 0) > 0:
                left[name] -= 1
                again.append(word)
        stages.append(Stage(units=joined(words[start:end]), recompute=joined(again)))
    return tuple(stages)


def check_stages(model: ModelConfig, stages: Sequence[Stage]) -> None:
    """Refuse stages that are not the model, cut into runs.

    Raises:
        UserError: a stage is empty, the stages' units are not the model's in order, or a stage
            recomputes a layer that it does not hold.
    """
    position, words = 0, unit_words(model)
    for index, stage in enumerate(stages):
        if not stage.units:
            raise UserError(
                f"stage {index} of {len(stages)} is empty; every stage must hold at least one "
                "unit: move a layer to it or plan fewer pipeline stages"
            )
        held = [unit for span in stage.units for unit in span.units]
        unknown = [unit for unit in held if unit not in words]
        if unknown:
            raise UserError(
                f"stage {index} holds {unknown[0]}, which {model.name} does not have; its units "
                f"are {_listed(words)}: correct the stages' units in plan.json, or plan anew"
            )
        expected = words[position : position + len(held)]
        if tuple(held) != expected:
            raise UserError(
                f"stage {index} holds {_listed(held)}, but after the stages before it "
                f"{model.name} has {_listed(words[position:]) or 'nothing'}; stages must hold all "
                "units in model order: correct the stages' units in plan.json, or plan anew"
            )
        _check_recomputed(index, stage)
        position += len(held)
    if position != len(words):
        raise UserError(
            f"the {len(stages)} stages end before {_listed(words[position:])} of the model "
            f"{model.name}; together they must hold all of it: add the rest to the last stage, "
            "or plan anew"
        )


def _check_recomputed(index: int, stage: Stage) -> None:
    held = {unit for span in stage.units if span.layers for unit in span.units}
    again = [unit for span in stage.recompute for unit in span.units]
    if len(set(again)) != len(again) or not held.issuperset(again):
        layers = _listed([span for span in stage.units if span.layers]) or "no layer"
        raise UserError(
            f"stage {index} recomputes {_listed(stage.recompute)} but holds {layers}; recompute "
            "must name layers of the stage, each once: correct it in plan.json"
        )


def _listed(units: Sequence[Span]) -> str:
    return ", ".join(map(str, joined(units)))

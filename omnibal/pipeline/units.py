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
from omnibal.pipeline.stage import Stage

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
            stage.vision_embed,
            stage.vision_layers,
            stage.projector,
            stage.language_embed,
            stage.language_layers,
            stage.head,
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
    counts[VISION_LAYER] = len(stage.recompute_vision)
    counts[LANGUAGE_LAYER] = len(stage.recompute_language)
    return counts


def stage_units(stage: Stage) -> tuple[Unit, ...]:
    """The stage's units, in model order."""
    counts = unit_counts(stage)
    return tuple(unit for unit, count in zip(UNITS, counts, strict=True) for _ in range(count))


def stages_from_cuts(
    model: ModelConfig,
    cuts: Sequence[int],
    recomputed: Sequence[tuple[int, int]] | None = None,
) -> tuple[Stage, ...]:
    """Stages between the cuts; cuts must rise strictly within the model.

    `recomputed` gives each stage's number of recomputed (vision, language) layers; they are the
    earliest of the stage, so that equal searches give equal plans.
    """
    sequence = unit_sequence(model)
    edges = (0, *cuts, len(sequence))
    recomputed = recomputed or [(0, 0)] * (len(edges) - 1)
    stages, vision_start, language_start = [], 0, 0
    for (start, end), (vision, language) in zip(pairwise(edges), recomputed, strict=True):
        held = sequence[start:end]
        stages.append(
            Stage(
                vision_embed=Unit.VISION_EMBED in held,
                vision_layers=held.count(Unit.VISION_LAYER),
                projector=Unit.PROJECTOR in held,
                language_embed=Unit.LANGUAGE_EMBED in held,
                language_layers=held.count(Unit.LANGUAGE_LAYER),
                head=Unit.HEAD in held,
                recompute_vision=tuple(range(vision_start, vision_start + vision)),
                recompute_language=tuple(range(language_start, language_start + language)),
            )
        )
        vision_start += stages[-1].vision_layers
        language_start += stages[-1].language_layers
    return tuple(stages)


def check_stages(model: ModelConfig, stages: Sequence[Stage]) -> None:
    """Refuse stages that are not the model, cut into runs.

    Raises:
        UserError: a stage is empty, the stages' units are not the model's in order, or a stage
            recomputes a layer that it does not hold.
    """
    position = vision_start = language_start = 0
    sequence = unit_sequence(model)
    for index, stage in enumerate(stages):
        held = stage_units(stage)
        if not held:
            raise UserError(
                f"stage {index} of {len(stages)} is empty; every stage must hold at least one "
                "unit: move a layer to it or plan fewer pipeline stages"
            )
        expected = sequence[position : position + len(held)]
        if held != expected:
            raise UserError(
                f"stage {index} holds {_summary(held)}, but from unit {position} on the model "
                f"{model.name} has {_summary(expected) or 'nothing'}; stages must hold all units "
                "in model order: correct the stages' counts in plan.json, or plan anew"
            )
        _check_recomputed(
            index, "vision", stage.recompute_vision, vision_start, stage.vision_layers
        )
        _check_recomputed(
            index, "language", stage.recompute_language, language_start, stage.language_layers
        )
        position += len(held)
        vision_start += stage.vision_layers
        language_start += stage.language_layers
    if position != len(sequence):
        raise UserError(
            f"the {len(stages)} stages end before {_summary(sequence[position:])} of the model "
            f"{model.name}; together they must hold all of it: add the rest to the last stage, "
            "or plan anew"
        )


def _check_recomputed(
    index: int, tower: str, recomputed: Sequence[int], start: int, count: int
) -> None:
    outside = [layer for layer in recomputed if not start <= layer < start + count]
    if outside or len(set(recomputed)) != len(recomputed):
        holds = f"{tower} layers {start} to {start + count - 1}" if count else f"no {tower} layer"
        raise UserError(
            f"stage {index} recomputes {tower} layers {list(recomputed)} but holds {holds}; "
            f"recompute_{tower} must name layers of the stage, each once: correct it in plan.json"
        )


def _summary(units: Sequence[Unit]) -> str:
    return ", ".join(f"{units.count(unit)} {unit}" for unit in UNITS if unit in units)

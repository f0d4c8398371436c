"""Limits of a trainer on the units that a pipeline stage may hold."""

import numpy as np

from omnibal.base.errors import UserError
from omnibal.model.config import ModelConfig
from omnibal.model.limits import words
from omnibal.model.targets import StageRules
from omnibal.model.units import LANGUAGE_EMBED, unit_names


def allowed_runs(
    model: ModelConfig, rules: StageRules, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Return whether runs of units may be stages (the first, if `start` is 0), given the positions
    of their first unit and after their last unit, [runs]. bool [runs]"""
    units = len(unit_names(model))
    embed = unit_names(model).index(LANGUAGE_EMBED)
    allowed = np.ones(len(start), bool)
    if rules.encoders_on_first:
        allowed &= (end > embed) & ((start == 0) | (start > embed))
    if rules.language_everywhere:
        # Layers are between the language embed and the head, the last unit.
        allowed &= (end > embed + 1) & (start < units - 1)
    return allowed


def check_stage_rules(model: ModelConfig, stages: int, rules: StageRules) -> None:
    """Raise UserError if there are more stages than the rules allow."""
    language = model.language.layers
    if rules.language_everywhere:
        limit, why = language, "every stage must hold a layer of the language model"
    elif rules.encoders_on_first:
        limit = language + any(encoder.layers for encoder in model.encoders.values())
        why = "the first stage must hold all encoders, and every stage a layer"
    else:
        return
    if stages > limit:
        raise UserError(
            f"pipeline size {stages} was given for {model.name}, whose language model has "
            f"{language} layers; {why}: choose a pipeline size of at most {limit}"
        )


def limits_in_words(rules: StageRules, model: ModelConfig, stages: int) -> str:
    """Return the stage limits in words for a memory error, such as ", with all encoders on the
    first stage,", or "" if none apply. Limits of recomputation are left out."""
    limits = []
    if rules.encoders_on_first and model.encoders and stages > 1:
        limits.append("all encoders on the first stage")
    if rules.encoders_whole and model.encoders:
        limits.append("encoders whole on every tensor-parallel rank")
    if rules.language_everywhere and stages > 1:
        limits.append("a layer of the language model on every stage")
    return f", with {words(limits)}," if limits else ""

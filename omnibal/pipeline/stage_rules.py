"""What a trainer's rules leave of the ways to cut a model into stages."""

import numpy as np

from omnibal.config import ModelConfig
from omnibal.errors import UserError
from omnibal.targets import RecomputeFreedom, StageRules
from omnibal.units import LANGUAGE_EMBED, unit_names


def allowed_runs(
    model: ModelConfig, rules: StageRules, start: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Whether runs of units may be stages; a run that starts at 0 is the first. bool [runs]

    Args:
        start: position of the first unit, [runs].
        end: position after the last unit, [runs].
    """
    units = len(unit_names(model))
    embed = unit_names(model).index(LANGUAGE_EMBED)
    allowed = np.ones(len(start), bool)
    if rules.encoders_on_first:
        allowed &= (end > embed) & ((start == 0) | (start > embed))
    if rules.language_everywhere:
        # Between the language embed and the head, which is the last unit, are its layers.
        allowed &= (end > embed + 1) & (start < units - 1)
    return allowed


def check_stage_rules(model: ModelConfig, stages: int, rules: StageRules) -> None:
    """Refuse more stages than the rules allow.

    Raises:
        UserError: with the rule.
    """
    language = model.language.layers
    if rules.language_everywhere:
        most, why = language, "every stage must hold a layer of the language model"
    elif rules.encoders_on_first:
        most = language + any(encoder.layers for encoder in model.encoders.values())
        why = "the first stage must hold all encoders, and every stage a layer"
    else:
        return
    if stages > most:
        raise UserError(
            f"pipeline size {stages} was given for {model.name}, whose language model has "
            f"{language} layers; {why}: choose a pipeline size of at most {most}"
        )


def limits_in_words(rules: StageRules) -> str:
    """Limits of the search for stages, for a message, such as " with all encoders on the first
    stage"; empty where there are none."""
    limits = []
    if rules.encoders_on_first:
        limits.append("all encoders on the first stage")
    if rules.language_everywhere:
        limits.append("a layer of the language model on every stage")
    if rules.recompute is not RecomputeFreedom.LAYERS:
        limits.append(_FREEDOMS[rules.recompute])
    return f" with {', '.join(limits)}" if limits else ""


_FREEDOMS = {
    RecomputeFreedom.STAGES: "one number of recomputed layers a stage",
    RecomputeFreedom.TOWERS: "one number of recomputed layers a tower",
    RecomputeFreedom.LANGUAGE: "one number of recomputed layers for all stages",
    RecomputeFreedom.ALL: "all layers of a tower recomputed or none",
}

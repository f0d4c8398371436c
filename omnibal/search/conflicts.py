"""Conflicts between features of a plan, for the command line, `Goal` and docs/planning.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from omnibal.base.errors import UserError
from omnibal.model.limits import words


class Feature(StrEnum):
    """Features that may conflict, with their options. Conflicts are reported in this order."""

    EARLIER = "--steps-of"
    TRAINER = "--for"
    WINDOW = "--window"
    SIZES = "--gpus"
    LEVELS = "--packing-levels"
    CURRICULUM = "--curriculum-steps"
    ENCODERS = "--encoder data-parallel"
    SCHEDULE = "--schedule"
    SPLIT = "--method or --recompute"
    SAMPLES_PER_STEP = "--samples-per-step"
    MICRO_BATCHES = "--micro-batches"
    SAMPLES = "--lengths"
    MIXTURE = "--mixture"
    PACKING = "--packing"
    SEED = "--seed"
    EPOCHS = "--epochs"
    LIMITS = "--max-tokens or --limit"
    IMAGE_SHARE = "--image-share"
    DISPATCH = "--dispatch"
    COMPARE = "--compare"


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two features that exclude each other."""

    one: Feature
    other: Feature
    why: str


_SEVERAL_LEVELS = "other trainers have one context-parallel size"
_TAKEN = "it is taken from the earlier plan"
_OF_WINDOW = "a window is a step, and its packs are balanced inside it"
CONFLICTS = (
    Conflict(
        Feature.SIZES,
        Feature.MICRO_BATCHES,
        "sizes are compared in steps of equally many samples: give --samples-per-step",
    ),
    Conflict(
        Feature.SAMPLES_PER_STEP, Feature.MICRO_BATCHES, "both say how large a step is: give one"
    ),
    Conflict(
        Feature.LEVELS,
        Feature.SPLIT,
        "only the joint search recomputes layers by level",
    ),
    Conflict(
        Feature.ENCODERS,
        Feature.SPLIT,
        "only the joint search shares memory between encoders and stages",
    ),
    Conflict(
        Feature.SCHEDULE,
        Feature.SPLIT,
        "only the joint search cuts a model for another schedule than 1f1b",
    ),
    Conflict(Feature.WINDOW, Feature.LEVELS, "packs of a window are of one level"),
    Conflict(Feature.WINDOW, Feature.CURRICULUM, _OF_WINDOW),
    Conflict(Feature.WINDOW, Feature.PACKING, _OF_WINDOW),
    Conflict(
        Feature.MIXTURE,
        Feature.EPOCHS,
        "the mixture sets the epochs of every source",
    ),
    Conflict(Feature.WINDOW, Feature.MIXTURE, "samples stay in their order"),
    Conflict(Feature.WINDOW, Feature.SEED, "samples stay in their order"),
    Conflict(Feature.WINDOW, Feature.MICRO_BATCHES, _OF_WINDOW),
    Conflict(Feature.WINDOW, Feature.SAMPLES_PER_STEP, _OF_WINDOW),
    *(
        Conflict(Feature.EARLIER, other, _TAKEN)
        for other in (
            Feature.SAMPLES,
            Feature.WINDOW,
            Feature.LIMITS,
            Feature.MICRO_BATCHES,
            Feature.SAMPLES_PER_STEP,
            Feature.LEVELS,
            Feature.CURRICULUM,
            Feature.PACKING,
            Feature.SEED,
            Feature.EPOCHS,
            Feature.IMAGE_SHARE,
            Feature.DISPATCH,
            Feature.MIXTURE,
        )
    ),
    *(
        Conflict(Feature.TRAINER, other, why)
        for other, why in (
            (Feature.WINDOW, "only this project's trainer keeps the order of a stream"),
            (Feature.LEVELS, _SEVERAL_LEVELS),
            (Feature.CURRICULUM, _SEVERAL_LEVELS),
            (Feature.ENCODERS, "only this project's trainer has data-parallel encoders"),
            (Feature.SPLIT, "only the joint search keeps to another trainer's limits"),
            (Feature.EARLIER, "the other trainer forms its own packs"),
        )
    ),
)
"""All rejected pairs. Every other combination is allowed."""


def check_together(given: Mapping[Feature, str]) -> None:
    """Raise UserError if features conflict. `given` has their options as the user wrote them."""
    for one in Feature:
        against = [
            conflict for conflict in CONFLICTS if conflict.one is one and conflict.other in given
        ]
        if one in given and against:
            others = words([given[conflict.other] for conflict in against])
            whys = dict.fromkeys(conflict.why for conflict in against)
            raise UserError(
                f"{others} cannot be given with {given[one]}: {'; '.join(whys)}; drop "
                f"{'one of both' if len(against) == 1 else f'{given[one]} or the others'}"
            )


NEEDS = (
    (Feature.WINDOW, Feature.SAMPLES, "a window is of samples"),
    (Feature.DISPATCH, Feature.WINDOW, "only a window deals samples as they are read"),
    (Feature.COMPARE, Feature.TRAINER, "it lifts another trainer's limits"),
    (Feature.MIXTURE, Feature.SAMPLES, "it is of samples by their source"),
    (Feature.LEVELS, Feature.SAMPLES, "levels are of samples"),
    (Feature.CURRICULUM, Feature.SAMPLES, "levels are of samples"),
)
"""Features that require another feature, with the reason."""


def check_complete(given: Mapping[Feature, str]) -> None:
    """Raise UserError if a given feature lacks its required one. Arguments as `check_together`."""
    for one, needed, why in NEEDS:
        if one in given and needed not in given:
            raise UserError(
                f"{given[one]} was given without {needed}: {why}; give {needed}, or leave "
                f"{given[one]} out"
            )

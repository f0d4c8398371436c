"""How many layers stages recompute, as the numbers that other trainers take.

Such a number recomputes so many of the first layers that a stage holds, of several chunks each of
them, or all where it holds fewer: Megatron's method `block`.
"""

from collections.abc import Sequence

from omnibal.pipeline.stage import Stage


def first_layers(stage: Stage, tower: str) -> int | None:
    """Number of recomputed layers of a tower in a stage; None if they are not the first."""
    again = sorted(stage.recomputed(tower))
    return len(again) if again == list(stage.layers(tower)[: len(again)]) else None


def one_number(stages: Sequence[Stage], tower: str) -> int | None:
    """The number by which all stages recompute a tower's layers; None where none says so."""
    counts = [first_layers(stage, tower) for stage in stages]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    number = max(known)
    held = [min(number, len(stage.layers(tower))) for stage in stages]
    return number if held == known else None


def all_or_none(stages: Sequence[Stage], tower: str) -> bool | None:
    """Whether all of a tower's layers are recomputed, or none; None where some are."""
    held = sum(len(stage.layers(tower)) for stage in stages)
    again = sum(len(stage.recomputed(tower)) for stage in stages)
    return again > 0 if again in (0, held) else None

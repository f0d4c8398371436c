"""Recomputed layers as numbers for Megatron's `block`: the first `n` of each stage or chunk."""

from collections.abc import Sequence

from omnibal.pipeline.stage import Stage


def first_layers(stage: Stage, tower: str) -> int | None:
    """Return the recomputed layers of a tower in a stage, or None if not its first layers."""
    again = sorted(stage.recomputed(tower))
    return len(again) if again == list(stage.layers(tower)[: len(again)]) else None


def one_number(stages: Sequence[Stage], tower: str) -> int | None:
    """Return a single number for all stages' recomputation of a tower, or None."""
    counts = [first_layers(stage, tower) for stage in stages]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    number = max(known)
    held = [min(number, len(stage.layers(tower))) for stage in stages]
    return number if held == known else None


def all_or_none(stages: Sequence[Stage], tower: str) -> bool | None:
    """Whether all or no layers of a tower are recomputed, or None for some."""
    held = sum(len(stage.layers(tower)) for stage in stages)
    again = sum(len(stage.recomputed(tower)) for stage in stages)
    return again > 0 if again in (0, held) else None

"""Where stages exchange what data-parallel encoders make in rounds, and where they wait for it.

A stage encodes rounds between operations of its list, as the plan says (`EncoderRound`), and begins
to send each round's features where it has encoded them. Ranks that embed tokens wait for them
before the first forward that needs them. A rank begins the exchange of a round's gradients where it
has run its own last backward of the round's micro-batches, and has encoded all rounds; it waits for
them where the plan has the round's backward. All ranks of an encoding group so begin the same
exchanges in one order: of all rounds' features, then of all rounds' gradients.

An exchange is done when all ranks of the group have begun it. Pipelines of a group run the same
lists, so that the waits of one pipeline are those of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import EncoderRound
from omnibal.pipeline.schedules import Pass, Schedule, StageOperations

_GIVES_GRADIENTS = (Pass.BACKWARD, Pass.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class ExchangeWait:
    """A stage that waits before one of its operations until all stages have begun an exchange."""

    stage: int
    position: int
    """Position of the operation in the stage's list, or the list's length if it waits after all."""
    begun_after: tuple[int, ...]
    """Operations of every stage after which it begins the exchange."""


def micro_batches_of(rounds: Sequence[EncoderRound]) -> list[range]:
    """Micro-batches of every round, from 0."""
    stops = accumulate(one.micro_batches for one in rounds)
    return [range(stop - one.micro_batches, stop) for one, stop in zip(rounds, stops, strict=True)]


def gradients_begun(
    operations: StageOperations, rounds: Sequence[EncoderRound], stage: int
) -> list[int]:
    """Operations of a stage after which it begins to exchange each round's gradients.

    Those of a round begin after those of the rounds before.
    """
    begun, latest = [], rounds[-1].forward_after[stage]
    for own in micro_batches_of(rounds):
        ends = [
            place + 1
            for place, one in enumerate(operations)
            if one.kind in _GIVES_GRADIENTS and one.micro_batch in own
        ]
        latest = max(latest, *ends)
        begun.append(latest)
    return begun


def exchange_waits(
    schedule: Schedule, rounds: Sequence[EncoderRound], *, trained: bool
) -> tuple[ExchangeWait, ...]:
    """All waits of a step by rounds.

    Args:
        schedule: of as many micro-batches as the rounds have.
        trained: whether gradients come back; without, rounds have no backward.

    Raises:
        UserError: rounds are of another number of stages or stand after more operations than there
            are, or one's backward comes before the stage's own last backward of the round's
            micro-batches, on which its gradients depend.
    """
    stages = len(rounds[0].load_ms)
    if stages != schedule.stages:
        raise UserError(
            f"rounds of {stages} stages in the plan's `beside`, and the pipeline has "
            f"{schedule.stages}; give every table one number a stage"
        )
    for number, one in enumerate(rounds):
        for stage, places in enumerate(zip(one.forward_after, one.backward_after, strict=True)):
            if max(places) > (there := len(schedule.operations[stage])):
                raise UserError(
                    f"round {number} of steps of {schedule.micro_batches} micro-batches stands on "
                    f"stage {stage} after {max(places)} operations, and the stage runs {there}; "
                    f"set forward_after and backward_after there to {there} at most"
                )
    embeds = schedule.stage_of(0)
    waits = [
        ExchangeWait(embeds, _first_forward(schedule.operations[embeds], own), one.forward_after)
        for one, own in zip(rounds, micro_batches_of(rounds), strict=True)
    ]
    if not trained:
        return tuple(waits)
    of_stages = [
        gradients_begun(operations, rounds, stage)
        for stage, operations in enumerate(schedule.operations)
    ]
    for number, one in enumerate(rounds):
        begun = tuple(of_stage[number] for of_stage in of_stages)
        for stage, (after, least) in enumerate(zip(one.backward_after, begun, strict=True)):
            if after < least:
                raise UserError(
                    f"round {number} of steps of {schedule.micro_batches} micro-batches runs its "
                    f"backward on stage {stage} after {after} operations, and its gradients are "
                    f"not complete before {least}; set its backward_after there to {least} or more"
                )
            waits.append(ExchangeWait(stage, after, begun))
    return tuple(waits)


def _first_forward(operations: StageOperations, micro_batches: range) -> int:
    """Position of the first forward of some micro-batches on the stage of part 0; it is with it."""
    return next(
        place
        for place, one in enumerate(operations)
        if one.kind is Pass.FORWARD and one.micro_batch in micro_batches
    )

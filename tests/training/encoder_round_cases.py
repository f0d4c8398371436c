"""Rounds of data-parallel encoders at random places that a pipeline can go by, and steps played."""

import random

from omnibal.model.data_parallel_encoders import EncoderRound, EncoderRounds
from omnibal.pipeline.schedules import Pass

_BACKWARDS = (Pass.BACKWARD, Pass.BACKWARD_INPUT)


class Played:
    """One step of a pipeline, whose stages do one thing after another.

    What is exchanged is here when all stages have begun it: features where they are encoded;
    gradients where a stage has run its last backward of the round, and of those before, and has
    encoded all rounds.
    """

    def __init__(self, schedule, sizes):
        self.schedule, self.rounds = schedule, len(sizes)
        self.round_of = [number for number, size in enumerate(sizes) for _ in range(size)]
        self.at, self.encoded, self.returned = ([0] * schedule.stages for _ in range(3))
        """Operations, encoded rounds and rounds whose backward has run, of every stage."""
        self.done = set()

    def can_encode(self, stage):
        return self.encoded[stage] < self.rounds

    def can_return(self, stage):
        number = self.returned[stage]
        return number < self.rounds and all(
            self.encoded[each] == self.rounds and self._has_given(each, number)
            for each in range(self.schedule.stages)
        )

    def _has_given(self, stage, number):
        left = self.schedule.operations[stage][self.at[stage] :]
        return not any(
            one.kind in _BACKWARDS and self.round_of[one.micro_batch] <= number for one in left
        )

    def can_run(self, stage):
        operations = self.schedule.operations[stage]
        if self.at[stage] == len(operations):
            return False
        one = operations[self.at[stage]]
        part = self.schedule.part(stage, one.chunk)
        if one.kind is Pass.FORWARD:
            if part == 0:
                return min(self.encoded) > self.round_of[one.micro_batch]
            return (True, part - 1, one.micro_batch) in self.done
        if one.kind is Pass.BACKWARD_WEIGHT or part == self.schedule.parts - 1:
            return True
        return (False, part + 1, one.micro_batch) in self.done

    def run(self, stage):
        one = self.schedule.operations[stage][self.at[stage]]
        if one.kind is not Pass.BACKWARD_WEIGHT:
            part = self.schedule.part(stage, one.chunk)
            self.done.add((one.kind is Pass.FORWARD, part, one.micro_batch))
        self.at[stage] += 1


def random_rounds(schedule, sizes, seed):
    """Rounds of so many micro-batches at places at which stages, in turn at random, do what they
    can."""
    dice, step, places = random.Random(seed), Played(schedule, sizes), {}
    every = range(schedule.stages)
    while any(step.returned[stage] < step.rounds for stage in every):
        stage = dice.choice(every)
        kind = dice.choice(["encode", "run", "run", "run", "return"])
        if kind == "run" and step.can_run(stage):
            step.run(stage)
        if kind == "encode" and step.can_encode(stage) and dice.random() < 0.5:
            places[kind, stage, step.encoded[stage]] = step.at[stage]
            step.encoded[stage] += 1
        if kind == "return" and step.can_return(stage) and dice.random() < 0.5:
            places[kind, stage, step.returned[stage]] = step.at[stage]
            step.returned[stage] += 1
    return rounds_at(sizes, schedule.stages, places, dice)


def rounds_at(sizes, stages, places, dice):
    """Rounds at given places, by (kind, stage, round), on ranks with random loads."""
    return EncoderRounds(
        micro_batches=sum(sizes),
        rounds=tuple(
            EncoderRound(
                micro_batches=size,
                forward_after=tuple(places["encode", stage, number] for stage in range(stages)),
                backward_after=tuple(places["return", stage, number] for stage in range(stages)),
                load_ms=tuple(dice.choice([0.0, 0.5, 1.0, 4.0]) for _ in range(stages)),
            )
            for number, size in enumerate(sizes)
        ),
    )


def ends(schedule, rounds):
    """Whether a step by these rounds ends: stages go on in turn as long as any can."""
    sizes = [one.micro_batches for one in rounds.rounds]
    step = Played(schedule, sizes)
    moved = True
    while moved:
        moved = False
        for stage in range(schedule.stages):
            while _moves(step, stage, rounds.rounds):
                moved = True
    return all(
        step.returned[stage] == step.rounds and step.at[stage] == len(operations)
        for stage, operations in enumerate(schedule.operations)
    )


def _moves(step, stage, rounds):
    """Do the next thing that stands in a stage's list, if it can be done."""
    at, encoded, returned = step.at[stage], step.encoded[stage], step.returned[stage]
    if encoded < step.rounds and rounds[encoded].forward_after[stage] == at:
        step.encoded[stage] += 1
    elif returned < step.rounds and rounds[returned].backward_after[stage] == at:
        if not step.can_return(stage):
            return False
        step.returned[stage] += 1
    elif step.can_run(stage):
        step.run(stage)
    else:
        return False
    return True


def with_rounds(plan, sizes_of, seed):
    """A plan whose steps of some numbers of micro-batches go by rounds of these sizes."""
    stages, chunks = plan.parallel.pipeline, plan.schedule.chunks
    rounds = tuple(
        random_rounds(plan.schedule.rule(stages, chunks, sum(sizes)), sizes, seed)
        for sizes in sizes_of
    )
    beside = plan.beside.model_copy(update={"rounds": rounds})
    return plan.model_copy(update={"beside": beside})

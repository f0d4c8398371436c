"""In which order a stage posts receives, launches its work and sends, on links that only record."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import count, pairwise
from types import SimpleNamespace

import pytest
import torch
from toy import stages_of, toy_model, toy_plan

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.model.stage import boundary_shapes
from megatron.vlm.step import links, schedule
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.schedule import run_forward, run_forward_backward
from omnibal.pipeline.schedules import (
    forward_only,
    one_forward_one_backward,
)

MODEL = toy_model()
CUTS = {1: (), 2: (4,), 3: (3, 8), 4: (2, 7, 9), 5: (1, 3, 7, 9)}
POSITIONS = [(size, rank) for size in CUTS for rank in range(size)]
BATCHES = [
    MicroBatch(tiles=tiles, tokens=30 + tiles, segment_tokens=(30 + tiles,))
    for tiles in (2, 1, 3, 1, 2, 4)
]


@dataclass(frozen=True)
class Event:
    """What a stage's host does: post or wait for a receive, launch, or send."""

    kind: str
    what: str
    number: int


class Recorder(torch.nn.Module):
    """Stands for a stage and for its connections."""

    def __init__(self, plan, rank):
        super().__init__()
        self.plan, self.rank = plan, rank
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.deferred = None
        self.events, self._numbers = [], defaultdict(count)

    @property
    def module(self):
        return self

    def note(self, kind, what):
        event = Event(kind, what, next(self._numbers[kind, what]))
        self.events.append(event)
        return event

    def irecv(self, tensor, source, group):
        number = self.note("post", group).number
        tensor.fill_(1.0)
        return SimpleNamespace(wait=lambda: self.events.append(Event("wait", group, number)))

    def isend(self, tensor, target, group):
        self.note("send", group)
        return SimpleNamespace(wait=lambda: None)

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, batch):
        self.note("launch", "forward")
        number = self.weight
        for tensor in self.received.values():
            number = number * tensor.mean()
        if self.rank == self.plan.parallel.pipeline - 1:
            return number
        shapes = boundary_shapes(self.plan, self.rank, batch.shape)
        return {name: number.expand(shape).clone() for name, shape in shapes.items()}


def events_of(monkeypatch, size, rank, training=True, frozen=()):
    """Of one step of a stage, in order."""
    plan = toy_plan(MODEL, stages_of(MODEL, *CUTS[size])).model_copy(update={"frozen": frozen})
    recorder = Recorder(plan, rank)
    monkeypatch.setattr(links.dist, "irecv", recorder.irecv)
    monkeypatch.setattr(links.dist, "isend", recorder.isend)
    # Not torch's engine: see conftest.
    monkeypatch.setattr(
        schedule, "run_backward", lambda outputs: recorder.note("launch", "backward")
    )
    own = PipelineLinks(
        rank=rank, ranks=range(size), activations="activations", gradients="gradients"
    )
    batches = MicroBatchStream.of(BATCHES)
    if training:
        run_forward_backward(plan, [recorder], own, batches, PhaseClock())
    else:
        run_forward(plan, [recorder], own, batches)
    return recorder.events


def coming_at(events, event):
    """What is posted and not waited for when an event happens."""
    before = events[: events.index(event)]
    posted = {(one.what, one.number) for one in before if one.kind == "post"}
    return posted - {(one.what, one.number) for one in before if one.kind == "wait"}


@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["", "frozen-vision"])
@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_nothing_is_on_its_way_while_a_first_forward_is_launched(
    monkeypatch, size, rank, frozen, training
):
    """Prevents: a first step that hangs under NCCL, where a receive's kernel spins on the device
    and what waits for the device comes before the forward that the receive depends on."""
    events = events_of(monkeypatch, size, rank, training, frozen)
    assert sum(event.kind == "launch" for event in events) >= len(BATCHES)
    assert coming_at(events, Event("launch", "forward", 0)) == set()
    first_backward = Event("launch", "backward", 0)
    if first_backward in events:
        assert {what for what, _ in coming_at(events, first_backward)} <= {"activations"}


@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_later_receives_are_on_their_way_while_a_stage_computes(monkeypatch, size, rank):
    """Prevents: transfers that begin only when a stage stands idle for them."""
    events = events_of(monkeypatch, size, rank)
    for number in range(1, len(BATCHES) - 1):
        for work, what, is_there in (
            ("forward", "activations", rank > 0),
            ("backward", "gradients", rank < size - 1),
        ):
            if is_there:
                assert (what, number + 1) in coming_at(events, Event("launch", work, number))


def transfer(rank, event):
    """What an event of a rank is one side of, named by the first of the two ranks."""
    comes_from_before = (event.what == "activations") == (event.kind != "send")
    return (rank - 1 if comes_from_before else rank, event.what, event.number)


def transfers(rank, events):
    return {transfer(rank, event) for event in events if event.kind in ("post", "send")}


def reached(rank, events, over):
    """Transfers that the rank's stream gets to without its host, past waits for what is over."""
    for place, event in enumerate(events):
        if event.kind == "wait" and transfer(rank, event) not in over:
            return transfers(rank, events[:place])
    return transfers(rank, events)


def hosts_that_hang(programs, draining):
    """Ranks whose hosts never get to the end of their events, where devices are drained at the
    launches in `draining`: the host goes on when all transfers that it has begun are over.

    A transfer is over when both hosts have begun it and both streams have reached it.
    """
    places, over, before = [0] * len(programs), set(), None
    while before != (places, over):
        before = list(places), set(over)
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                begun = transfers(rank, program[: places[rank]])
                if program[places[rank]] in draining and not begun <= over:
                    break
                places[rank] += 1
        sides = [
            reached(rank, program[: places[rank]], over) for rank, program in enumerate(programs)
        ]
        over = over.union(*(one & other for one, other in pairwise(sides)))
    return [rank for rank, place in enumerate(places) if place < len(programs[rank])]


FIRSTS = [Event("launch", "forward", 0), Event("launch", "backward", 0)]


@pytest.mark.parametrize("size", CUTS)
@pytest.mark.parametrize("draining", [FIRSTS[:1], FIRSTS[1:], FIRSTS], ids=["F", "B", "F-and-B"])
def test_no_stage_hangs_that_waits_for_its_device_at_first_launches(monkeypatch, size, draining):
    """Prevents: stages that wait for each other in a ring when each of them loads its kernels."""
    programs = [events_of(monkeypatch, size, rank) for rank in range(size)]
    assert hosts_that_hang(programs, draining) == []


@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_a_stage_launches_what_its_list_says(monkeypatch, size, rank, training):
    """Prevents: a step in another order than the one that is simulated and counted for memory."""
    rule = one_forward_one_backward if training else forward_only
    listed = rule(size, 1, len(BATCHES)).operations[rank]
    events = events_of(monkeypatch, size, rank, training)
    launched = [event.what for event in events if event.kind == "launch"]
    assert launched == [operation.kind.label for operation in listed]


def test_micro_batches_that_are_not_as_planned_are_refused():
    """Prevents: neighbours that exchange tensors of different shapes, or a step of too few."""
    shapes = [batch.shape for batch in BATCHES]
    swapped = MicroBatchStream(batches=iter(BATCHES[::-1]), shapes=shapes)
    message = (
        "micro-batch 0 of the step has 4 tiles and 34 tokens, and the plan has 2 tiles and 32 "
        "tokens for it"
    )
    with pytest.raises(ValueError, match=message):
        swapped.take(0)
    short = MicroBatchStream(batches=iter(BATCHES[:2]), shapes=shapes)
    assert [short.take(0), short.take(1)] == BATCHES[:2]
    with pytest.raises(ValueError, match="ended before micro-batch 2 of a step of 6"):
        short.take(2)


def test_a_step_takes_no_more_than_its_own_micro_batches():
    """Prevents: a step that swallows the first micro-batch of the next one."""
    coming = iter(BATCHES)
    stream = MicroBatchStream(batches=coming, shapes=[batch.shape for batch in BATCHES[:2]])
    assert [stream.take(number) for number in range(len(stream))] == BATCHES[:2]
    assert list(coming) == BATCHES[2:]

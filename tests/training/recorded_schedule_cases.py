"""A stage's host actions in a step, on recording links, and deadlocks of hosts."""

import random
from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations, count
from types import SimpleNamespace

import torch
from chunk_cases import with_chunks
from pipeline_cases import pipeline_plan

from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.model.stage import boundary_shapes
from megatron.vlm.step import links, schedule
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.schedule import run_forward, run_forward_backward
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, ChunkPass, Pass, StepSchedule

CUTS = {1: (), 2: (4,), 3: (3, 8), 4: (2, 7, 9), 5: (1, 3, 7, 9), 6: (1, 3, 5, 7, 9)}
CUTS[8] = (1, 2, 4, 5, 7, 8, 10)
BATCHES = [
    MicroBatch(tiles=tiles, tokens=30 + tiles, segment_tokens=(30 + tiles,))
    for tiles in (2, 1, 3, 1, 2, 4)
]


@dataclass(frozen=True)
class Event:
    """A host action: post or wait for a receive, launch, send, or wait for a send."""

    kind: str
    what: str
    number: int
    chunk: int = 0
    """Chunk of a launch."""
    pair: tuple[int, int] | None = None
    """Stages of a message."""

    @property
    def transfer(self):
        """The transfer of a post, send or wait."""
        return self.what, self.pair, self.number


class Recorder(torch.nn.Module):
    """A stand-in for a stage and for its connections."""

    def __init__(self, plan, rank):
        super().__init__()
        self.plan, self.rank, self.chunk = plan, rank, 0
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.deferred = None
        self.events, self._numbers = [], defaultdict(count)

    @property
    def module(self):
        return self

    def begin_pass(self, kind, chunk):
        self.chunk = chunk

    def launch(self, what):
        number = next(self._numbers[what, self.chunk])
        self.events.append(Event("launch", what, number, self.chunk))

    def _transfer(self, kind, what, pair):
        event = Event(kind, what, next(self._numbers[what, pair]), pair=pair)
        self.events.append(event)
        waited = Event("wait", what, event.number, pair=pair)
        return SimpleNamespace(wait=lambda: self.events.append(waited), is_completed=lambda: False)

    def irecv(self, tensor, source, group):
        tensor.fill_(1.0)
        return self._transfer("post", group, (source, self.rank))

    def isend(self, tensor, target, group):
        return self._transfer("send", group, (self.rank, target))

    def set_input_tensor(self, received):
        self.received = received

    def forward(self, batch):
        self.launch("forward")
        number = self.weight
        for tensor in self.received.values():
            number = number * tensor.mean()
        part = self.plan.parts_of(self.rank)[self.chunk]
        if part == len(self.plan.stages) - 1:
            return number
        shapes = boundary_shapes(self.plan, part, batch.shape)
        return {name: number.expand(shape).clone() for name, shape in shapes.items()}


def plan_of(size, chunks=1, name="interleaved"):
    """Return a plan of the toy model with `chunks` chunks per stage."""
    plan = pipeline_plan(*CUTS[size * chunks])
    return plan if chunks == 1 else with_chunks(plan, chunks, name)


def events_of(monkeypatch, plan, rank, training=True):
    """Return the events of a stage's step, in order."""
    recorder = Recorder(plan, rank)
    monkeypatch.setattr(links.dist, "irecv", recorder.irecv)
    monkeypatch.setattr(links.dist, "isend", recorder.isend)
    # Avoids torch's engine: see conftest.
    monkeypatch.setattr(schedule, "run_backward", lambda outputs: recorder.launch("backward"))
    own = PipelineLinks(
        rank=rank, ranks=range(plan.parallel.pipeline), activations="activations",
        gradients="gradients", schedule=plan.schedule,
        other_way=() if plan.schedule == ONE_FORWARD_ONE_BACKWARD else ("back", "forth"),
    )  # fmt: skip
    batches, models = MicroBatchStream.of(BATCHES), [recorder] * plan.schedule.chunks
    begin_pass = recorder.begin_pass
    if training:
        run_forward_backward(plan, models, own, batches, PhaseClock(), begin_pass=begin_pass)
    else:
        run_forward(plan, models, own, batches, begin_pass=begin_pass)
    return recorder.events


def active_at(events, event):
    """Return the receives posted but not waited for at an event."""
    before = events[: events.index(event)]
    posted = {one.transfer for one in before if one.kind == "post"}
    over = {one.transfer for one in before if one.kind == "wait"}
    return {(what, number) for what, _, number in posted - over}


def _transfers(events):
    return {event.transfer for event in events if event.kind in ("post", "send")}


def _reach_transfers(events, over):
    """Return transfers reached by a stage's stream without its host, given finished transfers."""
    for place, event in enumerate(events):
        if event.kind == "wait" and event.transfer not in over:
            return _transfers(events[:place])
    return _transfers(events)


def first_launches(events):
    """Return the launches that may load kernels: the first per kind and chunk."""
    return [event for event in events if event.kind == "launch" and event.number == 0]


def hosts_that_hang(programs, draining):
    """Return ranks with deadlocked hosts if devices are drained at launches in `draining`: there
    the host waits until all its transfers are over.

    A transfer is over when both hosts have begun it and both streams have reached it.
    """
    places, over, before = [0] * len(programs), set(), None
    while before != (places, over):
        before = list(places), set(over)
        for rank, program in enumerate(programs):
            while places[rank] < len(program):
                begun = _transfers(program[: places[rank]])
                if program[places[rank]] in draining and not begun <= over:
                    break
                places[rank] += 1
        sides = [
            _reach_transfers(program[:place], over)
            for program, place in zip(programs, places, strict=True)
        ]
        over = over.union(*(one & other for one, other in combinations(sides, 2)))
    return [rank for rank, place in enumerate(places) if place < len(programs[rank])]


def random_rule(seed, placement):
    """Return a schedule rule with a random valid order of operations."""

    def rule(stages, chunks, micro_batches):
        dice, parts = random.Random(seed), stages * chunks
        lists, done = [[] for _ in range(stages)], set()
        waiting = {
            (kind, part, i)
            for kind in (Pass.FORWARD, Pass.BACKWARD)
            for part in range(parts)
            for i in range(micro_batches)
        }

        def dependencies(kind, part, i):
            if kind is Pass.FORWARD:
                return {(kind, part - 1, i)} if part else set()
            after = {(kind, part + 1, i)} if part < parts - 1 else set()
            return after | {(Pass.FORWARD, part, i)}

        while waiting:
            one = dice.choice(sorted(each for each in waiting if dependencies(*each) <= done))
            waiting.remove(one)
            done.add(one)
            kind, part, i = one
            stage = placement.stage_of(part, stages)
            [chunk] = [c for c in range(chunks) if placement.part(stage, c, stages) == part]
            lists[stage].append(ChunkPass(kind, i, chunk))
        return StepSchedule(
            name=f"random {seed}", chunks=chunks, micro_batches=micro_batches,
            operations=tuple(map(tuple, lists)), is_prefix_closed=False, placement=placement,
        )  # fmt: skip

    return rule

"""Messages between stages with several chunks: their order, and no deadlock."""

import random
import time

import pytest
import torch
from chunk_cases import chunk_plan, run_by_rule, whole_back_and_forth
from pipeline_cases import named_parameters
from ranks import run_ranks
from recorded_schedule_cases import events_of, first_launches, hosts_that_hang, plan_of, random_rule
from toy import OPTIONS, toy_batch, toy_model

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.stage_messages import step_messages
from megatron.vlm.step.train import build_trainer
from omnibal.pipeline.operation_graph import operation_graph
from omnibal.pipeline.schedules import (
    Placement,
    interleaved_1f1b,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)

PLANNED = [
    pytest.param(rule, chunks, id=f"{rule.__name__}-{chunks}")
    for rule, chunks in (
        (one_forward_one_backward, 1),
        (interleaved_1f1b, 2),
        (interleaved_1f1b, 4),
        (zero_bubble_h1, 1),
        (zero_bubble_v, 2),
        (whole_back_and_forth, 2),
    )
]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("rule", "chunks"), PLANNED)
def test_sends_of_planned_schedules_wait_for_those_before(rule, chunks, stages):
    """Prevents sent outputs that accumulate in memory, which no plan counts."""
    for micro_batches in (1, stages, 2 * stages + 1, 4 * stages):
        graph = operation_graph(rule, stages, chunks, micro_batches)
        cuts = frozenset(range(stages * chunks - 1))
        assert step_messages(graph, cuts).sends_wait
        assert step_messages(graph, frozenset()).sends_wait


RULES = {"interleaved": interleaved_1f1b, "zb-v": whole_back_and_forth}
PLACEMENTS = {"interleaved": Placement.LOOP, "zb-v": Placement.V}


def programs_of(monkeypatch, size, chunks, name, rule):
    """Return events of every stage of a step, and the events that may load kernels."""
    run_by_rule(monkeypatch, name, rule)
    plan = plan_of(size, chunks, name)
    programs = [events_of(monkeypatch, plan, rank) for rank in range(size)]
    return programs, {event for events in programs for event in first_launches(events)}


@pytest.mark.parametrize(
    ("size", "chunks", "name"),
    [(2, 2, "interleaved"), (2, 3, "interleaved"), (4, 2, "interleaved"), (3, 2, "interleaved"),
     (2, 2, "zb-v"), (3, 2, "zb-v"), (4, 2, "zb-v")],
)  # fmt: skip
def test_no_stage_hangs_that_waits_for_its_device_at_first_launches(
    monkeypatch, size, chunks, name
):
    """Prevents a ring of stages that wait for each other while loading kernels, and receives posted
    only when a stage is idle."""
    programs, firsts = programs_of(monkeypatch, size, chunks, name, RULES[name])
    assert hosts_that_hang(programs, firsts) == []
    for draining in firsts:
        assert hosts_that_hang(programs, {draining}) == []
    # Most are posted ahead: the stage launches work between post and wait.
    ahead = [is_ahead for events in programs for is_ahead in receives_ahead(events)]
    assert sum(ahead) > 0.5 * len(ahead)


def receives_ahead(events):
    """Yield for each receive whether work is launched between its post and its wait."""
    for place, event in enumerate(events):
        if event.kind == "post":
            after = [(one.kind, one.transfer) for one in events[place:]]
            between = events[place : place + after.index(("wait", event.transfer))]
            yield any(one.kind == "launch" for one in between)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(20))
def test_no_stage_hangs_with_any_lists(monkeypatch, name, seed):
    """Prevents deadlock between a stage that waits to send and a peer that waits for it."""
    programs, _ = programs_of(monkeypatch, 3, 2, name, random_rule(seed, PLACEMENTS[name]))
    assert hosts_that_hang(programs, ()) == []


def losses_and_gradients(links, plan, rules):
    """Return losses and gradients of one step by each rule, on stages with random delays."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    dice = random.Random(links.rank)
    for model in trainer.models:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.005 * dice.random() ** 3))
    packs = [[(2, 9), (1, 14)], [(0, 12)], [(3, 5)], [(1, 8), (0, 6)], [(0, 7)]]
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(packs)]
    results = []
    for rule in rules:
        run_by_rule(pytest.MonkeyPatch(), plan.schedule.name, rule)
        trainer.zero_gradients()
        losses = trainer.run_step(MicroBatchStream.of(batches), PhaseClock())
        own = named_parameters(trainer).items()
        results.append((losses, {name: one.main_grad.clone() for name, one in own}))
    return results


@pytest.mark.parametrize(
    ("pipeline", "chunks", "name"), [(4, 2, "interleaved"), (2, 3, "interleaved"), (4, 2, "zb-v")]
)
def test_any_lists_give_the_same_sums(pipeline, chunks, name):
    """Prevents swapped messages and deadlock for any valid order and timing of operations."""
    plan = chunk_plan(toy_model(), pipeline, chunks, name=name)
    rules = [RULES[name], *(random_rule(seed, PLACEMENTS[name]) for seed in range(1, 5))]
    for (losses, gradients), *others in run_ranks(plan.parallel, losses_and_gradients, plan, rules):
        for found_losses, found in others:
            assert len(found_losses) == len(losses)
            assert all(map(torch.equal, found_losses, losses))
            for name_, gradient in gradients.items():
                torch.testing.assert_close(found[name_], gradient, rtol=1e-4, atol=1e-6, msg=name_)

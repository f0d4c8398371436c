"""Order of receives, computation and sends of a stage, on recording links; and 1F1B and interleaved
schedules against Megatron-core's on equal stages."""

from functools import partial

import pytest
import torch
from chunk_cases import CUTS, with_chunks
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from recorded_schedule_cases import BATCHES, Event, active_at, events_of, hosts_that_hang, plan_of
from toy import OPTIONS, toy_batch

from benchmarks.schedule import gradients, run_ours, run_stock, stock_stages
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer
from omnibal.pipeline.schedules import forward_only, one_forward_one_backward

SIZES = range(1, 6)
POSITIONS = [(size, rank) for size in SIZES for rank in range(size)]
FIRST = {"forward": Event("launch", "forward", 0), "backward": Event("launch", "backward", 0)}


IN_BOTH = pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])


@IN_BOTH
@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["", "frozen-vision"])
@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_nothing_is_on_its_way_while_a_first_forward_is_launched(
    monkeypatch, size, rank, frozen, training
):
    """Prevents a deadlock under NCCL at the first step: a receive's kernel spins on the device, and
    a device synchronization precedes the forward it depends on."""
    plan = plan_of(size).model_copy(update={"frozen": frozen})
    events = events_of(monkeypatch, plan, rank, training)
    assert active_at(events, FIRST["forward"]) == set()
    if FIRST["backward"] in events:
        assert {what for what, _ in active_at(events, FIRST["backward"])} <= {"activations"}


@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_later_receives_are_on_their_way_while_a_stage_computes(monkeypatch, size, rank):
    """Prevents receives that are posted only when a stage is idle."""
    events = events_of(monkeypatch, plan_of(size), rank)
    received = {"forward": "activations"} if rank else {}
    received |= {"backward": "gradients"} if rank < size - 1 else {}
    for number in range(1, len(BATCHES) - 1):
        for work, what in received.items():
            assert (what, number + 1) in active_at(events, Event("launch", work, number))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("draining", [["forward"], ["backward"], [*FIRST]], ids="-".join)
def test_no_stage_hangs_that_waits_for_its_device_at_first_launches(monkeypatch, size, draining):
    """Prevents a circular wait between stages when each synchronizes to load kernels."""
    programs = [events_of(monkeypatch, plan_of(size), rank) for rank in range(size)]
    assert hosts_that_hang(programs, [FIRST[direction] for direction in draining]) == []


@IN_BOTH
@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_a_stage_launches_what_its_list_says(monkeypatch, size, rank, training):
    """Prevents an execution order other than the simulated order, used for memory too."""
    rule = one_forward_one_backward if training else forward_only
    listed = rule(size, 1, len(BATCHES)).operations[rank]
    events = events_of(monkeypatch, plan_of(size), rank, training)
    launched = [event.what for event in events if event.kind == "launch"]
    assert launched == [operation.kind.label for operation in listed]


def test_a_step_takes_its_own_micro_batches_alone():
    """Prevents packs of wrong shape, short steps, and steps that consume the next step's packs."""
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
    coming = iter(BATCHES)
    stream = MicroBatchStream(batches=coming, shapes=shapes[:2])
    assert [stream.take(number) for number in range(len(stream))] == BATCHES[:2]
    assert list(coming) == BATCHES[2:]


VARYING = [
    [(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)], [(1, 20)],
]  # fmt: skip
EQUAL = [[(2, 9), (1, 14)]] * 5


def run_both_schedules(links, plan, packs, varying):
    """Return (losses, gradients) of this stage by our schedule and by core's."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    batches = [toy_batch(plan.model, pack, seed=i) for i, pack in enumerate(packs)]
    of_rank = plan, trainer.models, trainer.links
    stages = stock_stages(*of_rank, varying=varying)
    results = []
    for run in (partial(run_ours, *of_rank), partial(run_stock, plan, stages, trainer.links)):
        trainer.zero_gradients()
        losses = run(batches)
        results.append((losses, gradients(trainer)))
    return results


# Core's schedule cannot send the two-dimensional features before the language embed.
PLANS = {
    "cut-in-vision-varying": (pipeline_plan(3), VARYING),
    "cut-in-language-equal": (pipeline_plan(8), EQUAL),
    "four-stages-varying": (pipeline_plan(2, 7, 9), VARYING),
    "fewer-micro-batches-than-stages": (pipeline_plan(2, 7, 9), VARYING[:2]),
    "interleaved-pp2": (with_chunks(pipeline_plan(2, 7, 9), 2), VARYING[:4]),
    "interleaved-pp2-four-chunks": (with_chunks(pipeline_plan(*CUTS[8]), 4), VARYING[:4]),
    "interleaved-pp4": (with_chunks(pipeline_plan(*CUTS[8]), 2), (VARYING * 2)[:8]),
}


@pytest.mark.parametrize(("plan", "packs"), PLANS.values(), ids=PLANS)
def test_losses_and_gradients_equal_stock(plan, packs):
    """Prevents an order, losses or gradients other than of core's schedules."""
    ranks = run_ranks(plan.parallel, run_both_schedules, plan, packs, packs is not EQUAL)
    for (losses, found), (stock_losses, expected) in ranks:
        torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=0)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
    assert len(ranks[-1][1][0]) == len(packs)
    has_values = [bool(value.any()) for _, (_, stock) in ranks for value in stock.values()]
    assert sum(has_values) > len(has_values) / 2

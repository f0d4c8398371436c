"""In which order a stage posts receives, launches its work and sends, on links that only record."""

import pytest
from recorded_schedule_cases import (
    BATCHES,
    Event,
    coming_at,
    events_of,
    hosts_that_hang,
    plan_of,
)

from megatron.vlm.inputs.batch import MicroBatchStream
from omnibal.pipeline.schedules import (
    forward_only,
    one_forward_one_backward,
)

SIZES = range(1, 6)
POSITIONS = [(size, rank) for size in SIZES for rank in range(size)]
FIRST = {"forward": Event("launch", "forward", 0), "backward": Event("launch", "backward", 0)}


@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize("frozen", [(), ("vision",)], ids=["", "frozen-vision"])
@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_nothing_is_on_its_way_while_a_first_forward_is_launched(
    monkeypatch, size, rank, frozen, training
):
    """Prevents: a first step that hangs under NCCL, where a receive's kernel spins on the device
    and what waits for the device comes before the forward that the receive depends on."""
    plan = plan_of(size).model_copy(update={"frozen": frozen})
    events = events_of(monkeypatch, plan, rank, training)
    assert sum(event.kind == "launch" for event in events) >= len(BATCHES)
    assert coming_at(events, Event("launch", "forward", 0)) == set()
    first_backward = Event("launch", "backward", 0)
    if first_backward in events:
        assert {what for what, _ in coming_at(events, first_backward)} <= {"activations"}


@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_later_receives_are_on_their_way_while_a_stage_computes(monkeypatch, size, rank):
    """Prevents: transfers that begin only when a stage stands idle for them."""
    events = events_of(monkeypatch, plan_of(size), rank)
    for number in range(1, len(BATCHES) - 1):
        for work, what, is_there in (
            ("forward", "activations", rank > 0),
            ("backward", "gradients", rank < size - 1),
        ):
            if is_there:
                assert (what, number + 1) in coming_at(events, Event("launch", work, number))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("draining", [["forward"], ["backward"], [*FIRST]], ids="-".join)
def test_no_stage_hangs_that_waits_for_its_device_at_first_launches(monkeypatch, size, draining):
    """Prevents: stages that wait for each other in a ring when each of them loads its kernels."""
    programs = [events_of(monkeypatch, plan_of(size), rank) for rank in range(size)]
    assert hosts_that_hang(programs, [FIRST[one] for one in draining]) == []


@pytest.mark.parametrize("training", [True, False], ids=["training", "validation"])
@pytest.mark.parametrize(("size", "rank"), POSITIONS)
def test_a_stage_launches_what_its_list_says(monkeypatch, size, rank, training):
    """Prevents: a step in another order than the one that is simulated and counted for memory."""
    rule = one_forward_one_backward if training else forward_only
    listed = rule(size, 1, len(BATCHES)).operations[rank]
    events = events_of(monkeypatch, plan_of(size), rank, training)
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

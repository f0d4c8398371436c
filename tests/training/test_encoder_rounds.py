"""Rounds of data-parallel encoders: which a pipeline can go by, and steps that go by them."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from data_parallel_cases import own_stream
from data_parallel_encoder_cases import Case, packs_of, plan_of
from encoder_round_cases import ends, random_rounds, with_rounds
from ranks import run_ranks
from tensor_parallel_cases import OPTIONS

from megatron.vlm.step.clock import PhaseClock
from megatron.vlm.step.messages import step_messages
from megatron.vlm.step.train import build_trainer
from omnibal.base.errors import UserError
from omnibal.model.data_parallel_encoders import EncoderRound, EncoderRounds
from omnibal.pipeline.operation_graph import operation_graph
from omnibal.pipeline.round_places import exchange_waits
from omnibal.pipeline.schedules import (
    interleaved,
    one_forward_one_backward,
    zero_bubble_h1,
    zero_bubble_v,
)

RULES = [
    (one_forward_one_backward, 1), (interleaved, 2), (zero_bubble_h1, 1), (zero_bubble_v, 2),
]  # fmt: skip


def random_case(seed):
    """A pipeline's operations, and rounds that it can go by."""
    dice = random.Random(seed)
    rule, chunks = RULES[seed % 4]
    sizes = [dice.randint(1, 3) for _ in range(dice.randint(2, 4))]
    graph = operation_graph(rule, dice.randint(1, 4), chunks, sum(sizes))
    return dice, graph, random_rounds(graph.schedule, sizes, seed)


def moved(dice, schedule, rounds):
    """The rounds with a few places elsewhere, in order still."""
    tables = [[*one.forward_after] for one in rounds.rounds]
    tables += [[*one.backward_after] for one in rounds.rounds]
    for _ in range(dice.randint(1, 3)):
        stage = dice.randrange(schedule.stages)
        dice.choice(tables)[stage] = dice.randint(0, len(schedule.operations[stage]))
        for table, place in zip(tables, sorted(each[stage] for each in tables), strict=True):
            table[stage] = place
    return EncoderRounds(
        micro_batches=rounds.micro_batches,
        rounds=tuple(
            EncoderRound(
                micro_batches=one.micro_batches,
                forward_after=tuple(forward),
                backward_after=tuple(backward),
                load_ms=one.load_ms,
            )
            for one, forward, backward in zip(
                rounds.rounds, tables[: len(tables) // 2], tables[len(tables) // 2 :], strict=True
            )
        ),
    )


def is_refused(graph, rounds, trained=True):
    cuts = frozenset(range(graph.schedule.parts - 1))
    try:
        waits = exchange_waits(graph.schedule, rounds.rounds, trained=trained)
        step_messages(graph, cuts, waits)
    except UserError as error:
        assert "\n" not in str(error)
        return True
    return False


def test_rounds_are_refused_by_which_a_step_does_not_end():
    """Prevents: stages that wait for each other for ever, and rounds refused that any pipeline can
    go by."""
    refused = []
    for seed in range(400):
        dice, graph, rounds = random_case(seed)
        assert ends(graph.schedule, rounds) and not is_refused(graph, rounds)
        other = moved(dice, graph.schedule, rounds)
        refused.append(is_refused(graph, other))
        assert refused[-1] != ends(graph.schedule, other), (seed, other)
    assert 100 < sum(refused) < 300


def test_frozen_encoders_may_have_a_backward_anywhere():
    """Prevents: a plan refused for places that nothing is done at."""
    _, graph, rounds = random_case(0)
    places = [one.forward_after for one in rounds.rounds]
    early = [one.model_copy(update={"backward_after": places[-1]}) for one in rounds.rounds]
    anywhere = rounds.model_copy(update={"rounds": tuple(early)})
    assert is_refused(graph, anywhere) and not is_refused(graph, anywhere, trained=False)


def test_places_that_are_none_are_refused():
    """Prevents: a round that is never encoded, and tables that are of another pipeline."""
    _, graph, rounds = random_case(0)
    beyond = tuple(len(operations) + 1 for operations in graph.schedule.operations)
    last = rounds.rounds[-1].model_copy(update={"backward_after": beyond})
    with pytest.raises(UserError, match="and the stage runs"):
        exchange_waits(graph.schedule, (*rounds.rounds[:-1], last), trained=True)
    one_more = operation_graph(
        one_forward_one_backward, graph.schedule.stages + 1, 1, rounds.micro_batches
    )
    with pytest.raises(UserError, match="one number a stage"):
        exchange_waits(one_more.schedule, rounds.rounds, trained=True)


DELAYED = {
    "pp4": (Case({}, cuts=(1, 2, 3), per_pass=1, kept=1), ((1, 2, 2, 1), (3, 3), (1,) * 6)),
    "pp2-dp2-zb-v": (
        Case({"data": 2}, pipelines=2, cuts=(1, 2, 3), chunks=2, schedule="zb-v"),
        ((1, 1, 1), (2, 1)),
    ),
    "pp2-dp2-interleaved": (
        Case({"data": 2}, pipelines=2, cuts=(1, 2, 3), kept=1, chunks=2, schedule="interleaved"),
        ((1, 1, 1), (1, 2)),
    ),
}
PLACES = 6


def losses_and_gradients(links, plans):
    """Of one step by each plan, on ranks that take now longer and now shorter."""
    trainer = build_trainer(plans[0], links, OPTIONS, steps=10, seed=3)
    dice = random.Random(dist.get_rank())
    layer = trainer.encoders.stage.encoders["vision"].layers.layers[0]
    for model in (*trainer.models, layer):
        model.register_forward_pre_hook(lambda *_: time.sleep(0.02 * dice.random() ** 3))
    results = []
    for plan in plans:
        trainer.zero_gradients()
        stream = own_stream(plan, list(packs_of(plan.model, 0, 0.0)))
        losses = trainer.run_step(stream, PhaseClock())
        trainer.data_parallel.discard_gradients()
        gradients = [one.main_grad.clone() for one in trainer.encoders.stage.parameters()]
        for gradient in gradients:
            dist.all_reduce(gradient)
        results.append((losses, gradients, len(stream.encoding.rounds)))
    return results


@pytest.mark.parametrize("name", DELAYED)
def test_no_rank_waits_for_ever_with_random_places(name):
    """Prevents: ranks that begin exchanges in different orders, and one that waits for another that
    waits for it, where one or the other is late; gradients of another round's items."""
    case, sizes = DELAYED[name]
    whole = plan_of(case)
    plans = [with_rounds(whole, [sizes[seed % len(sizes)]], seed) for seed in range(PLACES)]
    for (losses, gradients, number), *others in run_ranks(
        whole.parallel, losses_and_gradients, [whole, *plans]
    ):
        assert number == 1
        for seed, (own_losses, own_gradients, rounds) in enumerate(others):
            assert rounds == len(sizes[seed % len(sizes)])
            torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own_gradients, gradients, rtol=1e-4, atol=1e-5)

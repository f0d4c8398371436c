"""Tensor and sequence parallelism against the single-process run, and checkpoints between sizes."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    STEPS,
    alone,
    assert_same_training,
    batches_of,
    by_name,
    compare_resumed,
    compare_with_one_process,
    run,
    whole,
)
from toy import stages_of, toy_batch, toy_plan

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.config import LanguageConfig


# Units of the models: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head. A cut is the position of the first unit after it.
@pytest.mark.parametrize(
    ("name", "cuts", "sizes"),
    [
        pytest.param("6B-like", (), {"tensor": 2}, id="tp2"),
        pytest.param("300M-like", (), {"tensor": 2, "sequence_parallel": True}, id="tp2-sp"),
        pytest.param(
            "without-qk-norm", (7,), {"tensor": 2, "sequence_parallel": True}, id="tp2-sp-pp2-head"
        ),
        pytest.param("6B-like", (), {"tensor": 2, "data": 2}, id="tp2-dp2"),
        pytest.param("300M-like", (3,), {"data": 2}, id="pp2-dp2"),
        pytest.param("for-four", (), {"tensor": 4, "sequence_parallel": True}, id="tp4-sp"),
    ],
)
def test_tensor_parallel_equals_one_process(name, cuts, sizes):
    """Prevents: weights drawn by shard, padding that counts, gradients summed twice or never."""
    model = MODELS[name]
    compare_with_one_process(toy_plan(model, stages_of(model, *cuts), **sizes))


@pytest.mark.parametrize("frozen", [("language", "projector"), ("vision",)], ids=["vision", "rest"])
def test_part_trained_alone_equals_one_process(frozen):
    """Prevents: frozen layers that lose gradients between ranks, and errors in the vision encoder's
    gradients that those of the language model would hide in the norm."""
    model = MODELS["6B-like"]
    plan = toy_plan(model, stages_of(model), tensor=2, sequence_parallel=True)
    compare_with_one_process(plan.model_copy(update={"frozen": frozen}))


def gradients_in_norm(links, plan):
    """How many gradients the optimizer takes on this rank, and the rank's parameters by name."""
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    batches = list(batches_of(plan.model, 0, STEPS[0]))
    train_step(trainer, MicroBatchStream.of(batches))
    optimizers = trainer.optimizers[0].chained_optimizers
    taken = [grad for each in optimizers for grad in each.get_main_grads_for_grad_norm()]
    return sum(map(torch.numel, taken)), by_name(trainer.stage, lambda parameter: parameter)


@pytest.mark.parametrize("name", ["300M-like", "6B-like"])
def test_every_gradient_counts_once_in_the_norm(name):
    """Prevents: shards left out, or replicas counted twice, where too small to show in the norm."""
    model = MODELS[name]
    plan = toy_plan(model, stages_of(model), tensor=2, sequence_parallel=True)
    ranks = run_ranks(plan.parallel, gradients_in_norm, plan)
    wholes = [whole(name, [own[name] for _, own in ranks]) for name in ranks[0][1]]
    assert sum(taken for taken, _ in ranks) == sum(map(torch.numel, wholes))


def test_recomputed_equals_one_process():
    """Prevents: recomputation that repeats the exchange between ranks in another order."""
    model = MODELS["6B-like"]
    stages = stages_of(model, 6, vision=(0, 1), language=(0, 1))
    compare_with_one_process(toy_plan(model, stages, tensor=2, sequence_parallel=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(((), 1, False), ((), 2, True), id="tp1-to-tp2"),
        pytest.param(((), 2, True), ((4,), 1, False), id="tp2-to-pp2"),
    ],
)
def test_resumes_under_another_tensor_size(tmp_path, before, after):
    """Prevents: checkpoints whose weights or moments fit one tensor size, or garbage in padding."""
    model = MODELS["6B-like"]
    plans = [
        toy_plan(model, stages_of(model, *cuts), tensor=tensor, sequence_parallel=is_divided)
        for cuts, tensor, is_divided in (before, after)
    ]
    first = 2 if before[1] == 1 else 1
    compare_resumed(tmp_path, (plans[0], first), (plans[1], len(STEPS) - first))


@pytest.mark.parametrize("tensor", [1, 2])
def test_resumes_from_a_vocabulary_padded_otherwise(tmp_path, monkeypatch, tensor):
    """Prevents: checkpoints of before words were padded to 128 a rank that no longer fit."""
    model = MODELS["6B-like"]
    plan = toy_plan(model, stages_of(model), tensor=tensor)
    results, gradients, weights = alone(plan)
    with monkeypatch.context() as earlier:
        least = lambda language, ranks: -(-language.vocab_size // ranks)  # noqa: E731
        earlier.setattr(LanguageConfig, "words_of_rank", least)
        run(plan, STEPS[:1], save=tmp_path)
    ranks = run(plan, STEPS[1:], load=tmp_path, first=1)
    assert_same_training(ranks, plan, (results[1:], gradients[1:], weights))


def answers(links, plan):
    """Likeliest next tokens, and the loss, with padded words of every kind."""
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    stage, found = trainer.stage.eval(), []
    batch = toy_batch(plan.model, [(2, 9), (0, 7), (1, 5)], seed=0)
    asked = replace(batch, labels_L=None, answer_positions_A=torch.arange(batch.tokens))
    for padding in (100.0, -100.0):
        with torch.no_grad():
            stage.head.weight[stage.own_words.count :] = padding
            stage.set_input_tensor(None)
            found.append((stage(asked).tolist(), stage(batch).item()))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp-sp"])
def test_every_rank_gives_the_whole_vocabularys_likeliest_word(sequence_parallel):
    """Prevents: answers from a rank's own words, or words that do not exist."""
    model = MODELS["6B-like"]
    [expected] = run_ranks(
        toy_plan(model, stages_of(model)).parallel, answers, toy_plan(model, stages_of(model))
    )
    assert len(set(expected[0][0])) > 5
    plan = toy_plan(model, stages_of(model), tensor=2, sequence_parallel=sequence_parallel)
    for rank in run_ranks(plan.parallel, answers, plan):
        for (words, loss), (expected_words, expected_loss) in zip(rank, expected, strict=True):
            assert words == expected_words
            assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_bf16_equals_one_process_as_far_as_it_can():
    """Prevents: the exchange of q and k norms from giving another type, or a sum in bf16."""
    model = MODELS["6B-like"]
    plan = toy_plan(model, stages_of(model), tensor=2, sequence_parallel=True)
    ranks = run(plan.model_copy(update={"precision": "bf16"}))
    expected = [loss for loss, _, _ in alone(plan)[0]]
    for results, _, weights in ranks:
        assert [loss for loss, _, _ in results] == pytest.approx(expected, rel=5e-3)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())

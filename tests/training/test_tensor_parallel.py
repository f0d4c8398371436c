"""Tensor and sequence parallelism against one process, and checkpoints between TP sizes."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from tensor_parallel_cases import (
    MODELS,
    OPTIONS,
    STEPS,
    as_one_process,
    assert_same_training,
    batches_of,
    by_name,
    compare_resumed,
    compare_with_one_process,
    run,
    whole,
)
from toy import cut_plan, toy_batch

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.model.config import LanguageConfig

MODEL = MODELS["6B-like"]
IN_PARTS = {"tensor": 2, "sequence_parallel": True}
ONE_KEY = cut_plan(MODELS["one-key"], **IN_PARTS)
# Units of the models: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head. A cut is the position of the first unit after it.
PLANS = {
    "tp2": cut_plan(MODEL, tensor=2),
    "tp2-sp": cut_plan(MODELS["300M-like"], **IN_PARTS),
    "tp2-sp-pp2-head": cut_plan(MODELS["without-qk-norm"], 7, **IN_PARTS),
    "tp2-dp2": cut_plan(MODEL, tensor=2, data=2),
    "pp2-dp2": cut_plan(MODELS["300M-like"], 3, data=2),
    "tp4-sp": cut_plan(MODELS["for-four"], tensor=4, sequence_parallel=True),
    # With more ranks than key-value heads, heads are replicated.
    "tp2-sp-one-key": ONE_KEY,
    "tp4-two-keys": cut_plan(MODELS["two-keys"], tensor=4, recompute={"language": (1,)}),
    "vision-alone": cut_plan(MODEL, **IN_PARTS, frozen=("language", "projector")),
    "all-but-vision": cut_plan(MODEL, **IN_PARTS, frozen=("vision",)),
    "recomputed": cut_plan(MODEL, 6, recompute={"vision": (0, 1), "language": (0, 1)}, **IN_PARTS),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_tensor_parallel_equals_one_process(plan):
    """Prevents weights initialized by shard, padding that affects results, gradients summed twice
    or never, errors hidden in the norm, and recomputation that reorders collectives."""
    compare_with_one_process(plan)


def gradients_in_norm(links, plan):
    """Return the number of gradients in this rank's norm, and its parameters by name."""
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=3)
    batches = list(batches_of(plan.model, 0, STEPS[0]))
    train_step(trainer, MicroBatchStream.of(batches))
    optimizers = trainer.optimizers[0].chained_optimizers
    taken = [grad for optimizer in optimizers for grad in optimizer.get_main_grads_for_grad_norm()]
    return sum(map(torch.numel, taken)), by_name(trainer.stage, lambda parameter: parameter)


@pytest.mark.parametrize("name", ["300M-like", "6B-like", "one-key"])
def test_every_gradient_counts_once_in_the_norm(name):
    """Prevents omitted shards or replicas counted twice, too small to change the norm."""
    plan = cut_plan(MODELS[name], **IN_PARTS)
    ranks = run_ranks(plan.parallel, gradients_in_norm, plan)
    wholes = [whole(name, [own[name] for _, own in ranks]) for name in ranks[0][1]]
    assert sum(taken for taken, _ in ranks) == sum(map(torch.numel, wholes))


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        pytest.param(cut_plan(MODEL), cut_plan(MODEL, **IN_PARTS), 2, id="tp1-to-tp2"),
        pytest.param(cut_plan(MODEL, **IN_PARTS), cut_plan(MODEL, 4), 1, id="tp2-to-pp2"),
        pytest.param(ONE_KEY, cut_plan(MODELS["one-key"]), 1, id="copied-keys-to-tp1"),
    ],
)
def test_resumes_under_another_tensor_size(tmp_path, before, after, first):
    """Prevents checkpoints that load at one TP size only, or with garbage in the padding."""
    compare_resumed(tmp_path, (before, first), (after, len(STEPS) - first))


@pytest.mark.parametrize("tensor", [1, 2])
def test_resumes_from_a_vocabulary_padded_otherwise(tmp_path, monkeypatch, tensor):
    """Prevents losing checkpoints of before the vocabulary was padded to 128 per rank."""
    plan = cut_plan(MODEL, tensor=tensor)
    results, gradients, weights = as_one_process(plan)
    with monkeypatch.context() as earlier:
        least = lambda language, ranks: -(-language.vocab_size // ranks)  # noqa: E731
        earlier.setattr(LanguageConfig, "words_of_rank", least)
        run(plan, STEPS[:1], save=tmp_path)
    ranks = run(plan, STEPS[1:], load=tmp_path, first=1)
    assert_same_training(ranks, plan, (results[1:], gradients[1:], weights))


def likeliest_tokens(links, plan):
    """Return the likeliest next tokens and the loss, with high and low padded logits."""
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
    """Prevents tokens chosen from one rank's vocabulary shard, or from padding."""
    base, plan = cut_plan(MODEL), cut_plan(MODEL, tensor=2, sequence_parallel=sequence_parallel)
    [expected] = run_ranks(base.parallel, likeliest_tokens, base)
    assert len(set(expected[0][0])) > 5
    for rank in run_ranks(plan.parallel, likeliest_tokens, plan):
        for (words, loss), (other_words, other_loss) in zip(rank, expected, strict=True):
            assert words == other_words and loss == pytest.approx(other_loss, rel=1e-5)


def test_bf16_equals_one_process_as_far_as_it_can():
    """Prevents a q/k norm exchange that changes the dtype, and sums in bf16."""
    plan = cut_plan(MODEL, **IN_PARTS)
    ranks = run(plan.model_copy(update={"precision": "bf16"}))
    expected = [loss for loss, _, _ in as_one_process(plan)[0]]
    for results, _, weights in ranks:
        assert [loss for loss, _, _ in results] == pytest.approx(expected, rel=5e-3)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())

"""One matrix for token embedding and head, in one stage or a copy in each of two."""

from dataclasses import asdict, replace

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from ranks import run_ranks
from tensor_parallel_cases import (
    STEPS,
    TIED,
    UNTIED,
    alone,
    batches_of,
    by_name,
    compare_resumed,
    compare_with_one_process,
    gather_gradients,
    run,
)
from toy import OPTIONS, stages_of, toy_plan

from megatron.vlm.checkpoint.files import checkpoint_path
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_weights
from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.model.initialize import global_parameter_name
from megatron.vlm.model.stage import TIED_NAME, tied_copies
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.base.errors import UserError


def copies_by_tensor_rank(ranks, tensor):
    """The shards that should be the same: of every stage that has the matrix and data rank."""
    for first in range(tensor):
        yield [rank[2][TIED_NAME] for rank in ranks[first::tensor] if TIED_NAME in rank[2]]


# Units of the model: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head. A cut is the position of the first unit after it.
@pytest.mark.parametrize(
    ("cuts", "sizes", "holders"),
    [
        pytest.param((), {"tensor": 2}, 1, id="tp2"),
        pytest.param((), {"data": 2}, 2, id="dp2"),
        pytest.param((4,), {}, 1, id="pp2-both-on-the-second"),
        pytest.param((1, 4, 6), {}, 2, id="pp4-embed-on-the-third"),
        # Alone, the head is divided in its middle; the embedding is all in one rank's half.
        pytest.param((7,), {"data": 2}, 4, id="pp2-dp2-head-alone"),
        pytest.param((7,), {"tensor": 2}, 2, id="pp2-tp2-head-alone"),
        pytest.param((5,), {"tensor": 2, "sequence_parallel": True}, 2, id="pp2-tp2-sp"),
    ],
)
def test_split_equals_one_process(cuts, sizes, holders):
    """Prevents: copies that start or drift apart, a gradient of one use only, one summed over the
    wrong stages or data-parallel shards, or a norm that counts the matrix twice."""
    plan = toy_plan(TIED, stages_of(TIED, *cuts), **sizes)
    ranks = compare_with_one_process(plan)
    for copies in copies_by_tensor_rank(ranks, plan.parallel.tensor):
        assert len(copies) == holders
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_bf16_copies_stay_the_same():
    """Prevents: fp32 weights in the optimizer of which one copy counts twice in the norm, or that
    are stepped apart."""
    plan = toy_plan(TIED, stages_of(TIED, 7), data=2).model_copy(update={"precision": "bf16"})
    ranks = run(plan)
    expected = alone(plan)[0]
    for results, _, _ in ranks:
        for (loss, norm, _), (expected_loss, expected_norm, _) in zip(
            results, expected, strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=5e-3)
            assert norm == pytest.approx(expected_norm, rel=3e-2)
    [copies] = copies_by_tensor_rank(ranks, 1)
    assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)


def first_step(links, plan):
    """Loss, norm and gradients of a step, with a head that begins as the embedding is."""
    trainer = build_trainer(plan, links, replace(OPTIONS, clip_grad=0.0), steps=10, seed=3)
    stage = trainer.stage
    if not plan.model.language.tied_head:
        with torch.no_grad():
            stage.head.weight.copy_(stage.embedding.word_embeddings.weight)
    batches = list(batches_of(plan.model, 0, STEPS[0]))
    result = train_step(trainer, MicroBatchStream.of(batches))
    gather_gradients(trainer.model)
    return result.loss, result.grad_norm, by_name(stage, lambda parameter: parameter.main_grad)


def test_gradient_is_the_sum_of_both_uses():
    """Prevents: a matrix that learns from one of its two uses, against a model that has two."""
    [(loss, norm, gradients)], [(untied_loss, _, untied)] = (
        run_ranks(plan.parallel, first_step, plan)
        for plan in (toy_plan(model, stages_of(model)) for model in (TIED, UNTIED))
    )
    head = untied.pop("head.weight")
    assert head.abs().max() > 1e-3 and untied[TIED_NAME].abs().max() > 1e-3
    untied[TIED_NAME] += head
    assert loss == pytest.approx(untied_loss, rel=1e-6)
    assert gradients.keys() == untied.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, untied[name], rtol=1e-5, atol=1e-7, msg=name)
    squares = sum(gradient.square().sum().item() for gradient in untied.values())
    assert norm == pytest.approx(squares**0.5, rel=1e-5)


def stored(links, path):
    return dist_checkpointing.load_plain_tensors(str(path))


SPLITS = {
    "one-stage": ((), {}),
    "two-stages": ((6,), {}),
    "two-pipelines": ((5,), {"data": 2}),
    "two-ranks-a-stage": ((6,), {"tensor": 2}),
}


@pytest.mark.parametrize(
    "order",
    [
        ("two-stages", "one-stage", "two-pipelines"),
        ("two-pipelines", "two-ranks-a-stage", "two-stages"),
    ],
    ids="-".join,
)
def test_resumes_where_the_matrix_is_in_other_stages(tmp_path, order):
    """Prevents: a checkpoint with two matrices, or with the moments of one copy alone."""
    splits = [SPLITS[name] for name in order]
    plans = [toy_plan(TIED, stages_of(TIED, *cuts), **sizes) for cuts, sizes in splits]
    compare_resumed(tmp_path, *((plan, 1) for plan in plans))
    whole = toy_plan(TIED, stages_of(TIED))
    _, _, weights = alone(whole)
    [tensors] = run_ranks(whole.parallel, stored, checkpoint_path(tmp_path, 3))
    states = {name for name in tensors if name.endswith(TIED_NAME)}
    assert states == {TIED_NAME} | {
        f"optimizer.state.{kind}.{TIED_NAME}" for kind in ("param", "exp_avg", "exp_avg_sq")
    }
    assert not [name for name in tensors if "head.weight" in name]
    torch.testing.assert_close(tensors[TIED_NAME], weights[TIED_NAME], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("cuts", "tensor"), [((6,), 1), ((4,), 1), ((6,), 2)])
def test_checkpoint_gives_the_weights_alone(tmp_path, cuts, tensor):
    """Prevents: fine-tuning that starts with the head that was drawn and not the one learned."""
    plan = toy_plan(TIED, stages_of(TIED, 6))
    saved = {name: value for rank in run(plan, STEPS[:1], save=tmp_path) for name, value in
             rank[2].items()}  # fmt: skip
    other = toy_plan(TIED, stages_of(TIED, *cuts), tensor=tensor)
    for rank, parts in enumerate(run_ranks(other.parallel, loaded_weights, other, tmp_path)):
        matrix = parts.get(TIED_NAME)
        if matrix is not None:
            own = rank % tensor * len(matrix)
            expected = saved[TIED_NAME][own : own + len(matrix)]
            assert torch.equal(matrix[: len(expected)], expected)
            assert not matrix[len(expected) :].any()


def loaded_weights(links, plan, directory):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=4)
    assert load_weights(directory, plan, trainer.stages) == 1
    return by_name(trainer.stage, lambda parameter: parameter)


@pytest.mark.parametrize("cuts", [(6,), (4,)], ids=["two-copies", "one"])
def test_frozen_language_part_equals_one_process(cuts):
    """Prevents: an exchange of gradients that are not there, or a frozen matrix that moves."""
    plan = toy_plan(TIED, stages_of(TIED, *cuts)).model_copy(update={"frozen": ("language",)})
    assert TIED_NAME not in alone(plan)[2]
    compare_with_one_process(plan)


def names_of(links, plan, directory):
    """Parameters in the stage, by their global names, after a save without training."""
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    parts = (plan, trainer.stages, trainer.optimizers, trainer.scheduler, asdict(OPTIONS))
    writer = CheckpointWriter(directory, *parts, keep_last=None, asynchronous=False)
    writer.save(1, {})
    writer.finish()
    return [global_parameter_name(trainer.stage, name) for name, _ in trainer.stage.state_dict()
            .items() if not name.endswith("_extra_state")]  # fmt: skip


def load_or_refuse(links, plan, directory):
    trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
    try:
        return load_weights(directory, plan, trainer.stages)
    except UserError as error:
        return str(error)


def test_checkpoints_know_whether_the_head_is_tied(tmp_path):
    """Prevents: a head that is dropped or invented by a load, and checkpoints that cannot be read
    since models can be tied."""
    tied, untied = (toy_plan(model, stages_of(model)) for model in (TIED, UNTIED))
    assert tied_copies(tied) == tied_copies(untied) == ()
    [names] = run_ranks(untied.parallel, names_of, untied, tmp_path)
    assert len(set(names)) == len(names) and "head.weight" in names
    [message] = run_ranks(tied.parallel, load_or_refuse, tied, tmp_path)
    assert "language.tied_head is False there and True in the plan" in message
    common_file = checkpoint_path(tmp_path, 1) / COMMON_STATE_FNAME
    common = torch.load(common_file, weights_only=False)
    del common["omnibal"]["model"]["language"]["tied_head"]
    torch.save(common, common_file)
    assert run_ranks(untied.parallel, load_or_refuse, untied, tmp_path) == [1]
    [message] = run_ranks(tied.parallel, load_or_refuse, tied, tmp_path)
    assert "language.tied_head is False there and True in the plan" in message

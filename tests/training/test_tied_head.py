"""One matrix for token embedding and head, in one stage or copied in two stages."""

import pytest
import torch
from checkpoint_cases import content, refusals
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from ranks import run_ranks
from tensor_parallel_cases import (
    OPTIONS,
    STEPS,
    TIED,
    UNTIED,
    as_one_process,
    compare_resumed,
    compare_with_one_process,
    run,
)
from toy import stages_of, toy_plan

from megatron.vlm.checkpoint.run_folders import write_checksums
from megatron.vlm.model.stage import TIED_NAME, tied_copies
from omnibal.job.runlog import checkpoint_path
from omnibal.model.parallel import Parallel

FROZEN = {"frozen": ("language",)}


def tied_plan(*cuts, frozen=(), **sizes):
    return toy_plan(TIED, stages_of(TIED, *cuts), **sizes).model_copy(update={"frozen": frozen})


def copies_by_tensor_rank(ranks, tensor):
    """Yield the copies of the tied matrix per tensor-parallel rank; they should be equal."""
    for first in range(tensor):
        yield [rank[2][TIED_NAME] for rank in ranks[first::tensor] if TIED_NAME in rank[2]]


# Units of the model: 0 vision embed, 1-2 vision layers, 3 projector, 4 language embed,
# 5-6 language layers, 7 head. A cut is the position of the first unit after it.
@pytest.mark.parametrize(
    ("cuts", "sizes", "holders"),
    [
        pytest.param((6,), FROZEN, 0, id="pp2-frozen-two-copies"),
        pytest.param((4,), FROZEN, 0, id="pp2-frozen"),
        pytest.param((), {"tensor": 2}, 1, id="tp2"),
        pytest.param((), {"data": 2}, 2, id="dp2"),
        pytest.param((4,), {}, 1, id="pp2-both-on-the-second"),
        pytest.param((1, 4, 6), {}, 2, id="pp4-embed-on-the-third"),
        # A head-only stage is split in the middle. The embedding is in one rank's half.
        pytest.param((7,), {"data": 2}, 4, id="pp2-dp2-head-alone"),
        pytest.param((7,), {"tensor": 2}, 2, id="pp2-tp2-head-alone"),
        pytest.param((5,), {"tensor": 2, "sequence_parallel": True}, 2, id="pp2-tp2-sp"),
    ],
)
def test_split_equals_one_process(cuts, sizes, holders):
    """Prevents diverging copies, gradients of one use only or summed over wrong stages or shards, a
    matrix counted twice in the norm, exchanges without gradients, and frozen copies that move."""
    plan = tied_plan(*cuts, **sizes)
    ranks = compare_with_one_process(plan)
    for copies in copies_by_tensor_rank(ranks, plan.parallel.tensor):
        assert len(copies) == holders  # trained copies
        assert all(torch.equal(copy, copies[0]) for copy in copies)


def test_bf16_copies_stay_the_same():
    """Prevents fp32 master copies that are counted twice in the norm or updated differently."""
    plan = tied_plan(7, data=2).model_copy(update={"precision": "bf16"})
    ranks = run(plan)
    expected_losses, expected_norms, _ = zip(*as_one_process(plan)[0], strict=True)
    for results, _, _ in ranks:
        losses, norms, _ = zip(*results, strict=True)
        assert losses == pytest.approx(expected_losses, rel=5e-3)
        assert norms == pytest.approx(expected_norms, rel=3e-2)
    [copies] = copies_by_tensor_rank(ranks, 1)
    assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.parametrize(
    "plans",
    [
        pytest.param((tied_plan(6), tied_plan(), tied_plan(5, data=2)), id="pp2-one-pp2-dp2"),
        pytest.param((tied_plan(5, data=2), tied_plan(6, tensor=2), tied_plan(6)), id="pp2-tp2"),
    ],
)
def test_resumes_where_the_matrix_is_in_other_stages(tmp_path, plans):
    """Prevents checkpoints with two matrices, or with the moments of one copy."""
    compare_resumed(tmp_path, *((plan, 1) for plan in plans))
    _, _, weights = as_one_process(tied_plan())
    [(tensors, _)] = run_ranks(Parallel(pipeline=1), content, checkpoint_path(tmp_path, 3))
    states = {name for name in tensors if name.endswith(TIED_NAME)}
    assert states == {TIED_NAME} | {
        f"optimizer.state.{kind}.{TIED_NAME}" for kind in ("param", "exp_avg", "exp_avg_sq")
    }
    assert not [name for name in tensors if "head.weight" in name]
    torch.testing.assert_close(tensors[TIED_NAME], weights[TIED_NAME], rtol=1e-4, atol=1e-6)


def test_checkpoints_know_whether_the_head_is_tied(tmp_path):
    """Prevents loads that drop or invent a head, and failing on checkpoints without `tied_head`."""
    tied, untied = tied_plan(), toy_plan(UNTIED, stages_of(UNTIED))
    assert tied_copies(tied) == tied_copies(untied) == ()
    [(_, _, weights)] = run(untied, STEPS[:1], save=tmp_path)
    assert "head.weight" in weights
    message = "language.tied_head is False there and True in the plan"
    [told] = run_ranks(tied.parallel, refusals, tied, [tmp_path])
    assert all(message in line for line in told)
    common_file = checkpoint_path(tmp_path, 1) / COMMON_STATE_FNAME
    common = torch.load(common_file, weights_only=False)
    del common["omnibal"]["model"]["language"]["tied_head"]
    torch.save(common, common_file)
    write_checksums(common_file.parent, {})
    assert run_ranks(untied.parallel, refusals, untied, [tmp_path], OPTIONS, 10) == [[None, None]]
    [told] = run_ranks(tied.parallel, refusals, tied, [tmp_path])
    assert all(message in line for line in told)

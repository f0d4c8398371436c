"""Expert parallelism: which sizes are possible, and which ranks share or hold the same experts."""

from dataclasses import replace

import numpy as np
import pytest
from expert_cases import expert_model
from plan_cases import MODEL
from pydantic import ValidationError

from omnibal.cli.options import SizeOptions
from omnibal.config import load_cluster
from omnibal.data.deal import deal_apart, deal_in_step
from omnibal.data.empty_slots import empty_slots
from omnibal.errors import UserError
from omnibal.parallel import Parallel, check_parallel, expert_sizes

CLUSTER = load_cluster("h100-80g")


def parallel_of(tensor: int, pipeline: int, data: int, expert: int) -> Parallel:
    return Parallel(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        expert=expert,
        sequence_parallel=tensor > 1,
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 1, 3, 3), "does not divide the 8 experts"),
        ((1, 2, 2, 2), None),
        ((1, 1, 4, 4), None),
    ],
)
def test_experts_are_shared_out_evenly(sizes, words):
    """Prevents a plan whose ranks would hold different numbers of experts."""
    if words is None:
        check_parallel(expert_model(), parallel_of(*sizes), CLUSTER)
        return
    with pytest.raises(UserError, match=words):
        check_parallel(expert_model(), parallel_of(*sizes), CLUSTER)


def test_experts_need_sequence_parallelism_and_nothing_of_their_width():
    """Prevents tensor ranks from routing the same tokens twice; experts of width 5 are whole."""
    model = expert_model()
    language = model.language.model_copy(update={"kv_heads": 2})
    model = model.model_copy(update={"language": language})
    check_parallel(model, parallel_of(2, 1, 1, 1), CLUSTER)
    with pytest.raises(UserError, match="without sequence parallelism"):
        check_parallel(model, Parallel(tensor=2, pipeline=1), CLUSTER)


def test_dense_models_have_no_experts_to_share_out():
    """Prevents --ep from being ignored."""
    assert expert_sizes(MODEL, 2, 8) == [1]
    with pytest.raises(UserError, match="no experts to share out: leave --ep out"):
        check_parallel(MODEL, Parallel(pipeline=1, data=2, expert=2), CLUSTER)


def test_sizes_that_do_not_nest_are_refused():
    """Prevents groups that hold parts of several tensor-parallel groups."""
    with pytest.raises(ValidationError, match="must divide tensor size 2 or be a multiple"):
        Parallel(tensor=2, pipeline=1, data=3, expert=3)
    options = SizeOptions(tp=2, dp=3, ep=3)
    with pytest.raises(UserError, match="--ep 3 was given with --tp 2 --dp 3"):
        options.parallel()
    assert replace(options, ep=6).parallel() == parallel_of(2, 1, 3, 6)


def test_all_expert_sizes_are_found():
    """Prevents a size from being left out of the search, or tried although it cannot be."""
    model = expert_model()
    for tensor, data in [(1, 1), (1, 8), (2, 3), (4, 6), (2, 8), (8, 2)]:
        possible = []
        for expert in range(1, tensor * data + 1):
            try:
                parallel = parallel_of(tensor, 1, data, expert)
            except ValidationError:
                continue
            if 8 % expert == 0:
                possible.append(parallel.expert)
        assert expert_sizes(model, tensor, data) == possible


def test_sizes_are_named():
    """Prevents an expert size that tables and options do not show, and one where there is none."""
    parallel = parallel_of(2, 2, 4, 4)
    assert parallel.options == "--tp 2 --pp 2 --dp 4 --ep 4"
    assert parallel.text == "TP 2 x PP 2 x DP 4, EP 4"
    assert str(parallel) == "tensor 2 x pipeline 2 x data 4, expert 4"
    assert Parallel(pipeline=2).options == "--tp 1 --pp 2 --dp 1"
    assert "expert" not in Parallel(pipeline=2).place(1)


@pytest.mark.parametrize("in_step", [1, 2, 3, 6])
def test_ranks_in_step_have_equally_many_micro_batches(in_step):
    """Prevents a rank that waits in an exchange for others which have nothing left to run."""
    rng = np.random.default_rng(in_step)
    counts = rng.integers(0, 4, (5, 6))
    counts[3] = 0
    step, rank = (np.repeat(each.ravel(), counts.ravel()) for each in np.indices(counts.shape))
    empty = empty_slots(step * 2, rank, ranks=6, in_step=in_step)
    expected = [
        (2 * s, r, slot)
        for s, of_step in enumerate(counts)
        for r in range(6)
        for slot in range(of_step[r], max(of_step[r // in_step * in_step :][:in_step]))
    ]
    assert [*zip(empty.step, empty.dp_rank, empty.slot, strict=True)] == expected


@pytest.mark.parametrize(("dp", "in_step", "size"), [(4, 2, 13), (6, 3, 12), (8, 8, 20), (4, 2, 3)])
def test_ranks_in_step_have_like_packs_in_a_slot(dp, in_step, size):
    """Prevents packs that are lost or doubled, groups with empty slots that need none, and slots in
    which ranks of a group wait longer than where ranks are dealt to alone."""
    rng = np.random.default_rng(size)
    steps = 5
    rows = rng.permutation(steps * size).reshape(steps, size)
    items = rng.integers(0, 3, rows.size)
    load = 10 * items + rng.exponential(1, rows.size)
    found = deal_in_step(rows, items, load, dp, in_step)
    waits = []
    for dealt in (found, deal_apart(rows, items, load, dp)):
        assert dealt.shape == (steps, dp, -(-size // dp))
        for step in range(steps):
            assert sorted(dealt[step][dealt[step] >= 0].tolist()) == sorted(rows[step].tolist())
        assert (np.diff((dealt >= 0).astype(int), axis=2) <= 0).all(), "a gap between packs"
        groups = np.where(dealt < 0, 0.0, load[dealt]).reshape(steps, dp // in_step, in_step, -1)
        waits.append((groups.max(axis=2) * in_step - groups.sum(axis=2)).sum())
    assert waits[0] <= waits[1]
    counts = (found >= 0).sum(axis=2).reshape(steps, -1, in_step)
    with_empty = (counts.max(axis=2) > counts.min(axis=2)).sum(axis=1)
    assert (with_empty == (size % in_step > 0)).all()

"""Ranks of expert parallelism are those of Megatron-core's groups."""

import pytest
from megatron.core.parallel_state import RankGenerator

from omnibal.model.parallel import Parallel


@pytest.mark.parametrize("sizes", [(1, 2, 4, 2), (2, 2, 4, 4), (4, 1, 2, 2), (2, 2, 2, 4)])
def test_expert_groups_are_megatrons(sizes):
    """Prevents ranks from being in other groups than those that Megatron-core makes."""
    parallel = Parallel(
        tensor=sizes[0],
        pipeline=sizes[1],
        data=sizes[2],
        expert=sizes[3],
        sequence_parallel=sizes[0] > 1,
    )
    groups = RankGenerator(
        tp=1,
        ep=parallel.expert,
        dp=parallel.expert_data,
        pp=parallel.pipeline,
        cp=1,
        order="tp-cp-ep-dp-pp",
    )
    ranks = range(parallel.world_size)
    assert {tuple(parallel.expert_peers(rank)) for rank in ranks} == set(
        map(tuple, groups.get_ranks("ep"))
    )
    assert {tuple(parallel.expert_copies(rank)) for rank in ranks} == set(
        map(tuple, groups.get_ranks("dp"))
    )
    for rank in ranks:
        held = [
            expert
            for peer in parallel.expert_peers(rank)
            for expert in [*parallel.experts_of(peer, 8)]
        ]
        assert held == [*range(8)]
        assert parallel.place(rank)["expert"] == list(parallel.expert_peers(rank)).index(rank)
        data = {parallel.place(peer)["data"] for peer in parallel.expert_peers(rank)}
        assert len(data) == parallel.lockstep_ranks

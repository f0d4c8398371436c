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
    for group in groups.get_ranks("dp"):
        places = [parallel.place(rank) for rank in group]
        assert len({(place["pipeline"], place["expert"]) for place in places}) == 1
    for group in groups.get_ranks("ep"):
        assert [parallel.place(rank)["expert"] for rank in group] == [*range(parallel.expert)]
        assert len({parallel.place(rank)["data"] for rank in group}) == parallel.lockstep_ranks

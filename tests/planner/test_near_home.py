"""Items encoded on the node that needs their features, against all possible assignments."""

import numpy as np
import pytest

from omnibal.model.data_parallel_encoders import nodes_of_groups
from omnibal.model.parallel import Parallel
from omnibal.packing.items import Homes, items_at_home, share_items

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("gpus_per_node", [1, 3, 8])
def test_ranks_are_on_the_nodes_of_megatrons_order(gpus_per_node: int) -> None:
    """Prevents item shares computed with wrong nodes of ranks."""
    sizes = Parallel(tensor=2, pipeline=3, data=4)
    found = nodes_of_groups(sizes, 2, gpus_per_node)
    assert found.shape == (2, 12)
    for rank in range(sizes.world_size):
        place = sizes.place(rank)
        group, pipeline = divmod(place["data"], 2)
        number = (pipeline * 3 + place["pipeline"]) * 2 + place["tensor"]
        assert found[group, number] == rank // gpus_per_node


@pytest.mark.parametrize("seed", range(60))
def test_no_dealing_of_these_shares_keeps_more_items_on_their_node(seed: int) -> None:
    """Prevents needless feature transfers between nodes, and uneven shares."""
    rng = np.random.default_rng(seed)
    # Node of every rank in a group of a random job.
    pipelines, blocks = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    tensor, pipeline = (int(size) for size in rng.integers(1, 3, 2))
    sizes = Parallel(tensor=tensor, pipeline=pipeline, data=pipelines * blocks)
    of_groups = nodes_of_groups(sizes, pipelines, int(rng.integers(1, 5)))
    node, of_pipeline = of_groups[rng.integers(0, blocks)], tensor * pipeline
    home = np.sort(rng.integers(0, pipelines, 4))
    items = rng.integers(0, 3, 4)
    given = {"pipelines": pipelines, "ranks_of_pipeline": of_pipeline, "item_ms": {"vision": 1.0}}
    found = share_items({"vision": items}, home, **given, node=node)["vision"]
    anywhere = share_items({"vision": items}, home, **given)["vision"]
    ranks = len(node)
    share = np.bincount(found.rank, found.count, ranks)
    np.testing.assert_array_equal(share, np.bincount(anywhere.rank, anywhere.count, ranks))
    encoded = sorted(
        (pack, number)
        for pack, first, count in zip(found.pack, found.first, found.count, strict=True)
        for number in range(first, first + count)
    )
    assert encoded == [(pack, number) for pack in range(4) for number in range(items[pack])]
    target = node[::of_pipeline]
    at_home = int(found.count[node[found.rank] == target[home[found.pack]]].sum())
    states: dict[tuple[int, ...], int] = {tuple(share.astype(int).tolist()): 0}
    for pack in range(4):
        for _ in range(items[pack]):
            after: dict[tuple[int, ...], int] = {}
            for left, kept in states.items():
                for rank in np.flatnonzero(left).tolist():
                    key = (*left[:rank], left[rank] - 1, *left[rank + 1 :])
                    gain = int(node[rank] == target[home[pack]])
                    after[key] = max(after.get(key, 0), kept + gain)
            states = after
    assert at_home == max(states.values())
    # The planner's count, without assigning items to ranks.
    held = np.bincount(home, items, pipelines).astype(int)
    homes = Homes.from_nodes(node[None], of_pipeline)
    own, near, of_pipelines = items_at_home(held, share.astype(int), homes)
    is_near = node[found.rank] == target[home[found.pack]]
    is_own = is_near & (found.rank // of_pipeline == home[found.pack])
    np.testing.assert_array_equal(own, np.bincount(found.rank, found.count * is_own, ranks))
    np.testing.assert_array_equal(near, np.bincount(found.rank, found.count * is_near, ranks))
    by_home = np.bincount(home[found.pack], found.count * is_near, pipelines)
    np.testing.assert_array_equal(of_pipelines, by_home)


def test_samples_of_different_groups_keep_to_their_own_nodes() -> None:
    """Prevents confusing the nodes of groups when their steps are dealt together."""
    homes = Homes.from_nodes(np.array([[2, 2, 3, 3], [0, 1, 0, 1]]), 2)
    assert homes.pipeline.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({*homes.node[:4]} | {*homes.node[4:]}) == 4
    assert homes.home.tolist() == homes.node[::2].tolist()
    assert homes.is_home.tolist() == [True] * 5 + [False, True, False]

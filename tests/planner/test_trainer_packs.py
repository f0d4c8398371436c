"""Packs as other trainers form them: by next fit, of one medium, in full steps."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal.data.next_fit import next_fit_packs


def packed_one_by_one(tokens: list[int], packing_length: int) -> list[list[int]]:
    """Restates `calculate_matched_group` with `sequential` of ms-swift 4.6.0: one open pack."""
    packs: list[list[int]] = []
    pack: list[int] = []
    for each in tokens:
        if pack and sum(pack) + each > packing_length:
            packs.append(pack)
            pack = []
        pack = [*pack, each]
        if sum(pack) >= packing_length:
            packs.append(pack)
            pack = []
    return [*packs, pack] if pack else packs


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 12)), packing_length=st.integers(1, 15))
def test_next_fit_is_the_trainers(tokens, packing_length):
    """Prevents packs that are foreseen otherwise than ms-swift makes them, also of samples that
    fill or exceed a pack."""
    bounds = next_fit_packs(np.array(tokens, np.int32), packing_length).tolist()
    packs = [tokens[first:end] for first, end in pairwise(bounds)]
    assert packs == packed_one_by_one(tokens, packing_length)

"""The joint search over packs of several levels, against walks of all candidates."""

from collections.abc import Sequence

import numpy as np
import pytest
from level_cases import WalkedStage, every_candidate, level_case, walked_peak, walked_step_ms

from omnibal.errors import UserError
from omnibal.pipeline.level_costs import side_by_side
from omnibal.pipeline.partition import least_peak_of_splits, search_stages
from omnibal.pipeline.stage import Stage
from omnibal.pipeline.stage_memory import GIB, stage_memories
from omnibal.pipeline.units import check_stages, recomputed_counts, stage_units
from omnibal.units import UnitKind


def walked(kinds: Sequence[UnitKind], stages_at: Sequence[Sequence[Stage]]) -> list[WalkedStage]:
    """The planner's stages, as the walks take them."""
    found = []
    for at_levels in zip(*stages_at, strict=True):
        again = [recomputed_counts(kinds, stage).tolist() for stage in at_levels]
        names = [kind.name for kind in kinds]
        found.append(
            WalkedStage(
                units=stage_units(kinds, at_levels[0]),
                again=tuple(dict(zip(names, counts, strict=True)) for counts in again),
            )
        )
    return found


@pytest.mark.parametrize(
    ("towers", "most", "contexts", "ranks", "cases"),
    [
        ("language", 4, (1, 2), 2, 40),
        ("language", 3, (1, 2, 4), 4, 20),
        ("language", 4, (1, 1), 2, 20),
        ("vision language", 3, (1, 4), 4, 20),
    ],
)
def test_the_search_over_levels_equals_brute_force(
    towers: str, most: int, contexts: Sequence[int], ranks: int, cases: int
):
    """Prevents a split or recomputed set that is not the best, a level's layers taken for
    another's, and ranks that share a pack simulated as if they did not wait for each other."""
    rng = np.random.default_rng(0)
    unlike = infeasible = 0
    for _ in range(cases):
        costs, model, packs, p = level_case(rng, towers, most, contexts, ranks)
        cost = side_by_side(costs)
        candidates = list(every_candidate(costs[0], model, p, len(contexts)))
        peaks = np.array([walked_peak(costs, each, packs) for each in candidates])
        low, high = peaks.min(), peaks.max()
        assert least_peak_of_splits(cost, model, packs, p) == pytest.approx(low, rel=1e-9)
        cap = rng.uniform(low - 0.2 * (high - low), low + 0.8 * (high - low))
        if cap < low:
            infeasible += 1
            with pytest.raises(UserError, match="more than the memory cap"):
                search_stages(cost, model, packs, p, cap)
            cap = low * (1 + 1e-9)
        times = [
            walked_step_ms(costs, each, packs)
            for each, peak in zip(candidates, peaks, strict=True)
            if peak <= cap
        ]
        result = search_stages(cost, model, packs, p, cap)
        found = walked(cost.kinds, result.stages_at)
        for stages in result.stages_at:
            check_stages(model, stages)
        assert result.step_ms == pytest.approx(walked_step_ms(costs, found, packs), rel=1e-9)
        assert result.step_ms == pytest.approx(min(times), rel=2e-9)
        assert result.lower_bound_ms == result.step_ms
        peak = walked_peak(costs, found, packs)
        assert peak <= cap * (1 + 1e-9)
        memories = stage_memories(cost, result.stages_at, packs)
        assert max(memory.peak_gib for memory in memories) * GIB == pytest.approx(peak)
        unlike += len(set(map(str, result.stages_at))) > 1
    assert unlike >= cases / 4
    assert infeasible

"""Balance of phases, against a walk over every step."""

import numpy as np
import pytest
from encoder_cases import choice_of

from omnibal.model.data_parallel_encoders import DataParallelEncoders
from omnibal.packing.balance import balance
from omnibal.packing.items import share_items
from omnibal.packing.phase_balance import PhaseBalance, encoder_balances, language_balance

pytestmark = pytest.mark.quick
ITEM_MS = {"vision": 5.0, "audio": 8.0}


def balances_of(
    held: dict[str, np.ndarray], ranks_of_pipeline: int, dp_encoders: DataParallelEncoders | None
) -> list[PhaseBalance]:
    """Return the balance of encoders that take single items of samples."""
    return encoder_balances(held, ranks_of_pipeline, dp_encoders, {}, np.zeros(0, np.int64))


def dp_encoders(pipelines: int) -> DataParallelEncoders:
    return choice_of(pipelines, 4, dict.fromkeys(ITEM_MS, 0), item_ms=ITEM_MS)


def held_items(steps: int, ranks: int) -> dict[str, np.ndarray]:
    """Return items of an uneven mixture: some pipelines have only one kind in a step."""
    rng = np.random.default_rng(steps)
    return {name: rng.poisson(6, (steps, ranks)) * rng.integers(0, 2, (steps, ranks))
            for name in ITEM_MS}  # fmt: skip


@pytest.mark.parametrize("pipelines", [1, 2, 4])
def test_data_parallel_encoders_as_each_step_is_dealt(pipelines: int) -> None:
    """Prevents a table of other shares than ranks encode, or a bound above them."""
    steps, ranks, of_pipeline = 7, 4, 3
    held = held_items(steps, ranks)
    found = {each.phase: each for each in balances_of(held, of_pipeline, dp_encoders(pipelines))}
    before, busiest = (dict.fromkeys((*ITEM_MS, "encoders"), 0.0) for _ in range(2))
    for step in range(steps):
        # A pipeline's own ranks take its items in turn.
        own = {
            name: np.array([len(range(rank, items, of_pipeline))
                            for items in held[name][step] for rank in range(of_pipeline)])
            for name in ITEM_MS
        }  # fmt: skip
        loads = dict.fromkeys(ITEM_MS, np.zeros(0))
        for group in range(0, ranks, pipelines):
            runs = share_items(
                {name: held[name][step, group : group + pipelines] for name in ITEM_MS},
                np.arange(pipelines),
                pipelines=pipelines,
                ranks_of_pipeline=of_pipeline,
                item_ms=ITEM_MS,
            )
            for name, each in runs.items():
                counts = np.bincount(each.rank, each.count, pipelines * of_pipeline)
                loads[name] = np.append(loads[name], counts)
        for most, of_ranks in ((before, own), (busiest, loads)):
            for name in ITEM_MS:
                most[name] += of_ranks[name].max()
            most["encoders"] += sum(ITEM_MS[name] * of_ranks[name] for name in ITEM_MS).max()
    means = {name: held[name].sum() / (ranks * of_pipeline) for name in ITEM_MS}
    means["encoders"] = sum(ITEM_MS[name] * means[name] for name in ITEM_MS)
    for name, each in found.items():
        assert each.imbalance_before == pytest.approx(before[name] / means[name])
        assert each.imbalance_after == pytest.approx(busiest[name] / means[name])
        assert 1 <= each.bound <= min(each.imbalance_after, each.imbalance_before) + 1e-9
    if pipelines == ranks:
        assert found["encoders"].imbalance_after < 0.7 * found["encoders"].imbalance_before


def test_bounds_of_known_cases() -> None:
    """Prevents a bound that is valid but useless."""
    # Three images on two ranks take two images' time, which leaves time for short recordings.
    for audio, least_ms, sum_ms in ((0, 10, 15), (1, 11.5, 23), (4, 23.5, 47)):
        held = {"vision": np.array([[3]]), "audio": np.array([[audio]])}
        found = {each.phase: each.bound for each in balances_of(held, 2, dp_encoders(1))}
        assert found["vision"] == pytest.approx(4 / 3)
        assert found["encoders"] == pytest.approx(2 * least_ms / sum_ms)


def test_encoders_in_the_pipeline_are_those_of_pipelines() -> None:
    """Prevents claiming a balance for encoders inside the pipeline."""
    held = {"vision": np.array([[4, 0], [1, 3]])}
    (found,) = balances_of(held, 8, None)
    assert found.imbalance_before == (4 + 3) / (2 + 2)
    assert found.imbalance_after is None
    assert found.bound == 1.0
    assert balances_of({"vision": np.zeros((2, 3), int)}, 1, None)[0].bound == 1.0


def test_language_model_as_packs_lie() -> None:
    """Prevents a bound above some assignment of these packs."""
    rng = np.random.default_rng(0)
    step = np.repeat([3, 5], 8)
    rank, load_ms = np.tile(np.repeat(np.arange(4), 2), 2), rng.random(16)
    found = language_balance(step, rank, load_ms, 4)
    busiest = best = mean = 0.0
    for each in (3, 5):
        packs_ms = load_ms[step == each]
        dealt = np.bincount(rank[step == each], packs_ms, 4)
        busiest, mean = busiest + dealt.max(), mean + dealt.mean()
        best += np.bincount(balance(packs_ms, 4), packs_ms, 4).max()
    assert found.imbalance_before == pytest.approx(busiest / mean)
    assert found.bound <= best / mean
    assert found.imbalance_after is None

"""Time to read a step's data, and warnings about it before training."""

import numpy as np
import pytest
from cli_cases import PLAN, run
from plan_cases import MODEL, alter, request
from profile_cases import measure

from omnibal.base.files import write_json_model
from omnibal.cost.profile import ReadingMeasurement
from omnibal.cost.source import CostSource
from omnibal.job.planner import make_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.pipeline.loader_time import StageReading, slow_reading, too_few_loaders

pytestmark = pytest.mark.quick


def reading(factor: float = 1.0, **changes) -> ReadingMeasurement:
    fields = {"samples": 50, "item_ms": {"tiles": 2.0 * factor}, "token_ms": 0.01 * factor}
    return ReadingMeasurement(**fields | {"cores": 2, "is_shared": True} | changes)


def plan_with(read: ReadingMeasurement | None, **changes):
    cost_source = CostSource(measure(reading=read))
    return make_plan(alter(request(), cost_source=cost_source, **changes))


@pytest.fixture(scope="module")
def free():
    return plan_with(None)


@pytest.fixture(scope="module")
def fitting():
    return plan_with(reading(1e-3))


def per_step_ms(result, read: ReadingMeasurement) -> np.ndarray:
    """Return the reading time of each stage's rank, pack by pack. [steps, p]"""
    (packs, lengths), stages = result.data, result.plan.stages
    found = np.zeros((packs.steps, len(stages)))
    for row in range(len(packs)):
        samples = packs.packs[row]
        tiles, tokens = lengths.column("tiles")[samples].sum(), lengths.tokens[samples].sum()
        for index, stage in enumerate(stages):
            words = set(map(str, stage.units))
            ms = read.item_ms["tiles"] * tiles if "vision embed" in words else 0.0
            ms += read.token_ms * tokens if words & {"language embed", "head"} else 0.0
            found[packs.step[row], index] += ms / result.plan.parallel.data
    return found


def test_reading_that_fits_beside_changes_nothing(free, fitting):
    """Prevents steps prolonged by loader processes that have idle cores."""
    free, found = free.plan.prediction, fitting.plan.prediction
    assert free.reading is None and "reading" not in free.model_dump()
    assert (found.step_ms, found.lost, found.stages) == (free.step_ms, free.lost, free.stages)
    expected = per_step_ms(fitting, reading(1e-3)).mean(axis=0)
    assert found.reading.stage_ms == pytest.approx(expected)
    assert slow_reading(found) is None and slow_reading(free) is None
    assert too_few_loaders(found, 1) is None and too_few_loaders(free, 0) is None


@pytest.mark.parametrize("is_shared", [True, False])
def test_reading_that_binds_is_the_step(free, is_shared):
    """Prevents a prediction without reading time, and no warning about it."""
    read, free = reading(1e4, is_shared=is_shared), free.plan.prediction
    result = plan_with(read)
    found = result.plan.prediction
    ranks = min(result.plan.parallel.world_size, result.plan.cluster.gpus_per_node)
    taken_ms = per_step_ms(result, read).sum(axis=1).mean()
    if is_shared:
        taken_ms += sum(1 - stage.wait_fraction for stage in free.stages) * free.step_ms
    expected_ms = taken_ms / len(result.plan.stages) * ranks / read.cores
    assert found.step_ms == pytest.approx(expected_ms)
    assert found.reading.cores_ms == pytest.approx(expected_ms)
    assert sum(found.lost.model_dump().values()) == pytest.approx(found.step_ms)
    assert found.lost.reading_ms == pytest.approx(found.step_ms - free.step_ms)
    assert f"a step takes {found.step_ms:,.0f} ms where {free.step_ms:,.0f}" in slow_reading(found)


def test_loaders_that_do_not_keep_up_are_named(fitting):
    """Prevents a run that silently waits for its only loader process."""
    found = fitting.plan.prediction

    def warning(share: float, workers: int) -> str | None:
        """Return the warning if a rank of the first stage reads for this share of a step."""
        slow = found.reading.model_copy(update={"stage_ms": (share * found.step_ms, 0.0)})
        return too_few_loaders(found.model_copy(update={"reading": slow}), workers)

    for workers in (1, 2):
        assert f"a rank of stage 0 reads for {2.5 * found.step_ms:,.0f} ms" in warning(2.5, workers)
        assert warning(2.5, workers).endswith("give --num-workers 3 or more")
    assert warning(2.5, 3) is None
    # Without loader processes, the thread reads only while the stage waits.
    waits = found.stages[0].wait_fraction
    assert warning(waits - 0.01, 0) is None
    assert warning(waits + 0.05, 0).endswith("give --num-workers 1 or more")


def test_data_parallel_encoders_are_read_for_by_all(free):
    """Prevents counting items for the first stage only, or in full on every rank."""
    stages, names = free.plan.stages, ("fixed", "tiles", "tokens")
    others = len(stages) - 1
    for is_shared, items_ms in ((True, [1.0] + [1.0] * others), (False, [2.0] + [0.0] * others)):
        found = StageReading.build(
            reading(), MODEL, stages, names, has_data_parallel_encoders=is_shared, ranks=2
        )
        assert found.ms[1].tolist() == items_ms
        assert found.cores_per_rank == 1


def test_ranks_that_share_packs_read_their_parts():
    """Prevents counting packs in full on each context-parallel rank, or in a wrong column."""
    levels = (
        Level(caps=Caps.of(tiles=4, tokens=256)),
        Level(caps=Caps.of(tiles=8, tokens=512), context=2),
    )
    read = reading(1e-3)
    result = plan_with(read, levels=levels)
    packs, _ = result.data
    assert result.plan.has_shared_packs
    ranks = packs.steps * result.plan.parallel.data
    tiles_ms = read.item_ms["tiles"] * packs.column("tiles").sum() / ranks
    tokens_ms = read.token_ms * packs.tokens.sum() / ranks
    reads_text = [
        stage.holds("language embed") or stage.holds("head") for stage in result.plan.stages
    ]
    expected = tokens_ms * np.array(reads_text) + tiles_ms * np.array([True, False])
    assert result.plan.prediction.reading.stage_ms == pytest.approx(expected)


@pytest.mark.parametrize(("factor", "is_told"), [(1e-3, False), (1e4, True)])
def test_plan_and_check_say_that_reading_binds(capsys, lengths_file, tmp_path, factor, is_told):
    """Prevents noticing slow data only in training."""
    write_json_model(measure(reading=reading(factor)), tmp_path / "p.json")
    asked = f"{PLAN} --precision fp32 --lengths {lengths_file} --profile {tmp_path}/p.json"
    for command in (f"{asked} -o {tmp_path}/plan", f"check {tmp_path}/plan"):
        run(command)
        said = "".join(capsys.readouterr())
        assert ("note: data cannot be read as fast as it is trained" in said) == is_told

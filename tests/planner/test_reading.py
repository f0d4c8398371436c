"""What reading the data takes of a step, and what is said of it before training."""

import numpy as np
import pytest
from cli_cases import run
from plan_cases import MODEL, changed, example_lengths, request
from profile_cases import measured

from omnibal.cost.profile import Measured, write_profile
from omnibal.cost.source import ReadingMeasurement
from omnibal.data.lengths import write_lengths
from omnibal.job.check import check_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.pipeline.reading import StageReading, slow_reading, too_few_loaders

pytestmark = pytest.mark.quick


def reading(factor: float = 1.0, **changes) -> ReadingMeasurement:
    fields = {"samples": 50, "item_ms": {"tiles": 2.0 * factor}, "token_ms": 0.01 * factor}
    return ReadingMeasurement(**fields | {"cores": 2, "is_shared": True} | changes)


def planned(read: ReadingMeasurement | None):
    return make_plan(changed(request(), cost_source=Measured(measured(reading=read))))


def per_step_ms(result, read: ReadingMeasurement) -> np.ndarray:
    """Reading by each stage's rank, pack by pack. [steps, p]"""
    packs, lengths = result.data
    found = np.zeros((packs.steps, len(result.plan.stages)))
    for row in range(len(packs)):
        samples = packs.packs[row]
        tiles, tokens = lengths.column("tiles")[samples].sum(), lengths.tokens[samples].sum()
        for index, stage in enumerate(result.plan.stages):
            words = set(map(str, stage.units))
            ms = read.item_ms["tiles"] * tiles if "vision embed" in words else 0.0
            ms += read.token_ms * tokens if words & {"language embed", "head"} else 0.0
            found[packs.step[row], index] += ms / result.plan.parallel.data
    return found


def test_reading_that_fits_beside_changes_nothing():
    """Prevents: steps that are prolonged by loader processes that had cores to spare."""
    free, read = planned(None).plan.prediction, reading(1e-3)
    result = planned(read)
    found = result.plan.prediction
    assert free.reading is None and "reading" not in free.model_dump()
    assert (found.step_ms, found.lost, found.stages) == (free.step_ms, free.lost, free.stages)
    assert found.reading.stage_ms == pytest.approx(per_step_ms(result, read).mean(axis=0))
    assert slow_reading(found) is None and slow_reading(free) is None
    assert too_few_loaders(found, 1) is None and too_few_loaders(free, 0) is None


@pytest.mark.parametrize("is_shared", [True, False])
def test_reading_that_binds_is_the_step(is_shared):
    """Prevents: a prediction, and a silence, as if data were always there."""
    read = reading(1e4, is_shared=is_shared)
    result, free = planned(read), planned(None).plan.prediction
    found = result.plan.prediction
    ranks = min(result.plan.parallel.world_size, result.plan.cluster.gpus_per_node)
    taken_ms = per_step_ms(result, read).sum(axis=1).mean()
    if is_shared:
        busy = [1 - stage.wait_fraction for stage in free.stages]
        taken_ms += sum(busy) * free.step_ms
    expected_ms = taken_ms / len(result.plan.stages) * ranks / read.cores
    assert found.step_ms == pytest.approx(expected_ms)
    assert found.reading.cores_ms == pytest.approx(expected_ms)
    assert sum(found.lost.model_dump().values()) == pytest.approx(found.step_ms)
    assert found.lost.reading_ms == pytest.approx(found.step_ms - free.step_ms)
    assert f"a step takes {found.step_ms:,.0f} ms where {free.step_ms:,.0f}" in slow_reading(found)


def test_loaders_that_do_not_keep_up_are_named():
    """Prevents: a run whose ranks wait for their only loader process, without a word."""
    found = planned(reading(1e-3)).plan.prediction
    stage_ms = (2.5 * found.step_ms, 0.0)
    slow = found.model_copy(
        update={"reading": found.reading.model_copy(update={"stage_ms": stage_ms})}
    )
    for workers in (1, 2):
        said = too_few_loaders(slow, workers)
        assert f"a rank of stage 0 reads for {stage_ms[0]:,.0f} ms" in said
        assert said.endswith("give --num-workers 3 or more")
    assert too_few_loaders(slow, 3) is None
    # Without loader processes, only what the stage waits is left for its thread.
    waits = found.stages[0].wait_fraction
    for share, is_told in ((waits - 0.01, False), (waits + 0.05, True)):
        part = found.reading.model_copy(update={"stage_ms": (share * found.step_ms, 0.0)})
        said = too_few_loaders(found.model_copy(update={"reading": part}), 0)
        assert (said is not None) == is_told
        assert not said or said.endswith("give --num-workers 1 or more")


def test_data_parallel_encoders_are_read_for_by_all():
    """Prevents: items that are counted for the first stage alone, or for every rank as a whole."""
    plan, read = planned(None).plan, reading()
    names = ("fixed", "tiles", "tokens")
    shared = StageReading.of(
        read, MODEL, plan.stages, names, has_data_parallel_encoders=True, ranks=2
    )
    own = StageReading.of(
        read, MODEL, plan.stages, names, has_data_parallel_encoders=False, ranks=2
    )
    assert shared.ms[1].tolist() == [1.0] * len(plan.stages)
    assert own.ms[1].tolist() == [2.0] + [0.0] * (len(plan.stages) - 1)
    assert own.cores_per_rank == 1


def test_ranks_that_share_packs_read_their_parts():
    """Prevents: packs that are counted whole on each rank that has a part, or in a wrong column."""
    levels = (
        Level(caps=Caps.of(tiles=4, tokens=256)),
        Level(caps=Caps.of(tiles=8, tokens=512), context=2),
    )
    read = reading(1e-3)
    asked = changed(request(), cost_source=Measured(measured(reading=read)), levels=levels)
    result = make_plan(asked)
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


def test_plan_with_reading_is_checked(tmp_path):
    """Prevents: a check that finds another prediction than the plan was written with."""
    for factor in (1e-3, 1e4):
        save_plan(planned(reading(factor)), tmp_path / f"{factor}")
        assert check_plan(tmp_path / f"{factor}")


def test_plan_and_check_say_that_reading_binds(capsys, tmp_path):
    """Prevents: data that is too slow to read from being noticed only in training."""
    write_lengths(example_lengths(), tmp_path / "l.parquet")
    for factor, is_told in ((1e-3, False), (1e4, True)):
        write_profile(measured(reading=reading(factor)), tmp_path / "p.json")
        asked = (
            "plan --model internvl-digits --cluster laptop-cpu --pp 2 --max-tiles 8 --max-tokens "
            f"512 --precision fp32 --lengths {tmp_path}/l.parquet --profile {tmp_path}/p.json "
            f"-o {tmp_path}/plan"
        )
        for command in (asked, f"check {tmp_path}/plan"):
            run(command)
            printed = capsys.readouterr()
            said = printed.err if command is asked else printed.out
            assert ("note: data cannot be read as fast as it is trained" in said) == is_told

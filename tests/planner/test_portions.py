"""Data planned in portions: dealt, packed, written, read and checked portion by portion."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from length_cases import lengths_of
from plan_cases import MODEL, example_lengths, job_spec, origin_of

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.job.check import check_plan, open_plan, open_portion
from omnibal.job.plan import Plan, portion_folder, portion_packs_file, read_plan
from omnibal.job.plan_files import PlanFiles, save_plan
from omnibal.job.plan_portions import EarlierPortions, join_portions
from omnibal.job.planner import PlanResult
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.pack_bound import SizeCounts
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packs import read_packs
from omnibal.packing.portions import PortionedSamples, PortionPlace
from omnibal.search.goal import Earlier, Goal, Samples
from omnibal.search.planning import plan
from omnibal.search.replanning import replan

EPOCHS = 2


def write_plan(lengths: Lengths, folder: Path, portion_samples: int, **settings) -> Plan:
    settings = {"micro_batches": 4, "portion_samples": portion_samples} | settings
    data = Samples(lengths=lengths, caps=Caps.of(tiles=9, tokens=400), **settings)
    return save_plan(plan(Goal(job=job_spec(), data=data)).result, folder)


@pytest.fixture(scope="module")
def in_portions(tmp_path_factory) -> Path:
    """Return a plan of three portions of 300 samples in two epochs, without skipped samples."""
    folder = tmp_path_factory.mktemp("portions") / "plan"
    scanned = example_lengths(origin_of(MODEL), 350)
    kept = scanned.take(np.flatnonzero(np.arange(350) % 7 > 0))
    write_plan(kept, folder, 100, epochs=EPOCHS)
    return folder


def samples(count: int, seed: int) -> Lengths:
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 6, count)
    return lengths_of(tiles=tiles, tokens=tiles * 30 + rng.integers(5, 200, count))


@pytest.fixture(scope="module")
def to_train(in_portions) -> PlanFiles:
    return open_plan(in_portions, to_train=True)


@pytest.mark.parametrize("seed", range(3))
def test_counts_of_portions_are_those_of_all(seed):
    """Prevents counting a size of two portions once, or keeping it twice."""
    sizes = samples(500, seed).sizes(["tiles", "tokens"])
    joined = SizeCounts.join(map(SizeCounts.from_sizes, np.split(sizes, [80, 300], axis=1)))
    amounts, counts = np.unique(sizes, axis=1, return_counts=True)
    np.testing.assert_array_equal(joined.amounts, amounts)
    np.testing.assert_array_equal(joined.counts, counts)
    np.testing.assert_array_equal(joined.sums, sizes.sum(axis=1))
    np.testing.assert_array_equal(np.unique(joined.thin(100), axis=1), amounts)


def test_samples_are_dealt_once_and_the_largest_first():
    """Prevents a sample in no portion or in two, and caps chosen without the longest sample."""
    every = samples(1000, 5)
    dealt = PortionedSamples.deal(every, PackSettings(portion_samples=300, epochs=3))
    assert dealt.count == 4
    rows = [dealt.samples(number).sample for number in range(4)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(1000))
    for name in ("tokens", "tiles"):
        assert dealt.samples(0).column(name).max() == every.column(name).max()
    places = [PortionPlace(epoch, number) for epoch in range(3) for number in range(4)]
    assert len({dealt.settings_of(place).seed for place in places}) == 12
    assert PortionedSamples.deal(every, PackSettings(portion_samples=1000)) is None


def test_every_sample_is_trained_once_an_epoch(in_portions):
    """Prevents samples lost or repeated between portions."""
    data = read_plan(in_portions).data
    assert len(data.portions) == 3 * EPOCHS and data.samples == 300
    for epoch in range(EPOCHS):
        seen, packs_of_epoch = [], 0
        for number in range(3):
            folder = portion_folder(in_portions, number)
            packs = read_packs(folder / portion_packs_file(epoch))
            own = read_lengths([folder / "lengths.parquet"]).sample
            seen += own[packs.packs.samples].tolist()
            packs_of_epoch += len(packs)
        assert sorted(seen) == [row for row in range(350) if row % 7]
        assert packs_of_epoch >= data.fewest_packs
    assert data.steps == sum(each.steps for each in data.portions)
    sentences = check_plan(in_portions)
    for told in ("portions of 2 epochs are valid", "above the"):
        assert told in "\n".join(sentences)


def test_all_portions_together_are_one_run(in_portions, to_train):
    """Prevents other steps, epochs or samples in a report or export than were trained."""
    files = open_plan(in_portions)
    packs, lengths = files.steps
    data = files.plan.data
    assert packs.steps == data.steps and len(packs) == data.packs
    assert (np.diff(packs.step) >= 0).all() and len(np.unique(packs.step)) == data.steps
    assert lengths.sample.tolist() == [row for row in range(350) if row % 7]
    assert (packs.tokens == packs.packs.sums(lengths.tokens)).all()
    step = 0
    while step < data.steps:
        held, own, own_lengths = open_portion(to_train, step)
        assert held.start == step
        rows = np.flatnonzero((packs.step >= held.start) & (packs.step < held.stop))
        together = packs.take(rows)
        assert (own.step == together.step).all() and (own.epoch == together.epoch).all()
        assert (own.packs.offsets == together.packs.offsets).all()
        by_row = own_lengths.sample[own.packs.samples]
        assert (by_row == lengths.sample[together.packs.samples]).all()
        step = held.stop


def test_data_of_one_portion_is_planned_as_ever(tmp_path):
    """Prevents changed plan files for data that is packed together."""
    lengths = example_lengths(origin_of(MODEL))
    write_plan(lengths, tmp_path / "usual", 2_000_000)
    write_plan(lengths, tmp_path / "just", len(lengths))
    names = sorted(path.name for path in (tmp_path / "usual").iterdir())
    assert names == ["lengths.parquet", "packs.parquet", "plan.json"]
    for name in names:
        usual, just = (tmp_path / folder / name for folder in ("usual", "just"))
        assert usual.read_bytes() == just.read_bytes()
    assert "portions" not in json.loads((tmp_path / "usual" / "plan.json").read_text())["data"]


def test_a_replaced_portion_is_refused(in_portions, tmp_path):
    """Prevents training on packs of another epoch, or a plan.json with other sums."""
    plan_json = json.loads((in_portions / "plan.json").read_text())
    copied = shutil.copytree(in_portions, tmp_path / "plan")
    folder = portion_folder(copied, 1)
    (folder / "packs-001.parquet").write_bytes((folder / "packs-000.parquet").read_bytes())
    with pytest.raises(UserError, match=r"portions/00001/packs-001.parquet has the content hash"):
        check_plan(copied)
    plan_json["data"]["portions"][2]["packs"] += 1
    (copied / "plan.json").write_text(json.dumps(plan_json))
    with pytest.raises(UserError, match=r"packs is .* over all entries of portions"):
        check_plan(copied)


def samples_of_steps(folder: Path) -> list[list[list[int]]]:
    """Return samples of every pack of every step, on any rank."""
    packs, lengths = open_plan(folder).steps
    own = [lengths.sample[packs.packs[pack]].tolist() for pack in range(len(packs))]
    rows = [np.flatnonzero(packs.step == step) for step in range(packs.steps)]
    return [sorted(own[row] for row in of_step) for of_step in rows]


@pytest.mark.parametrize("data_parallel", [1, 3])
def test_other_ranks_take_over_steps_in_portions(in_portions, to_train, tmp_path, data_parallel):
    """Prevents a plan for other ranks with other samples in a step."""
    earlier = to_train.plan
    data = Earlier(plan=earlier, data=to_train.data, directory=in_portions)
    job = job_spec(parallel=Parallel(pipeline=1, data=data_parallel))
    made = save_plan(plan(Goal(job=job, data=data)).result, tmp_path / "plan")
    assert made.data.steps_sha256 == earlier.data.steps_sha256
    assert made.data.fewest_packs == earlier.data.fewest_packs
    assert samples_of_steps(tmp_path / "plan") == samples_of_steps(in_portions)
    assert open_plan(tmp_path / "plan").steps[0].dp_rank.max() == data_parallel - 1
    assert made.prediction.gpu_days > 0
    assert any("portions of 2 epochs are valid" in line for line in check_plan(tmp_path / "plan"))


def test_steps_in_portions_need_their_directory(to_train):
    """Prevents a plan of the first portion presented as the run's plan."""
    data = Earlier(plan=to_train.plan, data=to_train.data)
    with pytest.raises(UserError, match="no directory to read them from"):
        plan(Goal(job=job_spec(), data=data))


def test_packs_of_some_steps_are_those_of_the_run(in_portions):
    """Prevents comparing measured passes with other packs than the run's."""
    data = read_plan(in_portions).data
    steps = [0, data.first_steps[1] - 1, data.first_steps[1], data.steps - 1]
    packs, lengths = join_portions(data, in_portions, steps)
    every = samples_of_steps(in_portions)
    assert np.unique(packs.step).tolist() == steps
    for step in steps:
        rows = np.flatnonzero(packs.step == step)
        assert sorted(lengths.sample[packs.packs[row]].tolist() for row in rows) == every[step]
    assert (packs.tokens == packs.packs.sums(lengths.tokens)).all()


def test_a_run_in_portions_is_planned_anew(in_portions, to_train, tmp_path):
    """Prevents losing large data with a device, and dealing packs again although the plan stays."""
    fewer = save_plan(replan(to_train, None, gpus=2).result, tmp_path / "fewer")
    assert fewer.parallel.world_size == 2
    assert samples_of_steps(tmp_path / "fewer") == samples_of_steps(in_portions)
    check_plan(tmp_path / "fewer")
    same = replan(to_train, None, gpus=to_train.plan.parallel.world_size)
    assert same.gain == 0
    made = save_plan(same.result, tmp_path / "same")
    assert made.data.steps_sha256 == to_train.plan.data.steps_sha256
    assert made.prediction == to_train.plan.prediction


def test_portions_that_are_kept_are_the_same_files(in_portions, to_train, tmp_path):
    """Prevents dealing packs again, in a worse order, if a plan's stages stay."""
    portions = EarlierPortions(data=to_train.plan.data, directory=in_portions, are_kept=True)
    kept = PlanResult(plan=to_train.plan, data=to_train.data, search=None, portions=portions)
    save_plan(kept, tmp_path / "kept")
    for path in in_portions.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "kept" / path.relative_to(in_portions)).read_bytes()


def test_lengths_without_origin_keep_their_rows(tmp_path):
    """Prevents losing the place of a portion's samples in the data, which exports need."""
    lengths = replace(example_lengths(None), origin=None)
    write_plan(lengths, tmp_path / "plan", 100)
    packs, joined = open_plan(tmp_path / "plan").steps
    assert joined.sample is None and (joined.tokens == lengths.tokens).all()
    assert (joined.source == lengths.source).all()
    assert sorted(packs.packs.samples.tolist()) == list(range(300))

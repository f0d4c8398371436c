"""Check: every way in which a plan directory can be wrong is found and named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import example_lengths, request

from omnibal.check import check_plan
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.data.packs import Packs, ScheduledPacks, read_packs, write_packs
from omnibal.errors import UserError
from omnibal.plan import Parallel, read_plan, write_plan
from omnibal.planner import make_plan, save_plan


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_plan(make_plan(request()), tmp_path / "plan")
    return tmp_path / "plan"


def rewrite_packs(directory: Path, change: Callable[[ScheduledPacks], ScheduledPacks]) -> None:
    """Write changed packs, and their hash and counts into the plan, as a careless tool would."""
    packs, plan = change(read_packs(directory / "packs.parquet")), read_plan(directory)
    write_packs(packs, directory / "packs.parquet")
    data = plan.data.model_copy(
        update={"packs_sha256": packs.sha256, "packs": len(packs), "steps": packs.steps}
    )
    write_plan(plan.model_copy(update={"data": data}), directory)


def with_entry(name: str, row: int, value: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        column = getattr(packs, name).copy()
        column[row] = value
        return replace(packs, **{name: column})

    return change


def with_sample(position: int, sample: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        samples = packs.packs.samples.copy()
        samples[position] = sample
        return replace(packs, packs=Packs(samples=samples, offsets=packs.packs.offsets))

    return change


def without_row(row: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    return lambda packs: rows_of(packs, np.delete(np.arange(len(packs)), row))


def swapped(row: int, other: int) -> Callable[[ScheduledPacks], ScheduledPacks]:
    def change(packs: ScheduledPacks) -> ScheduledPacks:
        order = np.arange(len(packs))
        order[[row, other]] = order[[other, row]]
        return rows_of(packs, order)

    return change


def later_steps(packs: ScheduledPacks) -> ScheduledPacks:
    return replace(packs, step=packs.step + (packs.step >= 2))


def backward_epochs(packs: ScheduledPacks) -> ScheduledPacks:
    return replace(packs, epoch=1 - packs.epoch)


def rows_of(packs: ScheduledPacks, rows: np.ndarray) -> ScheduledPacks:
    columns = ("step", "dp_rank", "slot", "epoch", "tiles", "tokens")
    return ScheduledPacks(
        packs=packs.packs.take(rows), **{name: getattr(packs, name)[rows] for name in columns}
    )


def test_a_good_plan_passes(directory):
    """Prevents checks that refuse what the planner makes."""
    assert len(check_plan(directory)) == 9


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_row(5), "epoch 0 leaves out"),
        (with_sample(0, 10_000), "names 1 that do not exist"),
        (with_sample(0, -1), "names 1 that do not exist"),
        (with_entry("tiles", 3, 7), "row 3 has other tiles"),
        (with_entry("tokens", 3, 7), "row 3 has other tokens"),
        (with_entry("dp_rank", 0, 2), "row 0 has no such dp_rank.*0 to 1"),
        (with_entry("dp_rank", 0, -1), "row 0 has no such dp_rank"),
        (with_entry("slot", 3, 4), "row 3 has no such slot.*0 to 3"),
        (swapped(0, 1), "row 1 is out of order"),
        (swapped(3, 4), "is out of order"),
        (with_entry("slot", 3, 2), "row 3 is out of order"),
        (later_steps, "leaves out a step"),
        (backward_epochs, "is of another epoch"),
    ],
)
def test_wrong_packs_are_refused(directory, change, expected):
    """Prevents training on packs that lose, repeat or misplace samples."""
    rewrite_packs(directory, change)
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def test_step_of_two_epochs_is_refused(tmp_path):
    """Prevents an epoch border inside a step, which no resumed run could find again."""
    two_epochs_of_a_step = request(
        lengths=example_lengths(count=3), micro_batches=8, parallel=Parallel(pipeline=1)
    )
    save_plan(make_plan(two_epochs_of_a_step), tmp_path / "plan")
    rewrite_packs(
        tmp_path / "plan",
        lambda p: replace(p, step=p.step * 0, slot=np.arange(len(p), dtype=np.int32)),
    )
    with pytest.raises(UserError, match="is of another epoch"):
        check_plan(tmp_path / "plan")


def test_repeated_sample_is_refused(directory):
    """Prevents a sample from being trained twice in an epoch while another is left out."""
    first = int(read_packs(directory / "packs.parquet").packs.samples[0])
    rewrite_packs(directory, with_sample(1, first))
    with pytest.raises(UserError, match="leaves out 1 of 300 samples, repeats 1"):
        check_plan(directory)


def test_missing_slot_is_refused(directory):
    """Prevents a rank from waiting for a micro-batch that nobody has."""

    def change(packs: ScheduledPacks) -> ScheduledPacks:
        # A whole pack moves to the end of a rank's short last step, one slot too far.
        last = int(np.flatnonzero(packs.slot == 0)[-1])
        slot = packs.slot.copy()
        slot[last:] += 1
        return replace(packs, slot=slot)

    rewrite_packs(directory, change)
    with pytest.raises(UserError, match="leaves out a slot"):
        check_plan(directory)


def test_other_files_are_refused(directory):
    """Prevents a plan from being used with the packs or lengths of another."""
    for name, value in (("lengths_sha256", "lengths.parquet"), ("packs_sha256", "packs.parquet")):
        plan = read_plan(directory)
        data = plan.data.model_copy(update={name: "0" * 64})
        write_plan(plan.model_copy(update={"data": data}), directory)
        with pytest.raises(UserError, match=f"{value} has the content hash"):
            check_plan(directory)
        write_plan(plan, directory)


def test_changed_lengths_are_refused(directory):
    """Prevents lengths that were edited after planning."""
    lengths = read_lengths([directory / "lengths.parquet"])
    lengths.tokens.flags.writeable = True
    lengths.tokens[0] += 1
    write_lengths(lengths, directory / "lengths.parquet")
    with pytest.raises(UserError, match=r"lengths\.parquet has the content hash"):
        check_plan(directory)
    assert example_lengths().tokens[0] == lengths.tokens[0] - 1


@pytest.mark.parametrize(
    ("field", "value"), [("samples", 299), ("packs", 1), ("steps", 1), ("epochs", 3)]
)
def test_wrong_counts_are_refused(directory, field, value):
    """Prevents a hand-edited count from deciding when training stops."""
    plan = read_plan(directory)
    data = plan.data.model_copy(update={field: value})
    write_plan(plan.model_copy(update={"data": data}), directory)
    with pytest.raises(UserError, match=f"says {value} {field}"):
        check_plan(directory)


def test_lower_caps_are_refused(directory):
    """Prevents packs that are larger than the plan promises."""
    plan = read_plan(directory)
    caps = plan.data.caps.model_copy(update={"max_tokens": 300})
    data = plan.data.model_copy(update={"caps": caps})
    write_plan(plan.model_copy(update={"data": data}), directory)
    with pytest.raises(UserError, match="exceeds a cap"):
        check_plan(directory)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda plan: {"parallel": Parallel(pipeline=3, data=2)}, "2 stages for pipeline size 3"),
        (lambda plan: {"stages": plan.stages[::-1]}, "model order"),
        (
            lambda plan: {"cluster": plan.cluster.model_copy(update={"memory_gib": 1e-3})},
            "is predicted to need",
        ),
    ],
)
def test_impossible_plans_are_refused(directory, change, expected):
    """Prevents a launch that cannot be built or cannot fit."""
    plan = read_plan(directory)
    write_plan(plan.model_copy(update=change(plan)), directory)
    with pytest.raises(UserError, match=expected):
        check_plan(directory)


def test_hand_written_plan_needs_no_prediction(directory):
    """Prevents a check that only accepts plans of the search."""
    plan = read_plan(directory)
    write_plan(plan.model_copy(update={"prediction": None}), directory)
    assert "no prediction: memory is not checked" in check_plan(directory)


@pytest.mark.parametrize("content", ["", "{}", '{"schema_version": 2}'])
def test_foreign_plan_json_is_refused(directory, content):
    """Prevents a traceback for a file that is not a plan of this version."""
    (directory / "plan.json").write_text(content)
    with pytest.raises(UserError, match=r"plan\.json"):
        check_plan(directory)

"""Reading and writing of a plan's directory as a whole."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from omnibal.base.errors import UserError
from omnibal.cost.profile import Measured, read_profile
from omnibal.cost.refitted import Refitted, read_refit
from omnibal.cost.source import ANALYTIC, CostSource
from omnibal.data.lengths import Lengths, read_lengths, write_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import (
    LENGTHS_FILE,
    PACKS_FILE,
    PLAN_FILE,
    PLAN_FILES,
    PROFILE_FILE,
    REFIT_FILE,
    DataPlan,
    Plan,
    write_plan,
)
from omnibal.job.plan_data import data_at_caps
from omnibal.job.planner import PlanResult
from omnibal.packing.packs import ScheduledPacks, read_packs, write_packs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanFiles:
    """A plan with the contents of its directory: its job with costs, packs and lengths."""

    plan: Plan
    job: JobSpec
    """Job with the costs that the plan was made with."""
    data: tuple[ScheduledPacks, Lengths] | None
    """Packs and lengths: mock ones at the caps for a plan of shapes only; None without either."""
    directory: Path | None = None
    """Where they were read; None of what was put together in memory."""

    @property
    def steps(self) -> tuple[ScheduledPacks, Lengths]:
        """The plan's packs and lengths, where there must be some.

        Raises:
            UserError: the plan has neither data nor shapes.
        """
        if self.data is None:
            raise UserError(
                "the plan has neither data nor shapes, so it has no steps; give a plan of "
                "`omnibal plan`"
            )
        return self.data


def job_of_plan(plan: Plan, directory: Path) -> JobSpec:
    """Make the job that a plan is for, with the costs that the plan was made with.

    These are of the profile in its directory, or counted where there is none, and changed by what a
    run has shown where the plan was made from one.

    Raises:
        UserError: the parallel sizes do not fit the model or the cluster, or the profile is broken
            or not of the plan's model, precision or tensor size.
    """
    profile, refit = directory / PROFILE_FILE, directory / REFIT_FILE
    source: CostSource = Measured(read_profile(profile)) if profile.exists() else ANALYTIC
    if refit.exists():
        source = Refitted(source, read_refit(refit))
    return JobSpec.of_plan(plan, source)


def data_of_plan(plan: Plan, directory: Path) -> tuple[ScheduledPacks, Lengths] | None:
    """Read packs and lengths; made up at the caps for a plan of shapes, None without either.

    Raises:
        UserError: a file is missing or broken, or is not the one that the plan was made with.
    """
    if plan.data is None:
        return None if plan.shapes is None else data_at_caps(plan.shapes, plan.parallel.data)
    return _read_data(plan.data, directory)


def _read_data(data: DataPlan, directory: Path) -> tuple[ScheduledPacks, Lengths]:
    packs, lengths = read_packs(directory / PACKS_FILE), read_lengths([directory / LENGTHS_FILE])
    for name, given, planned in (
        (LENGTHS_FILE, lengths.sha256, data.lengths_sha256),
        (PACKS_FILE, packs.sha256, data.packs_sha256),
    ):
        if given != planned:
            raise UserError(
                f"{name} has the content hash {given[:12]}, but plan.json says {planned[:12]}; "
                "the files of a plan belong together: restore the file, or make the plan anew "
                "with `omnibal plan`"
            )
    return packs, lengths


def save_plan(result: PlanResult, directory: Path) -> None:
    """Write the plan directory whole or not at all; an earlier plan there is replaced.

    Raises:
        UserError: `directory` holds something other than a plan, which is left as it is.
    """
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        made, replaced = Path(scratch) / "new", Path(scratch) / "old"
        made.mkdir()
        if result.data is not None:
            packs, lengths = result.data
            write_packs(packs, made / PACKS_FILE)
            write_lengths(lengths, made / LENGTHS_FILE)
        result.cost_source.save(made / PROFILE_FILE, made / REFIT_FILE)
        write_plan(result.plan, made)
        if directory.exists():
            directory.rename(replaced)
        try:
            made.rename(directory)
        except OSError:
            if replaced.exists():
                replaced.rename(directory)
            raise


def check_replaceable(directory: Path) -> None:
    """Refuse a place for a plan that holds something else.

    Raises:
        UserError: `directory` is a file, the current directory or one above it, or holds what is
            no part of a plan.
    """
    if Path.cwd().is_relative_to(directory.resolve()):
        raise UserError(
            f"{directory}: is the current directory or above it, and a plan replaces its "
            f"directory: give one of its own, such as -o {directory / 'plan'}"
        )
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory}: is a file; a plan is a directory: choose another -o")
    names = {path.name for path in directory.iterdir()}
    foreign = sorted(names - {*PLAN_FILES})
    if foreign or (names and PLAN_FILE not in names):
        raise UserError(
            f"{directory}: holds {(foreign or sorted(names))[0]}, which is not part of a plan, and "
            "replacing a plan deletes its directory; move that away or choose another -o"
        )

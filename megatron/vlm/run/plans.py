"""Plans made during a run: the newest, and making the next.

    RUN/plans/step_0000050_gpus_8/   a plan made after 50 steps, for 8 devices

`omnibal replan` plans in its own process: it neither blocks a rank's interpreter nor forks a
process with a CUDA context.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import omnibal
from omnibal.base.errors import UserError
from omnibal.cost.refitted import read_refit
from omnibal.job.plan import REFIT_FILE, Plan, plan_sha256, read_plan
from omnibal.job.runlog import RUN_FILE, RUN_INFO_FILE, read_run_info

_FOLDER = "plans"
_CONSIDERED = "considered"
"""A plan that is not adopted yet, or was rejected."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan directory, and the step of the run that it was made after."""

    directory: Path
    plan: Plan
    root_sha256: str
    """Hash of the user's original plan."""
    step: int

    @classmethod
    def of(cls, directory: Path) -> "MadePlan":
        """Read a plan's directory; step 0 if it was not made during a run."""
        plan, path = read_plan(directory), directory / REFIT_FILE
        if not path.exists():
            return cls(directory, plan, plan_sha256(plan), 0)
        refit = read_refit(path)
        return cls(directory, plan, refit.root_sha256, refit.step)


def newest_plan(given: Path, run: Path, step: int, world_size: int) -> MadePlan:
    """Newest plan derived from `given` up to `step`: for `world_size`, else others, else given."""
    first = MadePlan.of(given)
    folder = run / _FOLDER
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    made = [MadePlan.of(path) for path in folders if path.name.startswith("step_")]
    known = [first, *(plan for plan in made if plan.root_sha256 == first.root_sha256)]
    past = [plan for plan in known if plan.step <= step or plan is first]
    return max(past, key=lambda plan: (plan.plan.parallel.world_size == world_size, plan.step))


def plan_again(
    directory: Path, run: Path, step: int, *, least_gain: float = -1.0, gpus: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Replan in its own process; return the plan's directory and the command's summary.

    Returns None if less than `least_gain` of the step time is saved on the plan's own devices.
    `gpus` replaces their number.
    """
    considered = run / _FOLDER / _CONSIDERED
    words = [str(directory), "-o", str(considered), "--after", str(step), "--json"]
    words += [] if gpus is None else ["--gpus", str(gpus)]
    measured = ["--run", str(run)]
    try:
        summary = _run_replan([*words, *measured] if _has_log(directory, run) else words)
    except UserError:
        if gpus is None or not _has_log(directory, run):
            raise
        summary = _run_replan(words)  # keeps the costs if too little was measured
    if gpus is None and summary["gain"] < least_gain:
        return None
    plan = read_plan(considered)
    taken = run / _FOLDER / f"step_{step:07d}_gpus_{plan.parallel.world_size}"
    replaced = taken.with_name(f"replaced_{taken.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if taken.exists():  # left by an earlier failed start
        # A kill must not leave a partial plan under a name that the next start reads.
        taken.rename(replaced)
    considered.rename(taken)
    shutil.rmtree(replaced, ignore_errors=True)
    return taken, summary


def _has_log(directory: Path, run: Path) -> bool:
    """Whether the run's log is of this plan."""
    if not ((run / RUN_FILE).exists() and (run / RUN_INFO_FILE).exists()):
        return False
    return read_run_info(run).plan_sha256 == plan_sha256(read_plan(directory))


def _run_replan(words: list[str]) -> dict[str, Any]:
    """Run `omnibal replan` and return its output."""
    root = str(Path(omnibal.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path[1:]])}
    made = subprocess.run(
        [sys.executable, "-m", "omnibal", "replan", *words],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        line = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(line.removeprefix("error: "))
    summary: dict[str, Any] = json.loads(made.stdout)
    return summary

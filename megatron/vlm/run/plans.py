"""Plans made during a run: find the newest, and make the next.

    RUN/plans/step_0000050_gpus_8/   a plan made after 50 steps, for 8 devices

Planning runs in a new process, `omnibal replan`: it does not block a rank's interpreter, and forks
no process with a CUDA context.
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

_PLANS_FOLDER = "plans"
_CANDIDATE = "considered"  # folder of a plan not adopted yet, or rejected
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MadePlan:
    """A plan directory, and the step of the run when it was made."""

    directory: Path
    plan: Plan
    root_sha256: str  # hash of the user's original plan
    step: int

    @classmethod
    def read(cls, directory: Path) -> "MadePlan":
        """Read a plan directory. The step is 0 if it was not made during a run."""
        plan, path = read_plan(directory), directory / REFIT_FILE
        if not path.exists():
            return cls(directory, plan, plan_sha256(plan), 0)
        refit = read_refit(path)
        return cls(directory, plan, refit.root_sha256, refit.step)


def newest_plan(given: Path, run: Path, step: int, world_size: int) -> MadePlan:
    """Return `given` or its newest replan up to `step`; plans for `world_size` come first."""
    first = MadePlan.read(given)
    folder = run / _PLANS_FOLDER
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    made = [MadePlan.read(path) for path in folders if path.name.startswith("step_")]
    descendants = [plan for plan in made if plan.root_sha256 == first.root_sha256]
    past = [first, *(plan for plan in descendants if plan.step <= step)]
    return max(past, key=lambda plan: (plan.plan.parallel.world_size == world_size, plan.step))


def plan_again(
    directory: Path, run: Path, step: int, *, min_gain: float = -1.0, gpus: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """Plan again, by the run's log if it is of this plan; return the directory and the summary.

    Args:
        min_gain: fraction of the step time that a new plan must save, else the result is None.
        gpus: number of devices, or None for the plan's. If given, `min_gain` is ignored.
    """
    candidate = run / _PLANS_FOLDER / _CANDIDATE
    words = [str(directory), "-o", str(candidate), "--after", str(step), "--json"]
    words += [] if gpus is None else ["--gpus", str(gpus)]
    measured = ["--run", str(run)]
    try:
        summary = _run_replan([*words, *measured] if _has_log(directory, run) else words)
    except UserError:
        if gpus is None or not _has_log(directory, run):
            raise
        summary = _run_replan(words)  # with the plan's costs, if too few steps were measured
    if gpus is None and summary["gain"] < min_gain:
        return None
    plan = read_plan(candidate)
    adopted = run / _PLANS_FOLDER / f"step_{step:07d}_gpus_{plan.parallel.world_size}"
    replaced = adopted.with_name(f"replaced_{adopted.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if adopted.exists():  # left by an earlier start that failed
        # Renames only: a kill must not leave a partial plan under a name that the next start reads.
        adopted.rename(replaced)
    candidate.rename(adopted)
    shutil.rmtree(replaced, ignore_errors=True)
    return adopted, summary


def _has_log(directory: Path, run: Path) -> bool:
    """Return whether the run's log is of this plan."""
    if not ((run / RUN_FILE).exists() and (run / RUN_INFO_FILE).exists()):
        return False
    return read_run_info(run).plan_sha256 == plan_sha256(read_plan(directory))


def _run_replan(words: list[str]) -> dict[str, Any]:
    """Return the summary of `omnibal replan`. If it fails, raise its last line as a UserError."""
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

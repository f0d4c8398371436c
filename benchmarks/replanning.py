"""What planning anew gains in real runs of two processes on this machine.

    python benchmarks/replanning.py [--steps 50]

A model of ten layers of each kind is profiled and planned on two stages. The first stage's process
sleeps half as long again as each of its passes takes. A run is planned anew, and runs of both plans
are measured, medians over their steps: other programs take the machine now and then. Then the
profile is spoiled: one kind of layer counts 1.4 times its time, or as little of it. A run of the
plan that this makes is planned anew by its log, and both plans and that of the right profile are
simulated by the right profile. Prints a row each as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from training_kills import REPOSITORY, Ranks

from megatron.vlm.step.clock import Phase, PhaseClock
from omnibal.cost.profile import Profile, read_profile, write_profile
from omnibal.job.check import open_plan
from omnibal.job.runlog import RUN_FILE, read_run
from omnibal.pipeline.simulate import simulate_levels

SPOILED, SLOWNESS = 1.4, 1.5
_CAPS = ("--max-tiles", "12", "--max-tokens", "400")


class Bench:
    """A folder with data, a profile, plans and runs."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.digits, self.lengths = folder / "digits", folder / "lengths.parquet"
        self.profile, self.model = folder / "profile.json", folder / "deeper.toml"
        preset = REPOSITORY / "omnibal" / "presets" / "models" / "internvl-digits.toml"
        text = preset.read_text()
        assert text.count("layers = 4") == 2, "the preset has changed"
        self.model.write_text(text.replace("layers = 4", "layers = 10"))

    def command(self, *words: object) -> str:
        """Run a command that must succeed; what it prints."""
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=REPOSITORY, check=True, capture_output=True,
            text=True,
        )  # fmt: skip
        return done.stdout

    def prepare(self) -> None:
        """Make the data and the profile."""
        self.command("tools/make_digits_dataset.py", "--output", self.digits, "--samples", "600")
        given = ("--model", self.model, "--tokenizer-model", self.digits / "tokenizer.model")
        meta = self.digits / "train" / "meta.json"
        self.command("-m", "omnibal", "lengths", meta, *given, "-o", self.lengths)
        self.command(
            "-m", "omnibal", "profile", "--model", self.model, "--precision", "fp32",
            "--processes", "2", *_CAPS, "--lengths", self.lengths, "--repetitions", "15", "-o",
            self.profile,
        )  # fmt: skip

    def plan(self, name: str, profile: Path) -> Path:
        """Plan with a profile."""
        self.command(
            "-m", "omnibal", "plan", "--model", self.model, "--cluster", "laptop-cpu",
            "--precision", "fp32", *_CAPS, "--lengths", self.lengths, "--profile", profile,
            "--micro-batches", "4", "--packing-levels", "1", "--epochs", "4", "--pp", "2",
            "-o", self.folder / name,
        )  # fmt: skip
        return self.folder / name

    def run(self, plan: Path, name: str, *, slow: bool = False) -> Path:
        """Train so many steps of a plan; the run's directory."""
        save = self.folder / name
        words = [
            "pretrain_vlm.py", "--plan", plan, "--data", self.digits / "train" / "meta.json",
            "--tokenizer-model", self.digits / "tokenizer.model", "--save", save,
            "--train-iters", self.steps, "--num-workers", "1",
        ]  # fmt: skip
        ranks = Ranks([*map(str, words)], 2, save.with_suffix(".txt"), _slow if slow else _alike)
        if not ranks.wait(1800) or any(ranks.ended.values()):
            raise SystemExit(f"{ranks.ended}: {save.with_suffix('.txt').read_text()}")
        return save

    def anew(self, plan: Path, run: Path) -> tuple[Path, dict]:
        """Plan anew from a run; the plan's directory and what the command says."""
        made = plan.with_name(f"{plan.name}-anew")
        words = ("-m", "omnibal", "replan", plan, "--run", run, "-o", made, "--json")
        return made, json.loads(self.command(*words))

    def simulated_ms(self, plan: Path, right: Path) -> float:
        """A plan's mean step by the costs of another plan's profile."""
        files = open_plan(plan)
        packs, lengths = files.steps
        job = open_plan(right).job
        workload = job.workload(packs, lengths, files.plan.pack_levels)
        cost = job.cost_of_all(files.plan.pack_levels)
        return float(simulate_levels(cost, files.plan.stages_at_levels, workload).step_ms.mean())


def _alike(rank: int) -> None:
    """Leave a rank as it is."""


def _slow(rank: int) -> None:
    """Have the first rank sleep half as long again as each of its passes takes."""
    if rank:
        return
    switch = PhaseClock.switch
    begun: list[tuple[float, Phase]] = []

    def slowed(clock: PhaseClock, phase: Phase) -> None:
        if begun and begun[0][1] in (Phase.FORWARD, Phase.BACKWARD):
            time.sleep((SLOWNESS - 1) * (time.perf_counter() - begun[0][0]))
        switch(clock, phase)
        begun[:] = [(time.perf_counter(), phase)]

    PhaseClock.switch = slowed  # type: ignore


def spoiled(profile: Profile, unit: str, factor: float) -> Profile:
    """The profile with a kind of unit at so many times its time."""
    changed = [
        one.model_copy(
            update={
                name: getattr(one, name) * factor
                for name in ("forward_ms", "backward_ms")
                if one.unit == unit
            }
        )
        for one in profile.measurements
    ]
    return profile.model_copy(update={"measurements": tuple(changed)})


def spoiled_rows(bench: Bench, right: Path) -> list[dict[str, object]]:
    """A row of each spoiled profile."""
    rows, profile = [], read_profile(bench.profile)
    units = dict.fromkeys(one.unit for one in profile.measurements)
    layers = [unit for unit in units if unit.endswith("layer")]
    for unit in layers:
        for factor in (SPOILED, 1 / SPOILED):
            name = f"{unit}-{factor:.2f}"
            path = bench.folder / f"{name}.json"
            write_profile(spoiled(profile, unit, factor), path)
            plan = bench.plan(name, path)
            made, said = bench.anew(plan, bench.run(plan, f"run-{name}"))
            right_ms = bench.simulated_ms(right, right)
            rows.append(
                {
                    "spoiled": unit,
                    "factor": round(factor, 3),
                    "found": round(said["kinds"][unit], 3),
                    "kinds": {each: round(of, 3) for each, of in said["kinds"].items()},
                    "spoiled_over_right": bench.simulated_ms(plan, right) / right_ms - 1,
                    "anew_over_right": bench.simulated_ms(made, right) / right_ms - 1,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def slow_row(bench: Bench, right: Path) -> dict[str, object]:
    """The row of a slow stage."""
    made, said = bench.anew(right, bench.run(right, "run-slow", slow=True))
    before, after = (
        np.array([r.step_ms for r in read_run(bench.run(plan, name, slow=True) / RUN_FILE)[2:]])
        for plan, name in ((right, "run-slow-before"), (made, "run-slow-after"))
    )
    row: dict[str, object] = {
        "slowness": [round(stage["slowness"], 3) for stage in said["stages"]],
        "predicted_gain": said["gain"],
        "measured_gain": float(1 - np.median(after) / np.median(before)),
        "before_ms": float(np.median(before)),
        "after_ms": float(np.median(after)),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Measure, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), arguments.steps)
        bench.prepare()
        right = bench.plan("right", bench.profile)
        slow_row(bench, right)
        spoiled_rows(bench, right)


if __name__ == "__main__":
    main()

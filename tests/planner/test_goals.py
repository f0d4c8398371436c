"""Goals: what is free is searched for together, and what does not go together is one table."""

import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cli_cases import failure, run
from length_cases import lengths_of
from plan_cases import example_lengths

from omnibal import Free, Goal, Planned, Samples, plan, training_job
from omnibal.base.errors import UserError
from omnibal.cli.run import RunOptions
from omnibal.data.lengths import write_lengths
from omnibal.job.plan import Plan, read_plan
from omnibal.model.config import load_cluster
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.pipeline.baselines import PartitionMethod, SplitRule
from omnibal.search.conflicts import CONFLICTS, NEEDS, Feature, check_complete, check_together
from omnibal.search.goal import Stream
from omnibal.search.level_estimates import LevelRule
from omnibal.search.strategy import FreeSizes

DIGITS = "plan --model internvl-digits --cluster laptop-cpu"
CAPPED = f"{DIGITS} --max-tiles 8 --max-tokens 512"


def long_tailed(count: int = 800) -> Samples:
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(6.5, 1.4, count).round(), 30, 65_536).astype(int)
    return Samples(lengths=lengths_of(tokens=np.append(tokens, 65_536)), samples_per_step=200)


def ms_per_sample(planned: Planned) -> float:
    prediction = planned.prediction
    assert prediction.samples_per_second_per_gpu is not None
    return 1e3 / prediction.samples_per_second_per_gpu


def test_what_is_free_is_no_slower_than_what_is_forced():
    """Prevents a joint search that loses what a narrower one finds."""
    job, data, free = (
        training_job("llama3.1-8b", "h100-80g"),
        long_tailed(),
        Free.everything(gpus=8),
    )
    free = replace(free, placements=(EncoderPlacement.PIPELINE,))
    forced = (
        {"levels": LevelRule(count=1)},
        {"levels": LevelRule(is_hbp=True)},
        {"sizes": FreeSizes(gpus=8, tensor=2, pipeline=1)},
        {"sizes": FreeSizes(gpus=8, tensor=8, pipeline=1)},
    )
    best, one, *others = (
        plan(Goal(job=job, data=data, free=replace(free, **given))) for given in ({}, *forced)
    )
    assert best.result.plan.levels and not one.result.plan.levels
    assert best.strategies is not None and 0 < best.strategies.gap < 1
    assert all(ms_per_sample(best) <= ms_per_sample(each) * 1.001 for each in others)
    assert ms_per_sample(best) < 0.9 * ms_per_sample(one)


def test_the_placement_of_encoders_is_searched_for_with_sizes():
    """Prevents a placement that is only compared at sizes that suit the other one."""
    job, free = training_job("internvl-digits", "laptop-cpu"), Free.everything(gpus=4)
    data = Samples(lengths=example_lengths(), samples_per_step=40)
    best = plan(Goal(job=job, data=data, free=free))
    for placement in EncoderPlacement:
        found = plan(Goal(job=job, data=data, free=replace(free, placements=(placement,))))
        assert (found.result.plan.beside is not None) == (
            placement is not EncoderPlacement.PIPELINE
        )
        # Caps are moved from those of the few best sizes and placements.
        assert ms_per_sample(best) <= ms_per_sample(found) * 1.005
    assert best.placement.chosen is best.strategies.best.placement


def test_windows_of_a_stream_at_free_sizes(tmp_path, lengths_file):
    """Prevents a stream that sizes cannot be chosen for, or whose windows they change."""

    def planned_on(sizes: str) -> Plan:
        options = f"{CAPPED} --window 40 {sizes} --lengths"
        run(options, lengths_file, "-o", tmp_path / sizes)
        return read_plan(tmp_path / sizes)

    planned = planned_on("--gpus 4")
    assert planned.data.window == 40 and planned.parallel.world_size == 4
    run("check", tmp_path / "--gpus 4")
    # As the slowest of the sizes that can be given, one by one.
    given = [
        planned_on(f"--tp {tensor} --pp {pipeline} --dp {4 // (tensor * pipeline)}")
        for tensor, pipeline in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4))
    ]
    best, *rates = (each.prediction.samples_per_second_per_gpu for each in (planned, *given))
    assert best >= max(rates) * (1 - 1e-9)


def test_steps_of_an_earlier_plan_at_free_sizes(tmp_path, lengths_file):
    """Prevents a run that cannot go on with the sizes that are best for other devices."""
    run(f"{CAPPED} --dp 2", "--lengths", lengths_file, "-o", tmp_path / "first")
    run(f"{DIGITS} --gpus 4 --steps-of", tmp_path / "first", "-o", tmp_path / "again")
    first, again = (read_plan(tmp_path / name) for name in ("first", "again"))
    assert again.parallel.world_size == 4
    assert again.data.steps_sha256 == first.data.steps_sha256
    run("check", tmp_path / "again")


def test_another_method_at_free_sizes(tmp_path, lengths_file):
    """Prevents sizes that are compared by the joint search and planned by another method."""
    given = f"{CAPPED} --gpus 4 --method parameter --recompute none --lengths"
    run(given, lengths_file, "-o", tmp_path / "plan")
    assert all(not stage.recompute for stage in read_plan(tmp_path / "plan").stages)


@pytest.mark.parametrize("samples", [40, 80])
def test_a_step_is_named_by_its_samples(tmp_path, samples):
    """Prevents a number of samples that means another step where sizes are given."""
    write_lengths(example_lengths(count=400), tmp_path / "lengths.parquet")
    given = f"{CAPPED} --dp 2 --samples-per-step {samples} --lengths"
    run(given, tmp_path / "lengths.parquet", "-o", tmp_path / "plan")
    data = read_plan(tmp_path / "plan").data
    assert data.samples / data.steps == pytest.approx(samples, rel=0.15)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda each: f"{each.one} {each.other}")
def test_every_conflict_is_refused_with_its_reason(conflict):
    """Prevents a row of the table that refuses nothing, or one without a reason."""
    with pytest.raises(UserError, match="cannot be given with") as refused:
        check_together({conflict.one: "first", conflict.other: "second"})
    assert conflict.why in str(refused.value)
    check_together({conflict.one: "first"})
    check_together({conflict.other: "second"})


def test_needs_and_conflicts_do_not_contradict():
    """Prevents a feature that can never be given: it needs what it does not go with."""
    pairs = {frozenset((conflict.one, conflict.other)) for conflict in CONFLICTS}
    assert len(pairs) == len(CONFLICTS)
    for one, needed, why in NEEDS:
        assert why and frozenset((one, needed)) not in pairs
        with pytest.raises(UserError, match="was given without"):
            check_complete({one: "it"})
        whole = {one: "it", needed: "that"} | {needs: "" for _, needs, _ in NEEDS}
        check_complete(whole)
    for one, other in product(Feature, Feature):
        if one is not other and frozenset((one, other)) not in pairs:
            check_together({one: "first", other: "second"})


@pytest.mark.parametrize(
    ("window", "free", "options"),
    [
        (40, {}, "--window 40"),
        (None, {"split": SplitRule(method=PartitionMethod.LAYER)}, "--method layer"),
    ],
)
def test_a_goal_refuses_what_the_command_line_does(capsys, tmp_path, window, free, options):
    """Prevents a goal from Python that the command line would refuse."""
    lengths = example_lengths()
    write_lengths(lengths, tmp_path / "lengths.parquet")
    data = Stream(lengths=lengths, window=window) if window else Samples(lengths=lengths)
    with pytest.raises(UserError, match="cannot be given with"):
        job, by_levels = training_job("internvl-digits", "laptop-cpu"), LevelRule(count=2)
        Goal(job=job, data=data, free=Free(levels=by_levels, **free))
    given = f"{DIGITS} {options} --packing-levels 2 --lengths"
    said = failure(capsys, given, tmp_path / "lengths.parquet", "-o", tmp_path / "p")
    assert "cannot be given with" in said


def test_the_commands_of_a_run_are_printed_and_not_done_twice(digits, tmp_path, capfd):
    """Prevents a run that hides its steps, or scans and plans again what is there."""
    given = "run --model internvl-digits --cluster laptop-cpu --gpus 2 --no-start --data"
    files = digits / "train" / "meta.json", "--tokenizer-model", digits / "tokenizer.model"
    for repeated in (False, True):
        run(given, *files, "-o", tmp_path / "job", "--", "--lr", "1e-3")
        shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("$ ")]
        assert [line.split()[2] for line in shown] == ["lengths", "plan", "check"]
        assert [line.endswith("(done)") for line in shown] == [repeated, repeated, False]
    assert read_plan(tmp_path / "job" / "plan").parallel.world_size == 2
    words = shlex.split((tmp_path / "job" / "train.sh").read_text(), comments=True)
    (launcher,) = (place for place, word in enumerate(words) if word.endswith("train_nodes.sh"))
    assert words[launcher + 1 : launcher + 4] == ["1", "0", "localhost"]
    assert words[-2:] == ["--lr", "1e-3"]


def test_a_run_on_several_nodes_is_submitted():
    """Prevents a job of many devices that is started on one node."""
    files = {"data": Path("data.jsonl"), "output": Path("job")}
    asked = RunOptions(model="internvl2.5-8b", cluster="h100-80g", gpus=32, **files)
    cluster = load_cluster("h100-80g")
    words = shlex.split(asked.launch(cluster, 32, []))
    assert words[words.index("--nodes") + 1] == "4"
    assert words[words.index("--gpus-per-node") + 1] == "8"
    assert "train_nodes.sh" in asked.launch(cluster, 4, [])

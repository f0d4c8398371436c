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
from omnibal.job.plan import read_plan
from omnibal.model.config import load_cluster
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.pipeline.baselines import PartitionMethod, SplitRule
from omnibal.search.conflicts import CONFLICTS, NEEDS, Feature, check_complete, check_together
from omnibal.search.goal import Stream
from omnibal.search.level_estimates import LevelRule
from omnibal.search.strategy import FreeSizes

DIGITS = "plan --model internvl-digits --cluster laptop-cpu --gpus 4"


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
    job, free = training_job("llama3.1-8b", "h100-80g"), Free.everything(gpus=8)
    free = replace(free, placements=(EncoderPlacement.PIPELINE,))
    data = long_tailed()
    best = plan(Goal(job=job, data=data, free=free))
    assert best.result.plan.levels
    assert best.strategies is not None and 0 < best.strategies.gap < 1
    forced = [replace(free, levels=rule) for rule in (LevelRule(count=1), LevelRule(is_hbp=True))]
    forced += [
        replace(free, sizes=FreeSizes(gpus=8, tensor=tensor, pipeline=pipeline))
        for tensor, pipeline in ((2, 1), (8, 1))
    ]
    for other in forced:
        found = plan(Goal(job=job, data=data, free=other))
        assert ms_per_sample(best) <= ms_per_sample(found) * 1.001
    one = plan(Goal(job=job, data=data, free=forced[0]))
    assert not one.result.plan.levels
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


def test_windows_of_a_stream_at_free_sizes(tmp_path, capsys):
    """Prevents a stream that sizes cannot be chosen for, or whose windows they change."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    command = f"{DIGITS} --max-tiles 8 --max-tokens 512 --window 40"
    run(command, "--lengths", tmp_path / "lengths.parquet", "-o", tmp_path / "plan")
    planned = read_plan(tmp_path / "plan")
    assert planned.data.window == 40 and planned.parallel.world_size == 4
    run("check", tmp_path / "plan")
    capsys.readouterr()
    # As the slowest of the sizes that can be given, one by one.
    times = []
    for tensor, pipeline in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4)):
        sizes = f"--tp {tensor} --pp {pipeline} --dp {4 // (tensor * pipeline)}"
        given = command.replace("--gpus 4", sizes)
        name = tmp_path / f"plan-{tensor}-{pipeline}"
        run(given, "--lengths", tmp_path / "lengths.parquet", "-o", name)
        times.append(read_plan(name).prediction.samples_per_second_per_gpu)
    assert planned.prediction.samples_per_second_per_gpu >= max(times) * (1 - 1e-9)


def test_steps_of_an_earlier_plan_at_free_sizes(tmp_path, capsys):
    """Prevents a run that cannot go on with the sizes that are best for other devices."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    first = (
        "plan --model internvl-digits --cluster laptop-cpu --dp 2 --max-tiles 8 --max-tokens 512"
    )
    run(first, "--lengths", tmp_path / "lengths.parquet", "-o", tmp_path / "first")
    run(DIGITS, "--steps-of", tmp_path / "first", "-o", tmp_path / "again")
    first_plan, again = (read_plan(tmp_path / name) for name in ("first", "again"))
    assert again.parallel.world_size == 4
    assert again.data.steps_sha256 == first_plan.data.steps_sha256
    run("check", tmp_path / "again")


def test_another_method_at_free_sizes(tmp_path, capsys):
    """Prevents sizes that are compared by the joint search and planned by another method."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    given = f"{DIGITS} --max-tiles 8 --max-tokens 512 --method parameter --recompute none"
    run(given, "--lengths", tmp_path / "lengths.parquet", "-o", tmp_path / "plan")
    planned = read_plan(tmp_path / "plan")
    assert all(not stage.recompute for stage in planned.stages)


def test_a_step_is_named_by_its_samples(tmp_path, capsys):
    """Prevents a number of samples that means another step where sizes are given."""
    write_lengths(example_lengths(count=400), tmp_path / "lengths.parquet")
    given = (
        "plan --model internvl-digits --cluster laptop-cpu --dp 2 --max-tiles 8 --max-tokens 512"
    )
    for samples in (40, 80):
        run(
            f"{given} --samples-per-step {samples} --lengths",
            tmp_path / "lengths.parquet",
            "-o",
            tmp_path / str(samples),
        )
        data = read_plan(tmp_path / str(samples)).data
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


def test_a_goal_refuses_what_the_command_line_does(capsys, tmp_path):
    """Prevents a goal from Python that the command line would refuse."""
    lengths = example_lengths()
    write_lengths(lengths, tmp_path / "lengths.parquet")
    job = training_job("internvl-digits", "laptop-cpu")
    by_levels = Free(levels=LevelRule(count=2))
    for data, free, options in (
        (Stream(lengths=lengths, window=40), by_levels, "--window 40 --packing-levels 2"),
        (
            Samples(lengths=lengths),
            replace(by_levels, split=SplitRule(method=PartitionMethod.LAYER)),
            "--packing-levels 2 --method layer",
        ),
    ):
        with pytest.raises(UserError, match="cannot be given with"):
            Goal(job=job, data=data, free=free)
        given = f"plan --model internvl-digits --cluster laptop-cpu {options} --lengths"
        said = failure(capsys, given, tmp_path / "lengths.parquet", "-o", tmp_path / "p")
        assert "cannot be given with" in said


def test_the_commands_of_a_run_are_printed_and_not_done_twice(digits, tmp_path, capfd):
    """Prevents a run that hides its steps, or scans and plans again what is there."""
    given = (
        f"run --model internvl-digits --cluster laptop-cpu --gpus 2 --no-start --data "
        f"{shlex.quote(str(digits / 'train' / 'meta.json'))} --tokenizer-model "
        f"{shlex.quote(str(digits / 'tokenizer.model'))}"
    )
    for repeated in (False, True):
        run(given, "-o", tmp_path / "job", "--", "--lr", "1e-3")
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
    asked = RunOptions(
        model="internvl2.5-8b",
        cluster="h100-80g",
        data=Path("data.jsonl"),
        output=Path("job"),
        gpus=32,
    )
    cluster = load_cluster("h100-80g")
    words = shlex.split(asked.launch(cluster, 32, []))
    assert words[words.index("--nodes") + 1] == "4"
    assert words[words.index("--gpus-per-node") + 1] == "8"
    assert "train_nodes.sh" in asked.launch(cluster, 4, [])

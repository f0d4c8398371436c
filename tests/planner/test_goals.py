"""Goals: joint search of the free choices, including the schedule, and the table of conflicts."""

import shlex
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from cli_cases import failure, run
from length_cases import long_tailed
from plan_cases import MODEL, counting, example_lengths, origin_of, request

from omnibal import Free, Goal, Planned, Samples, plan, training_job
from omnibal.base.errors import UserError
from omnibal.cli.run_steps import write_launch
from omnibal.data.lengths import write_lengths
from omnibal.job import plan_data
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, read_plan
from omnibal.job.planner import make_ordered_plan, order_plan
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import OWN
from omnibal.packing.packing import PackingMethod
from omnibal.packing.steps import pack_epochs
from omnibal.pipeline.baselines import PartitionMethod, SplitRule
from omnibal.pipeline.schedules import ScheduleName
from omnibal.pipeline.stage_memory import fits_cap
from omnibal.search import finalists, planning
from omnibal.search.conflicts import CONFLICTS, NEEDS, Feature, check_complete, check_together
from omnibal.search.goal import ShapesAlone, Silence, Stream
from omnibal.search.level_estimates import LevelRule
from omnibal.search.strategy import FreeSizes

DIGITS = "plan --model internvl-digits --cluster laptop-cpu"
CAPPED = f"{DIGITS} --max-tiles 8 --max-tokens 512"


def ms_per_sample(example_plan: Planned) -> float:
    return 1e3 / example_plan.prediction.samples_per_second_per_gpu


def test_what_is_free_is_no_slower_than_what_is_forced():
    """Prevents a joint search that returns a slower plan than a search with one forced choice."""
    job = training_job("llama3.1-8b", "h100-80g")
    data = Samples(lengths=long_tailed(800, 65_536), samples_per_step=200)
    free = replace(Free.everything(gpus=8), placements=(EncoderPlacement.PIPELINE,))
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


def test_given_sizes_have_the_default_step_of_recipes():
    """Prevents another default step size for given parallel sizes than for a GPU count."""
    job = training_job("internvl-digits", "laptop-cpu")
    data = Samples(lengths=example_lengths(count=1000), caps=Caps.of(tiles=8, tokens=512))
    sized = replace(job, parallel=Parallel(pipeline=1, data=2))
    given = plan(Goal(job=sized, data=data))
    free = plan(Goal(job=job, data=data, free=Free(sizes=FreeSizes(gpus=2))))
    assert given.asked_samples == free.asked_samples == 128
    assert given.step_source == free.step_source == "as published recipes on 2 GPUs"
    packs = plan(Goal(job=sized, data=replace(data, micro_batches=3)))
    assert packs.asked_samples is None and packs.step_source == ""


def test_the_placement_of_encoders_is_searched_for_with_sizes():
    """Prevents comparing encoder placements only at sizes that suit either."""
    job, free = training_job("internvl-digits", "laptop-cpu"), Free.everything(gpus=2)
    data = Samples(lengths=example_lengths(), samples_per_step=40)
    best = plan(Goal(job=job, data=data, free=free))
    for placement in EncoderPlacement:
        found = plan(Goal(job=job, data=data, free=replace(free, placements=(placement,))))
        is_data_parallel = found.result.plan.data_parallel_encoders is not None
        assert is_data_parallel == (placement is not EncoderPlacement.PIPELINE)
        # The cap search starts from the few best sizes and placements.
        assert ms_per_sample(best) <= ms_per_sample(found) * 1.005
    assert best.placement.chosen is best.strategies.best.placement


def test_windows_of_a_stream_at_free_sizes(tmp_path, lengths_file):
    """Prevents a stream that is refused at free sizes, or planned slower than at given sizes."""

    def plan_with_sizes(sizes: str) -> Plan:
        options = f"{CAPPED} --window 40 {sizes} --lengths"
        run(options, lengths_file, "-o", tmp_path / sizes)
        return read_plan(tmp_path / sizes)

    example_plan = plan_with_sizes("--gpus 4")
    assert example_plan.data.window == 40 and example_plan.parallel.world_size == 4
    run("check", tmp_path / "--gpus 4")
    # No slower than any combination of sizes given explicitly.
    given = [
        plan_with_sizes(f"--tp {tensor} --pp {pipeline} --dp {4 // (tensor * pipeline)}")
        for tensor, pipeline in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4))
    ]
    best, *rates = (each.prediction.samples_per_second_per_gpu for each in (example_plan, *given))
    assert best >= max(rates) * (1 - 1e-9)


def test_steps_of_an_earlier_plan_at_free_sizes(tmp_path, lengths_file):
    """Prevents refusing free sizes for a plan that reuses the steps of an earlier plan."""
    run(f"{CAPPED} --dp 2", "--lengths", lengths_file, "-o", tmp_path / "first")
    run(f"{DIGITS} --gpus 4 --steps-of", tmp_path / "first", "-o", tmp_path / "again")
    first, again = (read_plan(tmp_path / name) for name in ("first", "again"))
    assert again.parallel.world_size == 4
    assert again.data.steps_sha256 == first.data.steps_sha256
    run("check", tmp_path / "again")


def test_another_method_at_free_sizes(tmp_path, lengths_file):
    """Prevents a size search that ignores the given partition method and recomputation."""
    given = f"{CAPPED} --gpus 4 --method parameter --recompute none --lengths"
    run(given, lengths_file, "-o", tmp_path / "plan")
    assert all(not stage.recompute for stage in read_plan(tmp_path / "plan").stages)


@pytest.mark.parametrize("samples", [40, 80])
def test_a_step_is_named_by_its_samples(tmp_path, samples):
    """Prevents --samples-per-step from giving steps of another size at given parallel sizes."""
    write_lengths(example_lengths(count=400), tmp_path / "lengths.parquet")
    given = f"{CAPPED} --dp 2 --samples-per-step {samples} --lengths"
    run(given, tmp_path / "lengths.parquet", "-o", tmp_path / "plan")
    data = read_plan(tmp_path / "plan").data
    assert data.samples / data.steps == pytest.approx(samples, rel=0.15)


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda each: f"{each.one} {each.other}")
def test_every_conflict_is_refused_with_its_reason(conflict):
    """Prevents a row of the conflict table that refuses nothing or lacks a reason."""
    with pytest.raises(UserError, match="cannot be given with") as refused:
        check_together({conflict.one: "first", conflict.other: "second"})
    assert conflict.why in str(refused.value)
    check_together({conflict.one: "first"})
    check_together({conflict.other: "second"})


def test_needs_and_conflicts_do_not_contradict():
    """Prevents a feature that can never be given, as its requirement conflicts with it."""
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
    """Prevents a goal from Python that accepts a combination the command line refuses."""
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
    """Prevents a run that hides its commands, or repeats a finished scan or plan."""
    given = "run --model internvl-digits --cluster laptop-cpu --gpus 2 --no-start --from-scratch"
    given += " --pp 2 --samples-per-step 40 --data"
    files = digits / "train" / "meta.json", "--tokenizer-model", digits / "tokenizer.model"
    for repeated in (False, True):
        run(given, *files, "-o", tmp_path / "job", "--", "--lr", "1e-3")
        shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("$ ")]
        assert [line.split()[2] for line in shown] == ["lengths", "plan", "check"]
        assert [line.endswith("(done)") for line in shown] == [repeated, repeated, False]
    assert read_plan(tmp_path / "job" / "plan").parallel.pipeline == 2
    words = shlex.split((tmp_path / "job" / "train.sh").read_text(), comments=True)
    (launcher,) = (place for place, word in enumerate(words) if word.endswith("train_nodes.sh"))
    assert words[launcher + 1 : launcher + 4] == ["1", "0", "localhost"]
    assert words[-2:] == ["--lr", "1e-3"]


def test_a_run_on_several_nodes_is_submitted(tmp_path):
    """Prevents a job of several nodes that starts on one node instead of through Slurm."""
    for gpus, launcher in ((4, "train_nodes.sh"), (32, "train.sbatch")):
        write_launch(tmp_path, Path("data.jsonl"), None, 8, gpus, [])
        words = shlex.split((tmp_path / "train.sh").read_text(), comments=True)
        assert any(word.endswith(launcher) for word in words)
    assert words[words.index("--nodes") + 1] == "4"
    assert words[words.index("--gpus-per-node") + 1] == "8"


ONE_ALONE = OWN.model_copy(update={"schedules": frozenset({"1f1b"})})
DATA = ShapesAlone(caps=Caps.of(tokens=4096, tiles=8), micro_batches=4)
MANY, OF_MANY = {"parallel": Parallel(pipeline=32)}, FreeSizes(gpus=32, pipeline=32)
IN_FP8 = {"precision": "fp8"}


def job(model: str = "internvl3-2b", **changes) -> JobSpec:
    """Return a job with two pipeline stages and two data-parallel ranks."""
    given = {"parallel": Parallel(pipeline=2, data=2)} | changes
    return training_job(model, "h100-80g", **given)


def plan_of(job: JobSpec, schedule: ScheduleName | None, **free) -> Planned:
    data = replace(DATA, micro_batches=None, packs_per_step=4) if free else DATA
    return plan(Goal(job=job, data=data, free=Free(schedule=schedule, **free)))


@cache
def example_plan(schedule: ScheduleName | None, *, runs_all: bool = True) -> Planned:
    """Return the plan in a schedule, or in the trainer's best: of all schedules, or 1F1B alone."""
    return plan_of(job() if runs_all else replace(job(), trainer=ONE_ALONE), schedule)


def test_the_fastest_of_all_schedules_is_taken() -> None:
    """Prevents choosing a schedule that is slower than another or exceeds the memory cap."""
    best = example_plan(None)
    assert best.result.plan.schedule == best.schedule.chosen
    others = {name: example_plan(name) for name in ("1f1b", "zb-v", "interleaved")}
    steps_ms = {name: each.prediction.step_ms for name, each in others.items()}
    assert all(each.result.plan.schedule.name == name for name, each in others.items())
    assert best.prediction.step_ms <= min(steps_ms.values()) * 1.005
    assert best.prediction.step_ms < 0.95 * steps_ms["1f1b"]
    for each in (best, *others.values()):
        peak_gib = max(stage.memory.peak_gib for stage in each.prediction.stages)
        assert fits_cap(peak_gib, job().memory_cap_gib)
        assert len(each.result.plan.stages) == 2 * each.result.plan.schedule.chunks
    saved = 1 - best.prediction.step_ms / steps_ms["1f1b"]
    assert f"{saved:.1%} faster than in 1f1b" in best.schedule.reason
    idle = others["1f1b"].prediction.bubble_fraction
    assert best.schedule.reason.endswith(f"in place of {idle:.1%}")


def test_what_the_trainer_does_not_run_is_planned_if_it_is_named() -> None:
    """Prevents a default schedule that the trainer cannot run, or refusing a schedule by name."""
    usual = example_plan(None, runs_all=False)
    assert (usual.result.plan.schedule.name, usual.schedule.reason) == ("1f1b", "")
    assert example_plan("zb-v", runs_all=False).result.plan == example_plan("zb-v").result.plan


def test_free_sizes_are_planned_in_the_best_schedule_too() -> None:
    """Prevents a size search that ignores schedules faster than 1F1B."""
    sizes = FreeSizes(gpus=4, pipeline=4)
    one, every = (
        plan_of(each, None, sizes=sizes) for each in (replace(job(), trainer=ONE_ALONE), job())
    )
    assert every.result.plan.schedule.name != "1f1b"
    assert every.prediction.step_ms < one.prediction.step_ms


def test_the_fastest_plan_is_put_in_order_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents unordered packs in the chosen schedule, or packing once per schedule."""
    asked = request(lengths=example_lengths(origin_of(MODEL)), packing=PackingMethod.BALANCED)
    samples = Samples(lengths=asked.data.lengths, caps=asked.data.caps, epochs=2, micro_batches=4)
    free = Free(levels=LevelRule(count=1), schedule=None)
    ordered = counting(monkeypatch, finalists, order_plan)
    packed = counting(monkeypatch, plan_data, pack_epochs)
    made = plan(Goal(job=asked.job, data=samples, free=free))
    assert made.schedule.chosen.name != "1f1b"
    assert ordered.call_count == packed.call_count == 1
    expected = make_ordered_plan(replace(asked, schedule=made.schedule.chosen))
    assert made.result.plan == expected.plan
    assert made.schedule.steps_ms[made.schedule.chosen] == made.prediction.step_ms


def test_sizes_are_searched_among_those_with_room_for_the_schedule() -> None:
    """Prevents sizes compared in 1F1B, of which the best have a single stage."""
    sizes = FreeSizes(gpus=2)
    made, usual = (plan_of(job(), name, sizes=sizes) for name in ("interleaved", "1f1b"))
    assert {each.schedule.chosen.name for each in made.strategies.ranking} == {"interleaved"}
    assert made.result.plan.parallel.pipeline == 2
    assert usual.result.plan.parallel.pipeline == 1


@pytest.mark.parametrize(
    ("changes", "schedule", "free", "message"),
    [
        (MANY, "interleaved", {}, "here are 32 with 52 layers together"),
        (MANY, "interleaved", {"sizes": OF_MANY}, "here are 32 with 52 layers together"),
        (IN_FP8, "zb-h1", {}, "FP8 products"),
        (IN_FP8, "zb-v", {}, r"--schedule zb-v cannot be: FP8 products"),
        ({"parallel": Parallel(pipeline=1, data=2)}, "interleaved", {}, "needs 2 pipeline stages"),
        ({"trainer": "megatron-lm"}, "zb-h1", {}, Feature.SCHEDULE.value),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(monkeypatch, changes, schedule, free, message):
    """Prevents a search of minutes before the refusal of a schedule that cannot run."""
    for module, search in ((finalists, "make_ordered_plan"), (planning, "search_with_levels")):
        monkeypatch.setattr(module, search, Mock(side_effect=AssertionError))
    with pytest.raises(UserError, match=message):
        plan_of(job(**changes), schedule, **free)


def test_little_data_is_said_before_the_search(monkeypatch):
    """Prevents a search of minutes without a warning for data smaller than one step."""
    said = list[str]()
    listener = Mock(wraps=Silence(), note=said.append)
    monkeypatch.setattr(planning, "search_with_levels", Mock(side_effect=UserError("searched")))
    job = training_job("internvl-digits", "laptop-cpu")
    data = Samples(lengths=example_lengths().take(np.arange(1)))
    with pytest.raises(UserError, match="searched"):
        planning.plan(Goal(job=job, data=data, free=Free.everything(gpus=2)), listener)
    assert "1 sample(s), less than the 128 of a step" in said[0]
    assert "2 GPUs cannot all be data-parallel" in said[0]

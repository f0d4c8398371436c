"""`omnibal plan --for`: plans within what a trainer can be told, and what its limits cost."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from length_cases import make_lengths
from plan_cases import MODEL, example_lengths, job_spec

from omnibal import cli
from omnibal.data.lengths import write_lengths
from omnibal.job.check import open_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, PlanResult, make_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import ANY_PACKS, FREE, OWN, TARGETS, TargetName
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.search.limit_costs import (
    CostOfLimits,
    LimitName,
    binding_limits,
    lifted,
    rate_of,
    rates_lifted,
    requests_lifted,
)

PLAN = "plan --model internvl-digits --cluster laptop-cpu --dp 2 --micro-batches 4 --packing isf "


def run(capsys, command: str, status: int | None = None) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    printed = capsys.readouterr()
    assert ended.value.code in ((0, None) if status is None else (status,)), printed.err
    return printed.out, printed.err


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    return tmp_path / "lengths.parquet"


@pytest.mark.parametrize("name", TargetName)
def test_a_plan_is_made_for_every_trainer(capsys, tmp_path, lengths, name):
    """Prevents a trainer that no plan can be made for, a plan that does not say whom it is for or
    that other commands refuse, and one that is predicted to be faster under limits."""
    target, plan = TARGETS[name], tmp_path / "plan"
    caps = "--max-tokens 512" if target.packs.tokens_alone else "--max-tokens 512 --max-tiles 8"
    command = f"{PLAN} --lengths {lengths} {caps} --for {name} --json -o {plan}"
    printed, notes = run(capsys, command)
    summary = json.loads(printed)
    assert summary["made_for"] == json.loads((plan / "plan.json").read_text())["made_for"] == name
    rate, free = (
        summary[key] for key in ("samples_per_second_per_gpu", "free_samples_per_second_per_gpu")
    )
    assert summary["slower_than_free"] == pytest.approx(1 - rate / free)
    assert 0 <= summary["slower_than_free"] < 1
    assert all(0 <= limit["slower"] < 1 for limit in summary["limits"])
    assert f"for {target.title}: " in notes
    assert ("WARNING" in notes) == (name is TargetName.XTUNER)
    assert "no pack exceeds" in run(capsys, f"check {plan}")[0]
    # The steps can be taken over, by a run of this project's too.
    command = f"{PLAN} --pp 2 --steps-of {plan} --json -o {tmp_path / 'again'}"
    run(capsys, command.replace("--micro-batches 4 --packing isf ", ""))
    plans = [open_plan(tmp_path / each).plan for each in ("plan", "again")]
    data = [plan.data for plan in plans]
    assert data[0] is not None and data[1] is not None
    assert data[0].steps_sha256 == data[1].steps_sha256
    assert data[0].method == data[1].method == ("next_fit" if target.packs.next_fit else "isf")


def test_the_plan_to_compare_with_is_the_one_without_the_option(capsys, tmp_path, lengths):
    """Prevents a comparison with another job, other caps or other sizes."""
    limits = "--max-tokens 512 --max-tiles 8 --packing-levels 1"
    command = f"{PLAN} --pp 2 --lengths {lengths} {limits} --json"
    free = json.loads(run(capsys, f"{command} -o {tmp_path / 'free'}")[0])
    made = json.loads(run(capsys, f"{command} --for megatron-lm -o {tmp_path / 'made'}")[0])
    assert free["made_for"] is None and "limits" not in free
    # Or a plan with one limit less, where one happens to be faster.
    rate = made["samples_per_second_per_gpu"]
    rates = [rate / (1 - limit["slower"]) for limit in made["limits"]]
    best = max(free["samples_per_second_per_gpu"], *rates)
    assert made["free_samples_per_second_per_gpu"] == pytest.approx(best)
    alone = json.loads(
        run(capsys, f"{command} --for megatron-lm --no-compare -o {tmp_path / 'alone'}")[0]
    )
    assert alone["made_for"] == "megatron-lm" and "limits" not in alone
    assert (tmp_path / "alone/plan.json").read_bytes() == (tmp_path / "made/plan.json").read_bytes()


def test_caps_and_sizes_are_searched_within_the_limits(capsys, tmp_path, lengths):
    """Prevents searched caps that limit items where the trainer limits tokens alone."""
    for number, sizes in enumerate(("--dp 2 --micro-batches 4", "--gpus 4 --samples-per-step 60")):
        command = PLAN.replace("--dp 2 --micro-batches 4", sizes)
        plan = tmp_path / str(number)
        _, notes = run(
            capsys, f"{command} --lengths {lengths} --for ms-swift --no-compare -o {plan}"
        )
        assert "--max-tiles" not in notes
        data = open_plan(plan).plan.data
        assert data is not None and data.method == "next_fit"
        all_tiles = int(example_lengths().column("tiles").sum())
        tiles, tokens = example_lengths().sizes(["tiles", "tokens"])
        densest = float((tiles / tokens).max())
        most = min(densest * data.caps["tokens"] + 1, all_tiles)
        assert 0.8 * most < data.caps["tiles"] <= most


def test_plans_of_shapes_are_compared_by_their_steps(capsys, tmp_path):
    """Prevents a plan without samples that cannot be made for a trainer."""
    for sizes in ("--dp 2 --pp 2 --micro-batches 4", "--gpus 4"):
        command = PLAN.replace("--dp 2 --micro-batches 4", sizes).replace("--packing isf", "")
        command += f" --max-tokens 512 --for megatron-lm --json -o {tmp_path / 'plan'}"
        summary = json.loads(run(capsys, command)[0])
        assert summary["free_samples_per_second_per_gpu"] is None
        assert summary["slower_than_free"] >= 0
        assert "full_steps" not in [each["limit"] for each in summary["limits"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--for xtuner --pp 2", "--pp 2 was given for XTuner v1, whose pipeline size is at most 1"),
        (
            "--for ms-swift-deepspeed --tp 2",
            "plan with `omnibal plan --for ms-swift-deepspeed --tp 1`",
        ),
        ("--for ms-swift --max-tiles 8", "--max-tiles cannot be given with --for"),
        ("--for ms-swift --limit loss_tokens=99", "packs by tokens alone"),
        (
            "--for megatron-lm --encoder data-parallel",
            "--encoder data-parallel cannot be given with --for megatron-lm",
        ),
        ("--for megatron-lm --window 40", "--window 40 cannot be given with --for"),
        (
            "--for megatron-lm --packing-levels 2",
            "--packing-levels 2 cannot be given with --for megatron-lm",
        ),
        ("--for megatron-lm --method parameter", "--method parameter cannot be given with --for"),
        ("--for megatron-lm --recompute none", "--recompute none cannot be given with --for"),
        ("--for megatron-lm --curriculum-steps 2", "--curriculum-steps 2 cannot be given"),
        (
            "--for megatron-lm --pp 2 --max-tiles 8 --schedule zb-v",
            "--schedule zb-v was given for Megatron-LM, which runs 1f1b and interleaved",
        ),
        (
            "--for megatron-lm --pp 3 --max-tiles 8 --schedule interleaved",
            "a step has 4 micro-batches a rank, and Megatron-LM interleaves multiples of the 3",
        ),
        ("--no-compare", "--no-compare was given without --for"),
        ("--for nobody", "'nobody' is not one of"),
    ],
)
def test_what_a_trainer_cannot_be_told_is_refused(capsys, tmp_path, lengths, options, message):
    """Prevents a plan that leaves out, unsaid, what was asked for."""
    command = f"{PLAN} --max-tokens 512 --lengths {lengths} {options} -o {tmp_path / 'plan'}"
    _, error = run(capsys, command, 2)
    assert message in " ".join(error.split())
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("name", ["ms-swift", "megatron-bridge"])
def test_chunks_are_planned_for_trainers_that_take_them(capsys, tmp_path, name):
    """Prevents: a plan in 1F1B for a trainer that is faster with chunks, chunks for numbers of
    micro-batches that it refuses, and encoders on a later chunk than the first."""
    base = (
        "plan --model internvl3-2b --cluster h100-80g --pp 2 --dp 2 --max-tokens 4096 "
        f"--for {name} --schedule auto --json -o {tmp_path / 'plan'} --micro-batches"
    )
    even = json.loads(run(capsys, f"{base} 4")[0])
    odd = json.loads(run(capsys, f"{base} 5")[0])
    assert odd["schedule"]["name"] == "1f1b" and "multiples of the 2" in odd["schedule_reason"]
    # The free plan interleaves too, or has no bubble at all.
    assert odd["limits"][-1]["limit"] == "schedules" and odd["limits"][-1]["slower"] > 0.05
    assert even["schedule"]["name"] == "interleaved"
    assert even["step_ms"] < 0.95 * even["schedule_steps_ms"]["1f1b"]
    assert even["slower_than_free"] < odd["slower_than_free"]


def test_a_limit_is_lifted_alone():
    """Prevents a limit that is not lifted, or another that is lifted with it unsaid."""
    for name in TargetName:
        limits = TARGETS[name]
        for limit in LimitName:
            fewer = lifted(limits, limit)
            # Other sizes are another limit of a trainer that divides weights over all ranks.
            assert fewer.name == (None if limit is LimitName.SHARDING else name)
            changed = {
                field
                for before, after in ((limits.stages, fewer.stages), (limits.packs, fewer.packs))
                for field in type(before).model_fields
                if getattr(before, field) != getattr(after, field)
            }
            changed |= {"sharding"} if limits.shardings != fewer.shardings else set()
            changed |= {"schedules"} if limits.schedules != fewer.schedules else set()
            together = {
                LimitName.SHARDING: {"schedules"},
                LimitName.ORDER: {"full_steps"},
            }
            assert changed <= {limit.value} | together.get(limit, set())
        without = limits
        for limit in LimitName:
            without = lifted(without, limit)
        assert (without.stages, without.packs, without.shardings) == (
            FREE,
            ANY_PACKS,
            OWN.shardings,
        )


def test_limits_that_cannot_bind_are_not_looked_at():
    """Prevents plans that are made to compare what cannot differ."""
    limits = TARGETS[TargetName.MS_SWIFT]
    found = {}
    for tensor, pipeline, has_samples in product((1, 2), (1, 2), (False, True)):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, sequence_parallel=tensor > 1)
        found[tensor, pipeline, has_samples] = {
            limit.value
            for limit in binding_limits(limits, MODEL, parallel, has_samples=has_samples)
        }
    always = {"recompute", "head_on_all_tokens"}
    assert found[1, 1, False] == always
    assert found[2, 1, False] == always | {"encoders_whole"}
    of_stages = always | {"encoders_on_first"}
    assert found[1, 2, False] == of_stages
    assert found[2, 2, True] == of_stages | {"encoders_whole", "tokens_alone", "next_fit"}


def test_the_sentence_names_what_costs_most():
    """Prevents a reason that costs nothing, and a plan that seems faster under limits."""
    limits, first, whole = (
        TARGETS[TargetName.MS_SWIFT],
        LimitName.ENCODERS_ON_FIRST,
        LimitName.ENCODERS_WHOLE,
    )
    cost = CostOfLimits.of(limits, 91, 100, {first: 98, whole: 90}, 0)
    assert "9% slower" in cost.sentence and "whole" not in cost.sentence
    assert [each.slower for each in cost.limits] == [pytest.approx(1 - 91 / 98), 0]
    both = CostOfLimits.of(limits, 91, 95, {first: 95, whole: 100}, 0.03)
    assert both.slower == pytest.approx(0.09)
    assert both.sentence.index("whole encoder (9%)") < both.sentence.index("first stage (4%)")
    # Of the tenth that is lost, six hundredths are most of it.
    for others, is_more in (((0.05, 0.04), False), ((0.03, 0.02), True)):
        rates = {name: 90 / (1 - each) for name, each in zip((first, whole), others, strict=True)}
        said = CostOfLimits.of(limits, 90, 100, rates, 0).sentence
        assert said.endswith("than each alone") == is_more


def test_caps_of_both_plans_decide_whether_their_limit_is_looked_at():
    """Prevents a search for what a limit of tokens alone costs where caps were given."""
    limits = TARGETS[TargetName.MS_SWIFT]
    lengths = example_lengths()

    def planned(caps: Caps) -> PlanResult:
        data = SampleData(lengths=lengths, levels=(Level(caps=caps),), packs_per_step=8)
        return make_plan(PlanRequest(job=job_spec(), data=data))

    small, large = planned(Caps.of(tiles=8, tokens=512)), planned(Caps.of(tiles=12, tokens=640))
    for free, is_looked_at in ((small, False), (large, True)):
        found = requests_lifted(limits, small, PackingMethod.BALANCED, free)
        assert (LimitName.TOKENS_ALONE in found) == is_looked_at
        assert LimitName.ENCODERS_ON_FIRST in found


def test_limits_are_compared_on_some_samples_packed_once(monkeypatch):
    """Prevents as many whole searches as limits, each with packs of its own."""
    limits, lengths = TARGETS[TargetName.MEGATRON_LM], example_lengths(count=3000)
    data = SampleData(
        lengths=lengths, levels=(Level(caps=Caps.of(tiles=8, tokens=512)),), packs_per_step=16
    )
    job = job_spec(parallel=Parallel(pipeline=2, data=2))
    free = make_plan(PlanRequest(job=job, data=data))
    limited = replace(data, rules=limits.packs)
    result = make_plan(PlanRequest(job=replace(job, trainer=limits), data=limited))
    requests = requests_lifted(limits, result, PackingMethod.BALANCED, free)
    assert len(requests) >= 3
    packed = []

    def pack(samples, *arguments, **options):
        packed.append(len(samples))
        return pack_samples(samples, *arguments, **options)

    monkeypatch.setattr("omnibal.steps.steps.pack_samples", pack)
    done = []
    of_all = rates_lifted(limits, result, PackingMethod.BALANCED, requests, done.append)
    assert done == [1] * len(requests) and set(packed) == {3000} and len(packed) <= 2
    for name, request in requests.items():
        assert of_all[name] == pytest.approx(rate_of(make_plan(request)))
    monkeypatch.setattr("omnibal.search.limit_costs._COMPARED_SAMPLES", 900)
    packed.clear()
    of_some = rates_lifted(limits, result, PackingMethod.BALANCED, requests, done.append)
    assert set(packed) == {900} and len(packed) <= 2
    assert of_some.keys() == of_all.keys()
    for name, rate in of_some.items():
        assert rate == pytest.approx(of_all[name], rel=0.05), name


def test_ranks_that_are_all_data_parallel_have_a_pack_each(capsys, tmp_path, lengths):
    """Prevents a step that the user did not give and that is too small for the trainer's ranks."""
    few = tmp_path / "few.parquet"
    write_lengths(make_lengths([(0, 500), *[(0, 50)] * 150]), few)
    for data, options, ranks in (
        (lengths, "--cluster laptop-cpu --gpus 12 --max-tokens 512 --max-tiles 8", 12),
        (few, "--cluster h100-80g --gpus 8", 8),
    ):
        plan = data.with_suffix("")
        command = (
            f"plan --model internvl-digits {options} --lengths {data} --for xtuner --no-compare "
            f"--json -o {plan}"
        )
        run(capsys, command)
        assert open_plan(plan).plan.parallel.data == ranks


def test_what_is_left_out_is_in_no_figure(capsys, tmp_path):
    """Prevents a prediction of packs that the trainer does not train."""
    lengths = make_lengths([(0, 77)] * 600)
    write_lengths(lengths, tmp_path / "lengths.parquet")
    for micro_batches, samples in ((8, 576), (40, 600)):
        plan, export = (tmp_path / f"{name}{micro_batches}" for name in ("plan", "export"))
        _, notes = run(
            capsys,
            f"{PLAN} --dp 4 --micro-batches {micro_batches} --lengths {tmp_path}/lengths.parquet "
            f"--max-tokens 811 --for ms-swift --no-compare -o {plan}",
        )
        assert ("24 of 600 samples are left out" in notes) == (samples == 576)
        assert ("less than a step of 160 packs" in notes) == (samples == 600)
        assert "can be studied" not in notes
        made = json.loads(run(capsys, f"export {plan} --to {export} --json")[0])["expected"]
        packs, found = open_plan(plan).steps[0], open_plan(plan).plan
        assert found.data is not None and found.prediction is not None
        assert made["samples"] == len(packs.packs.samples) == samples
        assert made["dropped_samples"] == found.data.left_out == 600 - samples
        assert (made["steps"], made["packs_per_step"]) == (packs.steps, len(packs) // packs.steps)
        trained_ms = found.prediction.step_ms * packs.steps
        per_gpu = 1e3 * samples / trained_ms / 4
        assert found.prediction.samples_per_second_per_gpu == pytest.approx(per_gpu)
        for wrong in (0, 23, 25):
            changed = found.data.model_copy(update={"left_out": wrong})
            of_other = found.model_copy(update={"data": changed}).model_dump_json()
            (plan / "plan.json").write_text(of_other)
            if wrong != found.data.left_out:
                run(capsys, f"check {plan}", 2)

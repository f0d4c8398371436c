"""`omnibal plan --for`: plans within a trainer's limits, and the cost of these limits."""

import json
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli_cases import failure, printed, status
from length_cases import make_lengths
from plan_cases import MODEL, counting, example_lengths, request

from omnibal.data.lengths import write_lengths
from omnibal.job.check import open_plan
from omnibal.job.plan_files import read_plan_data
from omnibal.job.planner import make_plan
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.model.targets import ANY_PACKS, FREE, OWN, TARGETS, TargetName, TrainerConstraints
from omnibal.packing import steps
from omnibal.packing.next_fit import next_fit_packs
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.search.limit_costs import (
    CostOfLimits,
    LimitName,
    binding_limits,
    lift_limit,
    rate_of,
    rates_lifted,
    requests_lifted,
)

DIGITS = "plan --model internvl-digits --cluster laptop-cpu"
PLAN = f"{DIGITS} --dp 2 --micro-batches 4 --packing isf"


def run(capsys, command: str, *arguments: object) -> tuple[dict, str]:
    """Return a command's JSON output and its notes."""
    code, said = status(command, *arguments, "--json"), capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out), said.err


@pytest.mark.parametrize("name", TargetName)
def test_a_plan_is_made_and_exported_for_every_trainer(capsys, tmp_path, lengths_file, name):
    """Prevents a trainer without plans, plans that other commands refuse or that limits make
    faster, and exports of other packs or steps."""
    target, plan, folder = TARGETS[name], tmp_path / "plan", tmp_path / "export"
    sizes = "--dp 2" if target.max_pipeline == 1 else "--pp 2 --dp 2"
    caps = "--max-tokens 512" if target.packs.tokens_alone else "--max-tokens 512 --max-tiles 8"
    options = f"{sizes} {caps} --micro-batches 3 --epochs 2 --packing isf --for {name} --lengths"
    summary, notes = run(capsys, f"{DIGITS} {options}", lengths_file, "-o", plan)
    assert summary["made_for"] == json.loads((plan / "plan.json").read_text())["made_for"] == name
    rate, free = (summary[f"{of}samples_per_second_per_gpu"] for of in ("", "free_"))
    assert summary["slower_than_free"] == pytest.approx(1 - rate / free)
    assert all(0 <= each["slower"] < 1 for each in summary["limits"])
    assert 0 <= summary["slower_than_free"] < 1
    assert f"for {target.title}: " in notes
    assert ("WARNING" in notes) == (name is TargetName.XTUNER)
    assert "no pack exceeds" in printed(capsys, "check", plan)
    # This project's own runs can reuse the steps too.
    run(capsys, f"{DIGITS} --dp 2 --pp 2 --steps-of {plan} -o {tmp_path / 'again'}")
    first, again = (open_plan(tmp_path / each).plan.data for each in ("plan", "again"))
    assert first.steps_sha256 == again.steps_sha256
    assert first.method == again.method == ("next_fit" if target.packs.next_fit else "isf")
    result, _ = run(capsys, "export", plan, "--to", folder)
    packs, lengths = read_plan_data(open_plan(plan).plan, plan)
    order = pq.read_table(folder / "order.parquet")
    pack, sample = (order[name].to_numpy() for name in ("pack", "sample"))
    assert (np.bincount(sample) == 2).all() and len(np.unique(pack)) == len(packs)
    full = np.bincount(packs.step) == 6
    assert full[:-1].all() and result["expected"]["steps"] == full.sum()
    bounds = np.flatnonzero(np.diff(pack, prepend=-1))
    planned = np.lexsort((packs.dp_rank, packs.slot, packs.step))
    for row, members in zip(planned, np.split(sample, bounds[1:]), strict=True):
        assert sorted(members) == sorted(packs.packs[row])
    if target.packs.next_fit:
        length = int(re.search(r"--packing_length (\d+)", result["command"]).group(1))
        made = next_fit_packs(lengths.tokens[sample], length)
        assert made.tolist() == [*bounds, len(sample)]


def test_data_parallel_encoders_are_no_part_of_a_lifted_limit(capsys, tmp_path, lengths_file):
    """Prevents refusing a plan for encoder placements of the plan it is compared with."""
    job = "plan --gpus 2 --for xtuner --model internvl-digits --cluster a100-80g"
    plan, _ = run(capsys, job, "--lengths", lengths_file, "-o", tmp_path / "plan")
    assert {each["limit"] for each in plan["limits"]} >= {"sharding"}


def test_the_plan_to_compare_with_is_the_one_without_the_option(capsys, tmp_path, lengths_file):
    """Prevents a comparison with another job, other caps or other sizes."""
    limits = "--max-tokens 512 --max-tiles 8 --packing-levels 1"
    names = {"free": "", "made": "--for megatron-lm", "alone": "--for megatron-lm --no-compare"}
    free, made, alone = (
        run(capsys, f"{PLAN} --pp 2 --lengths {lengths_file} {limits} {options}", "-o",
            tmp_path / name)[0]
        for name, options in names.items()
    )  # fmt: skip
    assert free["made_for"] is None and "limits" not in free
    # Or a plan with one limit less, if that is faster.
    rate = made["samples_per_second_per_gpu"]
    rates = [rate / (1 - limit["slower"]) for limit in made["limits"]]
    best = max(free["samples_per_second_per_gpu"], *rates)
    assert made["free_samples_per_second_per_gpu"] == pytest.approx(best)
    assert alone["made_for"] == "megatron-lm" and "limits" not in alone
    assert (tmp_path / "alone/plan.json").read_bytes() == (tmp_path / "made/plan.json").read_bytes()


@pytest.mark.parametrize(
    "sizes", ["--dp 2 --micro-batches 4", "--gpus 4 --samples-per-step 60"], ids=["caps", "sizes"]
)
def test_caps_and_sizes_are_searched_within_the_limits(capsys, tmp_path, lengths_file, sizes):
    """Prevents searched caps that limit items for a trainer that only limits tokens."""
    options = f"{sizes} --packing isf --for ms-swift --no-compare --lengths {lengths_file}"
    _, notes = run(capsys, f"{DIGITS} {options}", "-o", tmp_path / "plan")
    assert "--max-tiles" not in notes
    data = open_plan(tmp_path / "plan").plan.data
    assert data.method == "next_fit"
    tiles, tokens = example_lengths().sizes(["tiles", "tokens"])
    most = min(float((tiles / tokens).max()) * data.caps["tokens"] + 1, int(tiles.sum()))
    assert 0.8 * most < data.caps["tiles"] <= most


@pytest.mark.parametrize("sizes", ["--dp 2 --pp 2 --micro-batches 4", "--gpus 4"])
def test_plans_of_shapes_are_compared_by_their_steps(capsys, tmp_path, sizes):
    """Prevents a plan without samples that cannot be made for a trainer."""
    command = f"{DIGITS} {sizes} --max-tokens 512 --for megatron-lm"
    summary, _ = run(capsys, command, "-o", tmp_path / "plan")
    assert summary["free_samples_per_second_per_gpu"] is None
    assert summary["slower_than_free"] >= 0
    assert "full_steps" not in [each["limit"] for each in summary["limits"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--for xtuner --pp 2", "--pp 2 was given for XTuner v1, with pipeline size 1 at most"),
        ("--for ms-swift-deepspeed --tp 2", "`omnibal plan --for ms-swift-deepspeed --tp 1`"),
        ("--for ms-swift --max-tiles 8", "--max-tiles cannot be given with --for"),
        ("--for ms-swift --limit loss_tokens=99", "packs by tokens"),
        *(
            (f"--for megatron-lm {option}", f"{option} cannot be given with --for megatron-lm")
            for option in (
                "--encoder data-parallel",
                "--window 40",
                "--packing-levels 2",
                "--method parameter",
                "--recompute none",
                "--curriculum-steps 2",
            )
        ),
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
def test_what_a_trainer_cannot_be_told_is_refused(capsys, tmp_path, lengths_file, options, message):
    """Prevents a plan that silently drops a requested option."""
    command = f"{PLAN} --max-tokens 512 --lengths {lengths_file} {options} -o"
    error = failure(capsys, command, tmp_path / "plan")
    assert message in " ".join(error.split())
    assert not (tmp_path / "plan").exists()


def test_models_with_alibi_are_not_for_megatron(capsys, tmp_path):
    """Prevents an MPT plan that Megatron-core, without ALiBi, trains as another model."""
    command = "plan --model mpt-1b --cluster h100-80g --pp 1 --dp 8 --max-tokens 2048"
    said = "mpt-1b has ALiBi positions, and Megatron-LM has none"
    assert said in failure(capsys, f"{command} --for megatron-lm -o", tmp_path / "plan")
    assert not (tmp_path / "plan").exists()
    printed(capsys, f"{command} -o", tmp_path / "plan")
    export = f"export {tmp_path / 'plan'} --for megatron-lm --to {tmp_path / 'export'}"
    assert said in failure(capsys, export)


@pytest.mark.parametrize("name", ["ms-swift", "megatron-bridge"])
def test_chunks_are_planned_for_trainers_that_take_them(capsys, tmp_path, name):
    """Prevents 1F1B although chunks are faster, and chunks that a trainer refuses."""
    base = "plan --model internvl3-2b --cluster h100-80g --pp 2 --dp 2 --max-tokens 16384"
    options = "--for", name, "--schedule", "auto", "-o", tmp_path / "plan", "--micro-batches"
    even, odd = (run(capsys, base, *options, count)[0] for count in (4, 5))
    assert odd["schedule"]["name"] == "1f1b" and "multiples of the 2" in odd["schedule_reason"]
    # The free plan interleaves too, or has no bubble at all.
    assert odd["limits"][-1]["limit"] == "schedules" and odd["limits"][-1]["slower"] > 0.05
    assert even["schedule"]["name"] == "interleaved"
    assert even["step_ms"] < 0.97 * even["schedule_steps_ms"]["1f1b"]
    assert even["slower_than_free"] < odd["slower_than_free"]


def parts_of(limits: TrainerConstraints) -> dict[str, object]:
    """Return all limits by name."""
    named = {"sharding": limits.shardings, "schedules": limits.schedules}
    return {**dict(limits.stages), **dict(limits.packs), **named}


@pytest.mark.parametrize("name", TargetName)
def test_a_limit_is_lifted_alone(name):
    """Prevents a limit that is not lifted, or another limit lifted with it."""
    limits = without = TARGETS[name]
    together = {LimitName.SHARDING: {"schedules"}, LimitName.ORDER: {"full_steps"}}
    for limit in LimitName:
        fewer, without = lift_limit(limits, limit), lift_limit(without, limit)
        # For a trainer that shards weights over all ranks, sizes are a limit too.
        assert fewer.name == (None if limit is LimitName.SHARDING else name)
        before, after = parts_of(limits), parts_of(fewer)
        changed = {part for part in before if before[part] != after[part]}
        assert changed <= {limit.value} | together.get(limit, set())
    left = without.stages, without.packs, without.shardings
    assert left == (FREE, ANY_PACKS, OWN.shardings)


def test_limits_that_cannot_bind_are_not_looked_at():
    """Prevents plans made to compare limits that cannot bind."""
    always = {"recompute", "head_on_all_tokens"}
    for tensor, pipeline, has_samples in product((1, 2), (1, 2), (False, True)):
        parallel = Parallel(tensor=tensor, pipeline=pipeline, sequence_parallel=tensor > 1)
        limits = TARGETS[TargetName.MS_SWIFT]
        found = binding_limits(limits, MODEL, parallel, has_samples=has_samples)
        expected = always | ({"encoders_whole"} if tensor > 1 else set())
        expected |= {"encoders_on_first"} if pipeline > 1 else set()
        expected |= {"tokens_alone", "next_fit"} if has_samples else set()
        assert {limit.value for limit in found} == expected


def test_the_sentence_names_what_costs_most():
    """Prevents a reason that costs nothing, and a plan that seems faster under limits."""
    limits = TARGETS[TargetName.MS_SWIFT]
    first, whole = LimitName.ENCODERS_ON_FIRST, LimitName.ENCODERS_WHOLE
    cost = CostOfLimits.compare(limits, 91, 100, {first: 98, whole: 90}, 0)
    assert "9% slower" in cost.sentence and "whole" not in cost.sentence
    assert [each.slower for each in cost.limits] == [pytest.approx(1 - 91 / 98), 0]
    both = CostOfLimits.compare(limits, 91, 95, {first: 95, whole: 100}, 0.03)
    assert both.slower == pytest.approx(0.09)
    assert both.sentence.index("whole encoder (9%)") < both.sentence.index("first stage (4%)")
    # Limits that explain a large part of the 10 % lost need no remark.
    for others, is_more in (((0.05, 0.04), False), ((0.03, 0.02), True)):
        rates = {name: 90 / (1 - each) for name, each in zip((first, whole), others, strict=True)}
        said = CostOfLimits.compare(limits, 90, 100, rates, 0).sentence
        assert said.endswith("than each alone") == is_more


def test_caps_of_both_plans_decide_whether_their_limit_is_looked_at():
    """Prevents a search for the cost of token-only limits if caps were given."""
    limits = TARGETS[TargetName.MS_SWIFT]
    small, large = (
        make_plan(request(caps=Caps.of(tiles=tiles, tokens=tokens), packing=PackingMethod.BALANCED))
        for tiles, tokens in ((8, 512), (12, 640))
    )
    for free, is_looked_at in ((small, False), (large, True)):
        found = requests_lifted(limits, small, PackingMethod.BALANCED, free)
        assert (LimitName.TOKENS_ALONE in found) == is_looked_at
        assert LimitName.ENCODERS_ON_FIRST in found


def test_limits_are_compared_on_some_samples_packed_once(monkeypatch):
    """Prevents a full search per limit, each with its own packs."""
    limits, lengths = TARGETS[TargetName.MEGATRON_LM], example_lengths(count=3000)
    asked = request(lengths=lengths, packs_per_step=16, epochs=1, packing=PackingMethod.BALANCED)
    free, job = make_plan(asked), replace(asked.job, trainer=limits)
    result = make_plan(replace(asked, job=job, data=replace(asked.data, rules=limits.packs)))
    requests = requests_lifted(limits, result, PackingMethod.BALANCED, free)
    assert len(requests) >= 3
    packed, done = counting(monkeypatch, steps, pack_samples), []
    of_all = rates_lifted(limits, result, PackingMethod.BALANCED, requests, done.append)
    assert done == [1] * len(requests) and packed.call_count <= 2
    assert {len(call.args[0]) for call in packed.call_args_list} == {3000}
    for name, fewer in requests.items():
        assert of_all[name] == pytest.approx(rate_of(make_plan(fewer)))
    monkeypatch.setattr("omnibal.search.limit_costs._COMPARED_SAMPLES", 900)
    packed.reset_mock()
    of_some = rates_lifted(limits, result, PackingMethod.BALANCED, requests, done.append)
    assert {len(call.args[0]) for call in packed.call_args_list} == {900}
    assert packed.call_count <= 2 and of_some.keys() == of_all.keys()
    for name, rate in of_some.items():
        assert rate == pytest.approx(of_all[name], rel=0.05), name


@pytest.mark.parametrize(
    ("sizes", "options", "ranks"),
    [
        (None, "--cluster laptop-cpu --gpus 12 --max-tokens 512 --max-tiles 8", 12),
        ([(0, 500), *[(0, 50)] * 150], "--cluster h100-80g --gpus 8", 8),
    ],
    ids=["given", "few"],
)
def test_ranks_that_are_all_data_parallel_have_a_pack_each(
    capsys, tmp_path, lengths_file, sizes, options, ranks
):
    """Prevents a default step that is too small for the trainer's ranks."""
    if sizes is not None:
        lengths_file = tmp_path / "few.parquet"
        write_lengths(make_lengths(sizes), lengths_file)
    command = f"plan --model internvl-digits {options} --for xtuner --no-compare --lengths"
    run(capsys, command, lengths_file, "-o", tmp_path / "plan")
    assert open_plan(tmp_path / "plan").plan.parallel.data == ranks


@pytest.mark.parametrize(("micro_batches", "samples"), [(8, 576), (40, 600)])
def test_what_is_left_out_is_in_no_figure(capsys, tmp_path, micro_batches, samples):
    """Prevents a prediction of packs that the trainer does not train."""
    write_lengths(make_lengths([(0, 77)] * 600), tmp_path / "lengths.parquet")
    plan, left_out = tmp_path / "plan", 600 - samples
    options = f"--dp 4 --micro-batches {micro_batches} --max-tokens 811 --packing isf --no-compare"
    options = f"{DIGITS} {options} --for ms-swift --lengths"
    _, notes = run(capsys, options, tmp_path / "lengths.parquet", "-o", plan)
    assert ("24 of 600 samples are left out" in notes) == (samples == 576)
    assert ("packs of 160" in notes) == (samples == 600)
    assert "can be studied" not in notes
    made = run(capsys, "export", plan, "--to", tmp_path / "export")[0]["expected"]
    packs, found = open_plan(plan).steps[0], open_plan(plan).plan
    assert made["samples"] == len(packs.packs.samples) == samples
    assert made["dropped_samples"] == found.data.left_out == left_out
    assert (made["steps"], made["packs_per_step"]) == (packs.steps, len(packs) // packs.steps)
    trained_ms = found.prediction.step_ms * packs.steps
    per_gpu = 1e3 * samples / trained_ms / 4
    assert found.prediction.samples_per_second_per_gpu == pytest.approx(per_gpu)
    for wrong in {0, 23, 25} - {left_out}:
        data = found.data.model_copy(update={"left_out": wrong})
        (plan / "plan.json").write_text(found.model_copy(update={"data": data}).model_dump_json())
        failure(capsys, "check", plan)

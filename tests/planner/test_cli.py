"""Command line: JSON for scripts, messages for mistakes, and the list of flags."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import typer
from cli_cases import PLAN, failure, printed, result, run, status
from length_cases import lengths_of
from plan_cases import example_lengths, example_profile
from rate_cases import tiled_rates
from replay_cases import write_replay

import omnibal
from omnibal import cli
from omnibal.base.files import write_json_model
from omnibal.base.program import run_app
from omnibal.cli.console import progress, progress_lines
from omnibal.cost.profile import Profile
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.job.plan import read_plan
from omnibal.job.plan_data import model_of_lengths
from omnibal.job.plan_files import make_job, read_plan_data
from omnibal.model.config import load_model
from omnibal.model.units import unit_names
from omnibal.packing.balance_metrics import rank_sums
from omnibal.packing.packs import read_packs

pytestmark = pytest.mark.quick

PACK_KEYS = (
    "samples packed packs packs_lower_bound gap samples_per_pack fill_tiles fill_tokens pad_ratio "
    "dist_ratio_vision dist_ratio_language attention_balance_ratio "
    "least_attention_balance_ratio communication_ratio exchanged_ratio tokens_per_rank "
    "straggler_factor steps seconds load model"
).split()
PLAN_KEYS = (
    "stages step_ms ideal_step_ms lost_ms exchange bubble_fraction samples_per_second_per_gpu "
    "gpu_days memory_cap_gib cost_source published_errors packs steps search_gap made_for "
    "image_share window levels "
    "attention_balance_ratio least_attention_balance_ratio communication_ratio exchanged_ratio "
    "tokens_per_rank encoder step step_sizes sharding sharding_ranks other_shardings schedule "
    "schedule_reason schedule_steps_ms phases"
).split()
STAGE_KEYS = (
    "vision_layers language_layers recompute recompute_vision recompute_language forward_ms "
    "backward_ms wait_fraction peak_gib"
).split()
FLAGS = {
    "lengths": "--model --tokenizer-model --output -o --max-dynamic-patch --min-pixels "
    "--max-pixels --processes --engine --address --data-index --data-root --template --on-error "
    "--json",
    "pack": "--max-tiles --max-tokens --dp --micro-batches --packing --seed --mixture "
    "--model --limit --cluster --bound --output -o --picture --json",
    "caps": "--model --cluster --tp --pp --dp --ep --expert-imbalance --sequence-parallel --freeze "
    "--lora-rank --lora-alpha --lora-targets --lora-part --lora-rslora "
    "--limit --network-gb-per-s --samples-per-step --rule --packing --precision "
    "--profile --memory-gib --samples --seed --processes --json --help-all",
    "profile": "--model --max-tiles --limit --max-tokens --tokens-per-sample --lengths --output -o "
    "--precision --processes --layers --repetitions --provider --cluster --cluster-output --data "
    "--tokenizer-model --json",
    "plan": "--image-share --lora-rank --lora-alpha --lora-targets --lora-part --lora-rslora "
    "--gpus --samples-per-step --sequence-parallel --freeze --network-gb-per-s --method "
    "--recompute --model --cluster --max-tiles --max-tokens --output -o --tp --pp --dp --ep "
    "--expert-imbalance --lengths --limit --profile --micro-batches --epochs --seed --precision "
    "--memory-gib --packing --steps-of --window --dispatch --packing-levels --curriculum-steps "
    "--encoder --schedule --sharding --mixture --portion-samples --for --compare --json --help-all",
    "replan": "--run --output -o --after --gpus --nodes --json",
    "presets": "--json",
    "simulate": "--trace --step --picture --json",
    "check": "--json",
    "export": "--to --for --data --workers --json",
    "report": "--output -o --run --replay --json",
    "lint": "--model --launcher --gpus --set --line-number --cluster --memory-gib --lengths "
    "--image-share --sample-tokens --cost --json",
}
FLAGS["run"] = FLAGS["plan"].replace("--json", "--data --tokenizer-model --weights --from-scratch")
FLAGS["run"] = FLAGS["run"].replace(
    "--lengths", "--data-root --template --lr --vision-lr --start --export"
)
PRESETS = Path(omnibal.__file__).parent / "presets"
DIGITS = "plan --model internvl-digits --cluster laptop-cpu"
PACK = "pack --max-tiles 8 --max-tokens 512"
PROFILE = "profile --model internvl-digits --max-tiles 8 --max-tokens 512 --tokens-per-sample 64"


@pytest.fixture(scope="module")
def saved_plan(tmp_path_factory, lengths_file) -> tuple[Path, dict]:
    """Return a plan on two data-parallel ranks, and the JSON printed for it."""
    folder = tmp_path_factory.mktemp("planned") / "plan"
    with redirect_stdout(StringIO()) as output:
        run(PLAN, "--dp", 2, "--lengths", lengths_file, "-o", folder, "--json")
    return folder, json.loads(output.getvalue())


def test_flags_are_the_documented_ones():
    """Prevents a flag added, renamed or dropped unnoticed."""
    group = typer.main.get_command(cli.app)
    flags = {
        name: {flag for option in command.params for flag in option.opts if flag.startswith("-")}
        for name, command in group.commands.items()
    }
    assert flags == {name: {*expected.split()} for name, expected in FLAGS.items()}


def test_pack_prints_one_json_object(capsys, tmp_path, lengths_file):
    """Prevents logs on stdout, missing keys, figures other than the file's, and other packs."""
    out, contents = tmp_path / "new/packs.parquet", []
    for seed in (2, 1, 1):
        told = result(capsys, f"{PACK} --dp 2 --seed {seed}", lengths_file, "-o", out)
        contents.append(out.read_bytes())
    assert contents[0] != contents[1] == contents[2]
    assert list(told) == PACK_KEYS
    packs = read_packs(out)
    assert told["packed"] == told["samples"] == 300
    assert told["packs"] == len(packs) >= told["packs_lower_bound"]
    assert told["steps"] == packs.steps and packs.dp_rank.max() == 1


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
def test_ranks_without_a_pack_are_told_of(capsys, tmp_path, lengths_file, ranks):
    """Prevents idle ranks in a step without a note."""
    made = tmp_path / "packs.parquet"
    run(f"{PACK} --dp {ranks} --micro-batches 1", lengths_file, "-o", made)
    error, packs = capsys.readouterr().err, read_packs(made)
    idle = ranks - min(len({*packs.dp_rank[packs.step == step]}) for step in range(packs.steps))
    said = re.findall(r"for \d+ ranks: (\d+) of them without any", error)
    assert said == ([str(idle)] if idle else [])
    # Remaining packs form a step of their own from half a step on.
    assert idle == (-len(packs) % ranks if len(packs) % ranks >= ranks / 2 else 0)


def test_packs_of_isf_are_far_from_the_fewest(capsys, monkeypatch, tmp_path):
    """Prevents poor ISF packing without a note, and minutes spent on a lower bound for it."""
    # Few subsets of these samples fill a pack of 9 tiles: ISF needs more packs than the minimum.
    tiles, lumpy = np.repeat([5, 3], [600, 400]), tmp_path / "lumpy.parquet"
    write_lengths(lengths_of(tiles=tiles, tokens=tiles * 290, loss_tokens=tiles), lumpy)
    sought, packs = [], []

    def lower_bound(lengths, caps, *, found):
        sought.append(found)
        return 1

    monkeypatch.setattr("omnibal.packing.pack_bound.packs_lower_bound", lower_bound)
    pack = ("pack --max-tiles 9 --max-tokens 4096 --dp 1", lumpy)
    for packing, is_noted in (("isf", True), ("balanced", False)):
        packs.append(result(capsys, *pack, "--packing", packing, "--micro-batches", 1)["packs"])
        run(*pack, "--packing", packing, "--no-bound")
        noted = capsys.readouterr().err
        assert ("do not suit these sizes" in noted) == ("note:" in noted) == is_noted
    assert packs[1] < packs[0] and sought == packs[1:] * 2


def test_plan_searches_for_caps_that_are_not_given(capsys, tmp_path, lengths_file):
    """Prevents a plan that requires known caps, or accepts half of a pair."""
    options = f"{DIGITS} --lengths {lengths_file}"
    run(options, "-o", tmp_path / "plan")
    caps = read_plan(tmp_path / "plan").data.caps
    noted = f"note: found --max-tiles {caps['tiles']} --max-tokens {caps['tokens']}"
    assert noted in capsys.readouterr().err
    message = failure(capsys, options, "--max-tiles", 8, "-o", tmp_path / "other")
    assert "give --max-tiles and --max-tokens; or none, with --lengths" in message


def test_steps_of_a_plan_for_other_ranks(capsys, tmp_path, saved_plan):
    """Prevents other steps than the given plan's, and options silently overruled."""
    options = f"{DIGITS} --dp 4 --steps-of"
    run(options, saved_plan[0], "-o", tmp_path / "wider")
    plans = [read_plan(folder) for folder in (saved_plan[0], tmp_path / "wider")]
    assert plans[0].data.steps_sha256 == plans[1].data.steps_sha256
    assert plans[0].data.packs_sha256 != plans[1].data.packs_sha256
    run("check", tmp_path / "wider")
    overruled = (saved_plan[0], "--seed", 1, "--epochs", 2, "-o", tmp_path / "x")
    message = failure(capsys, options, *overruled)
    assert "--seed 1 and --epochs 2 cannot be given with --steps-of" in message
    run(PLAN, "-o", tmp_path / "shapes")
    message = failure(capsys, options, tmp_path / "shapes", "-o", tmp_path / "x")
    assert "given a plan of shapes only" in message


def test_plan_check_and_report(capsys, tmp_path, saved_plan):
    """Prevents commands that do not accept each other's files."""
    folder, told = saved_plan
    assert list(told) == PLAN_KEYS
    assert [list(stage) for stage in told["stages"]] == [STAGE_KEYS] * 2
    assert sum(stage["vision_layers"] for stage in told["stages"]) == 4
    assert told["ideal_step_ms"] <= told["step_ms"]
    vision, language = told["phases"]
    assert [vision["phase"], language["phase"]] == ["vision", "language"]
    packs, _ = read_plan_data(read_plan(folder), folder)
    tiles = rank_sums(packs, packs.items["tiles"], 2)
    busiest, mean = tiles.max(axis=1).sum(), tiles.mean(axis=1).sum()
    assert vision["imbalance_before"] == pytest.approx(busiest / mean)
    assert 1 <= language["bound"] <= language["imbalance_before"] < 2
    checked = result(capsys, "check", folder)
    assert (len(checked["passed"]), len(checked["notes"])) == (14, 1)
    page = tmp_path / "new/report.html"
    assert result(capsys, "report", folder, "-o", page)["report"] == str(page)
    assert page.read_text().lstrip().lower().startswith("<!doctype html")


def test_report_of_a_replay(capsys, tmp_path, saved_plan, lengths_file):
    """Prevents a replay missing from the JSON, or one presented as a run's measurement."""
    directory, replay, page = saved_plan[0], tmp_path / "replay", tmp_path / "r.html"
    plan = read_plan(directory)
    job, data = make_job(plan, directory), read_plan_data(plan, directory)
    workload = job.workload(*data, plan.pack_levels)
    write_replay(replay, plan, job.cost, workload, (0, 2), factors=(2.0, 2.0))
    told = result(capsys, "report", directory, "--replay", replay, "-o", page)
    assert {"replay", "report"} <= told.keys()
    replayed = told["replay"]
    assert (replayed["steps"], replayed["device"]) == ([0, 2], "one device")
    assert replayed["step_ms"] > replayed["predicted_step_ms"] > replayed["step_ms"] / 2
    assert sum(replayed["lost_ms"].values()) == pytest.approx(replayed["step_ms"])
    assert replayed["peak_gib"] == [1.5, 2.5]
    assert replayed["predicted_peak_gib"] == [s.memory.peak_gib for s in plan.prediction.stages]
    run(PLAN, "--dp", 1, "--lengths", lengths_file, "-o", tmp_path / "plan")
    other = failure(capsys, "report", tmp_path / "plan", "--replay", replay, "-o", page)
    assert "is the replay of another plan" in other


def test_methods_and_their_recompute_rules(capsys, tmp_path):
    """Prevents a method or recompute rule accepted and ignored."""
    ways = ("", " --method layer", " --method parameter --recompute full", " --freeze vision")
    plans = [result(capsys, PLAN + way, "-o", tmp_path / "plan") for way in ways]
    layers, again = (
        [[sum(stage[name] for name in names) for stage in plan["stages"]] for plan in plans]
        for names in (("vision_layers", "language_layers"), ("recompute",))
    )
    assert sum(layers[0]) == 8 and layers[1] == [4, 4]
    assert [sum(each) for each in again[:3]] == [0, 0, 8]
    joint, by_layers, full, frozen = plans
    assert joint["step_ms"] <= min(by_layers["step_ms"], full["step_ms"])
    assert frozen["ideal_step_ms"] < joint["ideal_step_ms"]
    lost = [sum(plan["lost_ms"].values()) for plan in plans]
    assert lost == pytest.approx([plan["step_ms"] for plan in plans])
    assert full["lost_ms"]["recompute_ms"] > 0 == joint["lost_ms"]["recompute_ms"]


def test_gpus_chooses_the_sizes(capsys, tmp_path, lengths_file):
    """Prevents a chosen strategy that the plan does not use."""
    options = "--max-tiles 8 --max-tokens 512 --gpus 4 --samples-per-step 40 --tp 1 --lengths"
    told = result(capsys, f"{DIGITS} {options}", lengths_file, "-o", tmp_path / "plan")
    sizes = [strategy["parallel"] for strategy in told["strategies"]]
    assert all(s["tensor"] == 1 and s["pipeline"] * s["data"] == 4 for s in sizes)
    assert len(told["stages"]) == sizes[0]["pipeline"]
    times = [strategy["ms_per_sample"] for strategy in told["strategies"]]
    assert times == sorted(times)
    assert read_plan(tmp_path / "plan").parallel.data == sizes[0]["data"]


def test_simulate_replays_every_step(capsys, tmp_path, saved_plan):
    """Prevents figures of a few steps only, and a trace of another step than the named one."""
    trace = tmp_path / "new/trace.json"
    told = result(capsys, "simulate", saved_plan[0], "--trace", trace)
    assert told["steps"] == saved_plan[1]["steps"]
    assert told["step_ms_mean"] == pytest.approx(saved_plan[1]["step_ms"])
    assert told["step_ms_min"] <= told["step_ms_median"] <= told["step_ms_max"]
    assert told["trace_step"] == told["slowest_step"]
    events = json.loads(trace.read_text())["traceEvents"]
    last_ms = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X") / 1e3
    assert 0.8 * told["step_ms_max"] < last_ms <= told["step_ms_max"]
    words = printed(capsys, "simulate", saved_plan[0], "--step", 0, "--picture", tmp_path / "a.svg")
    assert "slowest step" in words and "stage 1" in (tmp_path / "a.svg").read_text()


def test_options_replace_the_clusters(tmp_path):
    """Prevents an option that changes the time but not the plan, or the plan but not the time."""
    steps = []
    for speed in (1, 100):
        run(PLAN, "--dp", 4, "--network-gb-per-s", speed, "--memory-gib", 2, "-o", tmp_path / "p")
        plan = read_plan(tmp_path / "p")
        assert plan.cluster.inter_node_gb_per_s == speed and plan.cluster.memory_gib == 2
        steps.append(plan.prediction.step_ms)
    assert steps[0] > steps[1]


def test_lengths_scan(capsys, tmp_path, digits):
    """Prevents a summary that differs from the file, or a tiling option that is ignored."""
    tokenizer, paths = (
        digits / "tokenizer.model",
        [tmp_path / f"{name}.parquet" for name in ("all", "one")],
    )
    scan = ("lengths --model internvl-digits", digits / "train/meta.json", "--tokenizer-model")
    sources = result(capsys, *scan, tokenizer, "-o", paths[0])
    table = printed(capsys, *scan, tokenizer, "-o", paths[1], "--max-dynamic-patch", 1)
    lengths, one = (read_lengths([path]) for path in paths)
    assert sources["samples"] == len(lengths) == sum(s["samples"] for s in sources["sources"])
    most = max(source["tiles_max"] or 0 for source in sources["sources"])
    assert most == lengths.column("tiles").max() > 1
    assert one.origin.tiling.max_dynamic_patch == 1
    assert one.column("tiles").sum() < lengths.column("tiles").sum()
    assert all(name in table for name in lengths.source_names)
    printed(capsys, *scan, tokenizer, "-o", paths[1], "--template", "Hermes-2")
    other = read_lengths([paths[1]])
    assert model_of_lengths(load_model("internvl-digits"), other).chat_template == "Hermes-2"
    assert other.tokens.sum() != lengths.tokens.sum()


HUGE = 10**20
SEE = "; see omnibal"
SEARCH = "caps {lengths} --model internvl-digits --cluster "
LARGE = "plan --model {} --cluster h100-80g --max-tiles 8 --max-tokens 9 -o p"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (PACK + " absent.parquet --dp 2", "no such file; make one"),
        ("pack {lengths} --max-tiles 3 --max-tokens 512 --dp 2", "exceed the caps"),
        ("pack {lengths} --max-tokens 512 --dp 2", "must be limited; give --max-tiles MAX"),
        ("pack {lengths} --dp 2", "give --max-tiles MAX and --max-tokens MAX"),
        ("pack {lengths} --max-tiles 8 --limit tiles=8 --max-tokens 9 --dp 2", "given twice"),
        ("pack {lengths} --max-tiles 8 --limit clip=4 --max-tokens 9 --dp 2",
         "--max-tokens MAX, and --limit clips=MAX, --limit image_tokens=MAX or --limit loss_"),
        ("pack {lengths} --max-tiles 8 --limit clips=99999999999 --dp 2", "from 1 to"),
        ("pack {lengths} --max-tiles 8 --limit tokens=0 --dp 2", "from 1 to"),
        ("pack {lengths} --max-tiles 8 --limit 512 --dp 2", "a feature and a count"),
        (PLAN + " --limit clips=4 -o p", "the limits are --max-tiles MAX and --max-tokens MAX"),
        (SEARCH + "laptop-cpu --limit clips=4",
         "leave out --limit clips: the limits are --max-tiles MAX and --max-tokens MAX"),
        (SEARCH + "laptop-cpu --limit tiles=9 --rule paper", "choose caps by predicted time"),
        ("plan --model internvl-digit --cluster laptop-cpu --max-tiles 8 --max-tokens 9 -o p",
         "did you mean 'internvl-digits'"),
        ("profile --model internvl-digits --max-tokens 9 -o p.json", "give --max-tiles MAX"),
        ("profile --model llama3.1-8b --max-tiles 8 --max-tokens 9 -o p.json",
         "leave out --max-tiles: the limits are --max-tokens MAX, and --limit loss_tokens=MAX if"),
        (PROFILE + " --data m.json -o p.json", "--data was given without --tokenizer-model"),
        (PROFILE + " --tokenizer-model t -o p.json", "--tokenizer-model was given without --data"),
        (LARGE.format("llama3.1-8b"),
         "leave out --max-tiles: the limits are --max-tokens MAX, and --limit loss_tokens=MAX if"),
        (LARGE.format("qwen3-vl-2b"),
         "leave out --max-tiles: the limits are --limit image_tokens=MAX and --max-tokens"),
        ("lengths x.jsonl --tokenizer-model t --model gemma-3-4b --max-pixels 9 -o p",
         "all images are 896 x 896 pixels"),
        ("lengths x.jsonl --tokenizer-model t --model qwen3-vl-2b --max-pixels 9 -o p",
         "--max-pixels: min_pixels 65536 must not exceed max_pixels 9; give others"),
        (PLAN + " --pp 99 -o p", "99"),
        (PLAN + " --profile absent.json -o p", "absent.json"),
        (PACK + " {lengths} --dp 2 -o {lengths}/p", "exists"),
        (PLAN + " -o {lengths}", "is a file"),
        ("check absent", "plan.json: no such file"),
        (PLAN + " -o .", "contains the current directory"),
        (PLAN + " -o {lengths}/p/q", "is not a directory"),
        (PLAN + " --tp 3 -o p", "is more than the 2 devices of a node"),
        (PLAN + " --sequence-parallel -o p", "sequence_parallel needs tensor >= 2"),
        (PLAN + " --freeze vision --freeze projector --freeze language -o p", "leave a part to"),
        (PLAN + " --method bmp --recompute cheapest -o p", "cheapest belongs to omnibal"),
        (PLAN + " --recompute front -o p", "omnibal was given with recompute rule front"),
        (PLAN + " --max-tokens 9000 --memory-gib 0.01 -o p", "what would fit: --"),
        (PLAN + " --image-share 0.3 -o p", "are exclusive: drop one"),
        (PLAN + " --gpus 3 --lengths {lengths} -o p", "3 GPUs are no multiple of --pp 2"),
        (PLAN + " --gpus 4 --micro-batches 2 -o p", "cannot be given with --gpus 4"),
        (PLAN + " --samples-per-step 4 --micro-batches 2 -o p", "both say how large a step is"),
        (PLAN + " --memory-gib inf -o p", "--memory-gib': Input should be less than"),
        (PLAN + " --network-gb-per-s inf -o p", "--network-gb-per-s': Input should be less"),
        (PLAN + " --max-tokens 99999999999 -o p", "less than or equal to 2147483647"),
        (PLAN + " --dp 2 --micro-batches 1000000 -o p", "at most 1,000,000"),
        (PACK + " {lengths} --dp 2 -o .", "is a directory"),
        ("report absent -o new/r.html", "plan.json: no such file"),
        ("report absent --run {lengths} -o r.html", "give the run's directory"),
        ("lengths absent.json --model internvl-digits --tokenizer-model t -o l", "no such"),
        (PACK + f" {{lengths}} --dp 2 --micro-batches {HUGE}", "1000000"),
        (PACK + " {lengths} --dp 2000 --micro-batches 2000", "at most 1,000,000"),
        (PACK + " {lengths} --dp 100000000", "1000000"),
        (PLAN + " --lengths {lengths} --epochs 100000000 -o p", "1000"),
        (PLAN + " --lengths {lengths} --dp 1000 --micro-batches 100000 -o p", "at most 1,000,000"),
        (PLAN + " --lengths {lengths} --gpus 100000000 -o p", "1000000"),
        (PLAN + f" --lengths {{lengths}} --seed {HUGE} -o p", "9223372036854775807"),
        (PLAN + " --memory-gib 1e300 -o p", "less than or equal to 1000000000"),
        (f"lengths m --model internvl-digits --tokenizer-model t -o l --max-dynamic-patch {HUGE}",
         "1000"),
        (PROFILE + " -o p --processes 100000000", "1024"),
        (PROFILE + " -o p --layers 100000000", "1000"),
        ("caps {lengths} --model deep.toml --cluster laptop-cpu", "equal to 1000 "),
        (SEARCH + "no_bf16.toml",
         "cluster slow: peak_tflops has no rate for bf16 (it has fp32)"),
        (PLAN.replace("laptop-cpu", "no_bf16.toml") + " -o p", "has no rate for bf16"),
        (PACK + " {lengths} --dp 2 --cluster no_bf16.toml",
         "has no rate for bf16"),
        ("check a\0b", r"'a\x00b': holds a NUL character"),
        (PLAN + " -o a\0b", "holds a NUL character"),
        (PACK + " nul.json --dp 2", "embedded null byte"),
        (PACK + " nul.json --dp 2 -o p", "has a NUL character"),
        ("check \x1b[2J", r"\x1b[2J"),
        ("pack l.parquet --max-tiles 0 --max-tokens 512 --dp 2", f"--max-tiles{SEE} pack --help"),
        ("pack l.parquet --max-tiles nine --max-tokens 512 --dp 2", f"valid integer{SEE} pack"),
        ("profile --model m --max-tiles 8 -o p.json", f"--max-tokens{SEE} profile --help"),
        (PACK + " --dp 2", f"LENGTHS{SEE} pack --help"),
        (PLAN + " -o p --precision int8", f"int8{SEE} plan --help"),
        (PLAN + " -o p --memory-gib 0", f"--memory-gib{SEE} plan --help"),
        (PLAN + " -o p --modle x", f"--modle{SEE} plan --help"),
        ("unknown", f"unknown{SEE} --help"),
        ("check " + "x" * 9000, "xxx ... xxx"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, tmp_path, monkeypatch, lengths_file, command, expected):
    """Prevents tracebacks, partial output files, and hours of work for a slipped digit."""
    monkeypatch.chdir(tmp_path)
    cluster = (PRESETS / "clusters/laptop-cpu.toml").read_text()
    without = "\n".join(line for line in cluster.split("\n") if not line.startswith("bf16"))
    without = re.sub(r"bf16 *= *[0-9.]+,? *|, *bf16 *= *[0-9.]+", "", without)
    Path("no_bf16.toml").write_text(re.sub('name *= *"laptop-cpu"', 'name = "slow"', without))
    model = (PRESETS / "models/internvl-digits.toml").read_text()
    Path("deep.toml").write_text(re.sub(r"(?m)^layers *= *\d+", "layers = 100000000", model))
    Path("nul.json").write_text(r'{"a": {"token_lengths": "x\u0000y"}}')
    before = sorted(tmp_path.iterdir())
    *before_it, error = failure(capsys, command.format(lengths=lengths_file)).splitlines()
    assert error.startswith("error: ") and error.isprintable()
    assert all(line.startswith("trying") for line in before_it)  # a search's progress bar
    assert all(part in error for part in expected.split(SEE, 1))
    assert (SEE not in expected) or error.endswith(" --help")
    assert sorted(tmp_path.iterdir()) == before


EDITS = {
    "prediction": lambda plan: plan["prediction"].update(step_ms=1.0),
    "method": lambda plan: plan["data"].update(method="best"),
    "count": lambda plan: plan["data"].update(packs_per_step=10**25),
    "stages": lambda plan: plan["stages"][0].update(units=["vision embed", "vision 0"]),
    "earlier": lambda plan: plan.update(schema_version=2, beside=None),
    "memory": lambda plan: plan["cluster"].update(memory_gib=0.01),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_command_checks_the_plan_it_reads(capsys, tmp_path, saved_plan, edit):
    """Prevents plausible numbers from a plan that `omnibal check` refuses."""
    folder, output = shutil.copytree(saved_plan[0], tmp_path / "plan"), ("-o", tmp_path / "output")
    plan = json.loads((folder / "plan.json").read_text())
    edit(plan)
    (folder / "plan.json").write_text(json.dumps(plan))
    commands = {"check": (), "simulate": (), "report": output, f"{DIGITS} --steps-of": output}
    said = {failure(capsys, command, folder, *more) for command, more in commands.items()}
    assert len(said) == 1 and not (tmp_path / "output").exists()


def test_version_and_help(capsys):
    """Prevents a version that differs from the package's, and options without help text."""
    assert printed(capsys, "--version") == f"omnibal {omnibal.__version__}\n"
    assert "report" in printed(capsys, "")
    plan = typer.main.get_command(cli.app).commands["plan"]
    options = {option.name: option.help for option in plan.params}
    assert "omnibal presets" in options["model"] + options["cluster"]
    assert "90% of it" in options["memory_gib"]
    assert all(options.values())


def test_output_that_cannot_be_written_is_found_first(capsys, tmp_path, monkeypatch, lengths_file):
    """Prevents an hour of work before a failed write."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for command, options in (("plan", f"{PLAN} --lengths"), ("pack", f"{PACK} --dp 2")):
        read = f"omnibal.cli.{command}_command.read_lengths"
        monkeypatch.setattr(read, lambda paths: pytest.fail("worked first"))
        error = failure(capsys, options, lengths_file, "-o", tmp_path / "a/b")
        assert f"{tmp_path} cannot be written to" in error
    assert not [*tmp_path.iterdir()]


def test_closed_pipe_ends_quietly(tmp_path):
    """Prevents a traceback or an error message when the output goes into `head`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "omnibal", *PLAN.split(), "--json", "-o", str(tmp_path / "plan")],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait() == 1
    assert all(line.startswith("note: ") for line in errors.splitlines()), errors
    process.stderr.close()


def test_profile_that_measures_nothing_fails(capsys, tmp_path, monkeypatch):
    """Prevents an ImportError without the trainer, and exit status 0 for a failed profiler."""
    command = (PROFILE, "-o", tmp_path / "profile.json")

    found = {"torch": object()}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    error = failure(capsys, *command)
    assert "megatron-core is not installed" in error
    assert 'pip install ".[train]"' in error
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    failed = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert status(*command) == 3


def start_no_profiler(monkeypatch, profile: Profile) -> list[list[str]]:
    """Replace the profiler by writing `profile`; return the command lines."""
    commands = []

    def run_profiler(command, check, stdout):
        commands.append(command)
        assert stdout is sys.__stderr__
        write_json_model(profile, Path(command[-1]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    monkeypatch.setattr(subprocess, "run", run_profiler)
    return commands


def test_profile_hands_its_options_on(capsys, tmp_path, monkeypatch, lengths_file):
    """Prevents options that do not reach the profiler, mixed output, and another profile."""
    output = tmp_path / "new/profile.json"
    commands = start_no_profiler(monkeypatch, example_profile())
    more = "--processes 2 --layers 3 --precision fp32 --provider te"
    told = result(capsys, f"{PROFILE} {more} -o", output)
    assert told["profile"] == str(output)
    units = {residual["unit"] for residual in told["residuals"]}
    assert units == {*unit_names(load_model("internvl-digits"))}
    launcher, options = commands[0][: commands[0].index("-m", 3)], commands[0][-16:]
    assert "--nproc-per-node=2" in launcher
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert Path(given.pop("--output")).parent == output.parent
    expected = "--model internvl-digits --precision fp32 --max-tiles 8 --max-tokens 512 "
    expected = f"{expected}--tokens-per-sample 64 --layers 3 --provider te".split()
    assert given == dict(zip(expected[::2], expected[1::2], strict=True))
    command = PROFILE.replace(" --tokens-per-sample 64", "")
    assert "give --tokens-per-sample or --lengths" in failure(capsys, command, "-o", output)
    run(command, "--lengths", lengths_file, "-o", output)
    mean = commands[-1][commands[-1].index("--tokens-per-sample") + 1]
    assert int(mean) == round(example_lengths().tokens.mean())


def test_profile_writes_a_cluster_that_plans_take(capsys, tmp_path, monkeypatch, lengths_file):
    """Prevents measured rates that plans cannot use, or that overwrite another file."""
    profile = example_profile().model_copy(update={"rates": tiled_rates()})
    start_no_profiler(monkeypatch, profile)
    output, mine = tmp_path / "profile.json", tmp_path / "mine.toml"
    command = f"{PROFILE} --precision fp32 -o {output} --cluster"
    assert "give both or none" in failure(capsys, f"{PROFILE} -o {output} --cluster h100-80g")
    assert "are the same file" in failure(capsys, f"{command} h100-80g --cluster-output {output}")
    assert not mine.exists()
    run(f"{command} laptop-cpu --cluster-output", mine)
    plan = PLAN.replace("laptop-cpu", str(mine)) + " --precision fp32 --lengths"
    told = result(capsys, plan, lengths_file, "-o", tmp_path / "plan")
    assert told["cost_source"] == "analytic:laptop-cpu, measured rates of tiled device"
    checked = printed(capsys, "check", tmp_path / "plan")
    assert "costs are of analytic:laptop-cpu, measured rates of" in checked


@pytest.mark.parametrize(
    ("sizes", "share", "tiles"),
    [(["--pp", "2", "--dp", "2"], "", 4), (["--gpus", "4"], "--image-share 0.25", 2)],
)
def test_tokens_alone_say_what_shapes_are(tmp_path, capsys, sizes, share, tiles):
    """Prevents another image share than stated, and made-up totals of a plan without data."""
    command = f"{DIGITS} --max-tokens 128 {share}"
    told = result(capsys, command, *sizes, "-o", tmp_path / "plan")
    plan = read_plan(tmp_path / "plan")
    unknown = {key for key, value in told.items() if value is None} - {"close_call"}
    of_data = "samples_per_second_per_gpu gpu_days packs steps tokens_per_rank "
    of_data += "attention_balance_ratio least_attention_balance_ratio communication_ratio "
    assert unknown == {*of_data.split(), "exchanged_ratio", "window", "made_for"}
    assert told["step_ms"] > 0
    assert plan.model.vision.tokens_per_item == 16
    assert plan.shapes.caps["tiles"] == tiles
    assert told["image_share"] == tiles * 16 / 128
    assert plan.parallel.world_size == 4


def test_a_log_has_a_line_about_every_half_minute(capsys):
    """Prevents a log silent for minutes, with a line per candidate, or with control sequences."""
    with progress("scanning", 3) as of_short_work:
        of_short_work(3)
    assert capsys.readouterr().err == ""
    seconds = iter([0.0, 10.0, 40.0, 50.0, 100.0])
    advance = progress_lines("trying caps", 40, lambda: next(seconds))
    for newly in (5, 5, 5, 5):
        advance(newly)
    assert capsys.readouterr().err.splitlines() == [
        "trying caps: 10 of 40 in 0.7 min, 0.2/s, at this rate 2.0 min more",
        "trying caps: 20 of 40 in 1.7 min, 0.2/s, at this rate 1.7 min more",
    ]


def test_an_interrupted_command_says_so(capsys, monkeypatch, tmp_path):
    """Prevents Ctrl-C from ending without a message."""
    app = typer.Typer()

    @app.command()
    def wait() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        run_app(app, "omnibal", [])
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
    # `omnibal run` returns the status of a subprocess that has printed it.
    monkeypatch.setattr("omnibal.cli.run_steps.run_steps", lambda *_, **__: 130)
    with pytest.raises(SystemExit):
        importlib.import_module("omnibal.cli.run_command")._run_steps([], tmp_path)

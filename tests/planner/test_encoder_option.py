"""`omnibal plan --encoder`: both placements are planned, checked, shown and edited."""

import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from cli_cases import failure, run
from length_cases import long_tailed
from plan_cases import example_lengths

from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan

DIGITS = "--model internvl-digits --max-tiles 8 --max-tokens 512"
JOB = f"plan --cluster laptop-cpu {DIGITS} "
SHAPES = f"{JOB} --pp 2 --dp 2 "
Planned = Callable[[str | None], tuple[Path, str]]
"""Maps the option's value to a plan's directory and printed output."""


def printed_by(command: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        run(command)
    return printed.getvalue()


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> str:
    """Return a plan command without the option."""
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    write_lengths(example_lengths(count=150), path)
    return f"{SHAPES} --packing isf --packing-levels 1 --lengths {path} "


@pytest.fixture(scope="module")
def plan_once(command, tmp_path_factory) -> Planned:
    """Return a function that plans the job once per placement."""
    folder = tmp_path_factory.mktemp("plans")

    @cache
    def plan(encoder: str | None) -> tuple[Path, str]:
        option, place = f"--encoder {encoder}" if encoder else "", folder / str(encoder)
        printed = printed_by(f"{command} {option} --json -o {place}")
        return place, printed.replace(str(place), "PLAN")

    return plan


def test_the_faster_placement_is_taken_and_both_are_told(plan_once):
    """Prevents the slower placement, wrong times, and plans that differ from a direct request."""
    alone = {n: json.loads(plan_once(n)[1])["step_ms"] for n in ("pipeline", "data-parallel")}
    chosen = json.loads(plan_once("auto")[1])
    best = min(alone, key=lambda name: alone[name])
    assert chosen["encoder"]["placement"] == best
    assert chosen["encoder"]["pipeline_step_ms"] == alone["pipeline"]
    assert chosen["encoder"]["data_parallel_step_ms"] == alone["data-parallel"]
    assert "faster" in chosen["encoder"]["reason"]
    assert chosen["step_ms"] == alone[best]
    for name in ("plan.json", "packs.parquet"):
        of_auto, of_best = (plan_once(each)[0] / name for each in ("auto", best))
        assert of_auto.read_bytes() == of_best.read_bytes()


def test_placements_and_schedules_are_told_apart(capsys, tmp_path, command):
    """Prevents encoders missing from the output, and an error without the layer count."""
    asked = f"{command} --encoder data-parallel --schedule zb-h1 -o {tmp_path / 'plan'}"
    shown = " ".join(printed_by(asked).split())
    for figure in (" encoders ", "data-parallel", "tiles kept", "exchange of features"):
        assert figure in shown
    asked = f"{command} --schedule zb-v -o {tmp_path / 'few'}".replace("--pp 2", "--pp 6")
    assert "here are 6 with 8 layers together" in failure(capsys, asked)


def test_plans_in_the_pipeline_are_as_without_the_option(plan_once):
    """Prevents a changed default: plans and figures must be byte-identical."""
    (default, told), (pipeline, of_option) = plan_once(None), plan_once("pipeline")
    assert told == of_option
    assert (default / "plan.json").read_bytes() == (pipeline / "plan.json").read_bytes()
    assert "data_parallel_encoders" not in json.loads((default / "plan.json").read_text())
    summary = json.loads(told)
    assert summary["encoder"] == {
        "placement": "pipeline",
        "pipeline_step_ms": summary["step_ms"],
        "data_parallel_step_ms": None,
        "reason": "no other placement was planned",
    }


def test_ranks_share_packs_wherever_encoders_are(tmp_path):
    """Prevents comparing placements by different packs."""
    write_lengths(long_tailed(150, 65_536), tmp_path / "long.parquet")
    printed = printed_by(
        "plan --model internvl2-8b --cluster h100-80g --tp 2 --dp 4 --micro-batches 2 "
        f"--max-tiles 12 --max-tokens 65536 --lengths {tmp_path / 'long.parquet'} "
        f"--encoder data-parallel --json -o {tmp_path / 'plan'}"
    )
    assert json.loads(printed)["encoder"]["placement"] == "data-parallel"
    plan = read_plan(tmp_path / "plan")
    assert plan.data_parallel_encoders is not None and plan.has_shared_packs
    assert "fullest stage" in printed_by(f"check {tmp_path / 'plan'}")


def test_both_reasons_are_told_where_neither_fits(capsys, tmp_path):
    """Prevents an error that names only one placement, and duplicated errors."""
    command = f"{JOB} --dp 2 --encoder auto -o {tmp_path / 'plan'}"
    large = command.replace("--max-tiles 8", "--max-tiles 800").replace("512", "51200")
    error = failure(capsys, f"{large} --memory-gib 0.01")
    assert len(error.splitlines()) == 1
    first, second = error.split("; and data-parallel: ")
    assert first.startswith("error: in the pipeline: internvl-digits on 1 pipeline stages needs")
    assert "GiB" in second and second != first
    error = failure(capsys, f"{command} --lengths {tmp_path / 'none.parquet'}")
    assert error.count("no such file; make one") == 1
    assert not (tmp_path / "plan").exists()


def test_plans_are_checked_simulated_and_shown(tmp_path, plan_once):
    """Prevents commands that ignore or crash on data-parallel encoders."""
    plan, _ = plan_once("data-parallel")
    assert "every language layer" in printed_by(f"check {plan}")
    stored = json.loads((plan / "plan.json").read_text())["prediction"]
    simulated = json.loads(printed_by(f"simulate {plan} --trace {tmp_path / 'trace.json'} --json"))
    assert simulated["step_ms_mean"] == pytest.approx(stored["step_ms"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"encoders forward", "encoders backward"} <= {event["name"] for event in events}
    # Every stage of every rank has encoders, which finish before any pipeline pass.
    first = [event for event in events if event["name"] == "encoders forward"]
    assert len(first) == 4
    begun = [event["ts"] for event in events if event["name"] == "forward 0"]
    assert min(begun) >= min(event["dur"] for event in first) * (1 - 1e-9)
    page = tmp_path / "report.html"
    printed_by(f"report {plan} -o {page}")
    assert "Data-parallel encoders: their part" in page.read_text()


@pytest.mark.parametrize(
    ("changes", "is_predicted", "mistake"),
    [
        ({"kept_items": {"vision": 0}}, True, "the stored prediction is of another plan"),
        ({"kept_items": {"vision": 0}}, False, None),
        ({"sharded": 2}, False, None),
        ({"sharded": 4}, False, None),
        ({"sharded": 4}, True, "the stored prediction is of another plan"),
        ({"sharded": 3}, False, "_encoders.sharded is 3, and must divide the 4 ranks of the job"),
        ({}, True, "but may fill 0.01 GiB"),
    ],
)
def test_edits_by_hand_are_checked(capsys, tmp_path, plan_once, changes, is_predicted, mistake):
    """Prevents edits beyond memory or with uneven shard groups, and stale predictions."""
    plan = shutil.copytree(plan_once("data-parallel")[0], tmp_path / "plan")
    edited = json.loads((plan / "plan.json").read_text())
    edited["data_parallel_encoders"] |= changes
    if not changes:
        edited["cluster"]["memory_gib"] = 0.01
    if not is_predicted:
        del edited["prediction"]
    (plan / "plan.json").write_text(json.dumps(edited))
    if mistake is None:
        assert "fullest stage" in printed_by(f"check {plan}")
    else:
        error = failure(capsys, f"check {plan}")
        assert mistake in error and error.count("\n") == 1


def test_plans_say_how_encoders_are_held(tmp_path, command, plan_once):
    """Prevents a shard count only in plan.json, or reported for encoders in the pipeline."""
    plan, placed = tmp_path / "plan", f"{command} --encoder data-parallel"
    full = f"{placed} --sharding full".replace("--pp 2 --dp 2", "--dp 4")
    for asked, ranks, of_language in (
        (f"{placed} --sharding replicated", {1}, 1),
        (f"{placed} --sharding auto", {1, 4}, 1),
        (full, {4}, 4),
    ):
        found = json.loads(printed_by(f"{asked} --json -o {plan}"))
        assert found["encoder"]["sharded_ranks"] in ranks
        assert found["sharding_ranks"] == of_language
        assert read_plan(plan).data_parallel_encoders.sharded == found["encoder"]["sharded_ranks"]
    for encoder, of_usual in (("data-parallel", 1), ("pipeline", None)):
        assert json.loads(plan_once(encoder)[1])["encoder"].get("sharded_ranks") == of_usual
    shown = " ".join(printed_by(f"{full} -o {plan}").split())
    assert "weights of encoders sharded over 4 neighbouring ranks" in shown
    printed_by(f"report {plan} -o {tmp_path / 'page.html'}")
    words = "weights are sharded over 4 neighbouring ranks"
    assert words in (tmp_path / "page.html").read_text()


def test_steps_go_on_with_the_other_placement(tmp_path, plan_once):
    """Prevents a run that cannot resume after its encoders move: its steps must not change."""
    first, _ = plan_once("pipeline")
    job = "plan --model internvl-digits --cluster laptop-cpu --dp 4 --encoder data-parallel"
    printed_by(f"{job} --steps-of {first} -o {tmp_path / 'second'}")
    before, after = (read_plan(plan) for plan in (first, tmp_path / "second"))
    assert before.data.steps_sha256 == after.data.steps_sha256
    assert after.data_parallel_encoders.pipelines in (1, 2, 4)


def test_other_ways_to_plan(tmp_path, command):
    """Prevents a search without placements, or sharded encoders despite --sharding replicated."""
    out = tmp_path / "plan"
    shapes = json.loads(printed_by(f"{SHAPES} --encoder auto --json -o {out}"))
    assert shapes["encoder"]["data_parallel_step_ms"] > 0
    for sharding, ranks in (("replicated", 1), ("full", 4)):
        sized = command.replace("--pp 2 --dp 2", "--gpus 4 --tp 1 --samples-per-step 40")
        asked = f"{sized} --encoder data-parallel --sharding {sharding}"
        found = json.loads(printed_by(f"{asked} --json -o {out}"))
        plan = json.loads((out / "plan.json").read_text())
        assert found["strategies"][0]["parallel"] == plan["parallel"]
        sharded = plan["data_parallel_encoders"]["sharded"]
        assert sharded == found["encoder"]["sharded_ranks"] == ranks
        assert "fullest stage" in printed_by(f"check {out}")
    capped = command.replace("--max-tiles 8 --max-tokens 512  --pp 2", "--pp 1")
    found = json.loads(printed_by(f"{capped} --encoder data-parallel --json -o {out}"))
    assert found["encoder"]["placement"] == "data-parallel"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--model qwen2.5-32b --memory-gib 500 --limit tokens=512", "no encoder"),
        (f"{DIGITS} --method layer", "cannot be given with --enc"),
        (f"{DIGITS} --memory-gib 0.01", "GiB"),
    ],
)
def test_what_cannot_be_data_parallel_is_one_line(capsys, tmp_path, options, expected):
    """Prevents a traceback, or an error without advice."""
    command = f"plan --cluster laptop-cpu --encoder data-parallel {options}"
    error = failure(capsys, f"{command} -o {tmp_path / 'plan'}")
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert expected in error
    assert not (tmp_path / "plan").exists()


def test_text_only_models_have_one_placement(tmp_path):
    """Prevents `auto` from refusing a model without encoders."""
    printed = printed_by(
        "plan --model qwen2.5-32b --cluster laptop-cpu --memory-gib 5000 --limit tokens=64 "
        f"--encoder auto --json -o {tmp_path / 'plan'}"
    )
    assert "encoder" not in json.loads(printed)

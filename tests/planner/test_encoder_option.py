"""`omnibal plan --encoder`: both placements planned, checked, shown and edited."""

import json
from pathlib import Path

import pytest
from length_cases import long_tailed
from plan_cases import example_lengths

from omnibal import cli
from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan

PLAN = (
    "plan --model internvl-digits --cluster laptop-cpu --pp 2 --dp 2 --max-tiles 8 "
    "--max-tokens 512 --packing isf --packing-levels 1 --lengths {lengths} "
)
SHAPES = (
    "plan --model internvl-digits --cluster laptop-cpu --pp 2 --dp 2 --max-tiles 8 "
    "--max-tokens 512 "
)


def run(capsys, command: str, status: int | None = None) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code in ((0, None) if status is None else (status,))
    printed = capsys.readouterr()
    return printed.err if status else printed.out


@pytest.fixture
def plan_command(tmp_path: Path) -> str:
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    return PLAN.format(lengths=tmp_path / "lengths.parquet")


def test_the_faster_placement_is_taken_and_both_are_told(capsys, tmp_path, plan_command):
    """Prevents a choice that is not the faster one, and figures of one placement in the other's
    place; each alone is planned as it is without the choice."""
    alone = {}
    for name in ("pipeline", "beside"):
        printed = run(capsys, f"{plan_command} --encoder {name} --json -o {tmp_path / name}")
        alone[name] = json.loads(printed)["step_ms"]
    chosen = json.loads(run(capsys, f"{plan_command} --encoder auto --json -o {tmp_path / 'auto'}"))
    best = min(alone, key=lambda name: alone[name])
    assert chosen["encoder"]["placement"] == best
    assert chosen["encoder"]["pipeline_step_ms"] == alone["pipeline"]
    assert chosen["encoder"]["beside_step_ms"] == alone["beside"]
    assert "faster" in chosen["encoder"]["reason"]
    assert chosen["step_ms"] == alone[best]
    for name in ("plan.json", "packs.parquet"):
        assert (tmp_path / "auto" / name).read_bytes() == (tmp_path / best / name).read_bytes()


def test_placements_and_schedules_are_told_apart(capsys, tmp_path, plan_command):
    """Prevents: a step by 1F1B that is told as that of another schedule, and a refusal for too few
    layers that does not say how many there are."""
    asked = f"{plan_command} --encoder data-parallel --schedule zb-h1 -o {tmp_path / 'plan'}"
    assert "ms in 1f1b, " in run(capsys, asked)
    asked = f"{plan_command} --schedule zb-v -o {tmp_path / 'few'}".replace("--pp 2", "--pp 6")
    assert "here are 6 with 8 layers together" in run(capsys, asked, status=2)


def test_plans_in_the_pipeline_are_as_without_the_option(capsys, tmp_path, plan_command):
    """Prevents a default that changes: plans and their figures are the same bytes."""
    printed = [
        run(capsys, f"{plan_command} {option} --json -o {tmp_path / 'plan'}")
        + (tmp_path / "plan/plan.json").read_text()
        for option in ("", "--encoder pipeline")
    ]
    assert printed[0] == printed[1]
    assert "beside" not in json.loads((tmp_path / "plan/plan.json").read_text())
    summary = json.loads(printed[0].splitlines()[0])
    assert summary["encoder"] == {
        "placement": "pipeline",
        "pipeline_step_ms": summary["step_ms"],
        "beside_step_ms": None,
        "reason": "no other placement was planned",
    }


def test_ranks_share_packs_wherever_encoders_are(capsys, tmp_path):
    """Prevents a comparison of unlike packs from being taken for one of placements: long ones are
    shared beside data-parallel encoders too."""
    write_lengths(long_tailed(600, 65_536), tmp_path / "long.parquet")
    printed = run(
        capsys,
        "plan --model internvl2-8b --cluster h100-80g --tp 2 --dp 4 --micro-batches 2 "
        f"--max-tiles 12 --max-tokens 65536 --lengths {tmp_path / 'long.parquet'} "
        f"--encoder data-parallel --json -o {tmp_path / 'plan'}",
    )
    assert json.loads(printed)["encoder"]["placement"] == "beside"
    plan = read_plan(tmp_path / "plan")
    assert plan.beside is not None and plan.has_shared_packs
    assert "fullest stage" in run(capsys, f"check {tmp_path / 'plan'}")


def test_both_reasons_are_told_where_neither_fits(capsys, tmp_path):
    """Prevents a user from mending what keeps one placement out, and the other one still would;
    what is wrong with both is said once."""
    command = f"{SHAPES} --pp 1 --encoder auto -o {tmp_path / 'plan'}"
    large = command.replace("--max-tiles 8", "--max-tiles 800").replace("512", "51200")
    error = run(capsys, f"{large} --memory-gib 0.01", 2)
    assert len(error.splitlines()) == 1
    first, second = error.split("; and data-parallel: ")
    assert first.startswith("error: in the pipeline: internvl-digits on 1 pipeline stages needs")
    assert "GiB" in second and second != first
    error = run(capsys, f"{command} --lengths {tmp_path / 'none.parquet'}", 2)
    assert error.count("no such lengths file") == 1
    assert not (tmp_path / "plan").exists()


def test_plans_are_checked_simulated_and_shown(capsys, tmp_path, plan_command):
    """Prevents a plan with data-parallel encoders that other commands do not know, or show
    without its encoders."""
    plan = tmp_path / "plan"
    shown = " ".join(run(capsys, f"{plan_command} --encoder data-parallel -o {plan}").split())
    for figure in (" encoders ", "data-parallel", "tiles kept", "exchange of features"):
        assert figure in shown
    assert "every language layer" in run(capsys, f"check {plan}")
    stored = json.loads((plan / "plan.json").read_text())["prediction"]
    simulated = json.loads(run(capsys, f"simulate {plan} --trace {tmp_path / 'trace.json'} --json"))
    assert simulated["step_ms_mean"] == pytest.approx(stored["step_ms"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"encoders forward", "encoders backward"} <= {event["name"] for event in events}
    # Encoders are on every stage of every rank, and nothing of the pipeline begins before them.
    first = [event for event in events if event["name"] == "encoders forward"]
    assert len(first) == 4
    begun = [event["ts"] for event in events if event["name"] == "forward 0"]
    assert min(begun) >= min(event["dur"] for event in first) * (1 - 1e-9)
    page = tmp_path / "report.html"
    run(capsys, f"report {plan} -o {page}")
    assert "Data-parallel encoders: their part" in page.read_text()


def test_edits_by_hand_are_checked(capsys, tmp_path, plan_command):
    """Prevents a plan that takes more than memory holds from being trained, and a prediction of
    another choice from being believed."""
    plan = tmp_path / "plan"
    run(capsys, f"{plan_command} --encoder data-parallel -o {plan}")
    path = plan / "plan.json"
    written = json.loads(path.read_text())
    edited = json.loads(path.read_text())
    edited["beside"]["kept_items"] = {"vision": 0}
    path.write_text(json.dumps(edited))
    assert "the stored prediction is of another plan" in run(capsys, f"check {plan}", 2)
    del edited["prediction"]
    path.write_text(json.dumps(edited))
    assert "fullest stage" in run(capsys, f"check {plan}")
    written["cluster"]["memory_gib"] = 0.01
    path.write_text(json.dumps(written))
    assert "but may fill 0.01 GiB" in run(capsys, f"check {plan}", 2)


def test_steps_go_on_with_the_other_placement(capsys, tmp_path, plan_command):
    """Prevents a run that cannot go on when its encoders move: steps stay the same."""
    run(capsys, f"{plan_command} --encoder pipeline -o {tmp_path / 'first'}")
    run(
        capsys,
        "plan --model internvl-digits --cluster laptop-cpu --dp 4 --encoder data-parallel "
        f"--steps-of {tmp_path / 'first'} -o {tmp_path / 'second'}",
    )
    first, second = (
        json.loads((tmp_path / name / "plan.json").read_text()) for name in ("first", "second")
    )
    assert first["data"]["steps_sha256"] == second["data"]["steps_sha256"]
    assert second["beside"]["pipelines"] in (1, 2, 4)


def test_other_ways_to_plan(capsys, tmp_path, plan_command):
    """Prevents placements that shapes, searched sizes or searched caps do not know."""
    out = tmp_path / "plan"
    shapes = json.loads(run(capsys, f"{SHAPES} --encoder auto --json -o {out}"))
    assert shapes["encoder"]["beside_step_ms"] > 0
    sized = plan_command.replace("--pp 2 --dp 2", "--gpus 4").replace("--packing-levels 1", "")
    found = json.loads(run(capsys, f"{sized} --encoder data-parallel --json -o {out}"))
    plan = json.loads((out / "plan.json").read_text())
    assert plan["beside"] is not None
    assert found["strategies"][0]["parallel"] == plan["parallel"]
    capped = plan_command.replace("--max-tiles 8 --max-tokens 512", "")
    found = json.loads(run(capsys, f"{capped} --encoder data-parallel --json -o {out}"))
    assert found["encoder"]["placement"] == "beside"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            "--model qwen2.5-32b --memory-gib 500 --limit tokens=512 --encoder data-parallel",
            "no encoder",
        ),
        (
            "--model internvl-digits --encoder data-parallel --method layer",
            "cannot be given with --enc",
        ),
        ("--model internvl-digits --encoder data-parallel --memory-gib 0.01", "GiB"),
    ],
)
def test_what_cannot_be_beside_is_one_line(capsys, tmp_path, options, expected):
    """Prevents a traceback, or an answer that leaves open what to change."""
    caps = "" if "limit" in options else "--max-tiles 8 --max-tokens 512"
    error = run(capsys, f"plan --cluster laptop-cpu {caps} {options} -o {tmp_path / 'plan'}", 2)
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert expected in error
    assert not (tmp_path / "plan").exists()


def test_text_only_models_have_one_placement(capsys, tmp_path):
    """Prevents `auto` from refusing a model that has nothing to place."""
    printed = run(
        capsys,
        "plan --model qwen2.5-32b --cluster laptop-cpu --memory-gib 5000 --limit tokens=64 "
        f"--encoder auto --json -o {tmp_path / 'plan'}",
    )
    assert "encoder" not in json.loads(printed)

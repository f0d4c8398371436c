"""`omnibal plan --encoder`: both placements planned, checked, shown and edited."""

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import pytest
from length_cases import long_tailed
from plan_cases import example_lengths

from omnibal import cli
from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan

JOB = "plan --model internvl-digits --cluster laptop-cpu --max-tiles 8 --max-tokens 512 "
SHAPES = f"{JOB} --pp 2 --dp 2 "
PLAN = f"{SHAPES} --packing isf --packing-levels 1 --lengths {{lengths}} "


def printed_by(command: str) -> str:
    with redirect_stdout(StringIO()) as printed, pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert not ended.value.code
    return printed.getvalue()


def error_of(capsys, command: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 2
    return capsys.readouterr().err


@dataclass(frozen=True)
class Planned:
    """Plans of one job: without the option, and with each of its values."""

    folder: Path
    printed: dict[str | None, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        return PLAN.format(lengths=self.folder / "lengths.parquet")

    def plan(self, encoder: str | None) -> tuple[Path, str]:
        """A plan's directory and what was printed of it."""
        option, name = ("", "default") if encoder is None else (f"--encoder {encoder}", encoder)
        place = self.folder / name
        if encoder not in self.printed:
            printed = printed_by(f"{self.command} {option} --json -o {place}")
            self.printed[encoder] = printed.replace(str(place), "PLAN")
        return place, self.printed[encoder]

    def copy(self, encoder: str, folder: Path) -> Path:
        """A copy of a plan that may be edited."""
        return shutil.copytree(self.plan(encoder)[0], folder)


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Planned:
    folder = tmp_path_factory.mktemp("plans")
    write_lengths(example_lengths(count=150), folder / "lengths.parquet")
    return Planned(folder)


def test_the_faster_placement_is_taken_and_both_are_told(planned):
    """Prevents a choice that is not the faster one, and figures of one placement in the other's
    place; each alone is planned as it is without the choice."""
    names = {"pipeline": "pipeline", "beside": "data-parallel"}
    alone = {each: json.loads(planned.plan(name)[1])["step_ms"] for each, name in names.items()}
    chosen = json.loads(planned.plan("auto")[1])
    best = min(alone, key=lambda name: alone[name])
    assert chosen["encoder"]["placement"] == best
    assert chosen["encoder"]["pipeline_step_ms"] == alone["pipeline"]
    assert chosen["encoder"]["beside_step_ms"] == alone["beside"]
    assert "faster" in chosen["encoder"]["reason"]
    assert chosen["step_ms"] == alone[best]
    for name in ("plan.json", "packs.parquet"):
        of_auto, of_best = (planned.plan(each)[0] / name for each in ("auto", names[best]))
        assert of_auto.read_bytes() == of_best.read_bytes()


def test_placements_and_schedules_are_told_apart(capsys, tmp_path, planned):
    """Prevents: a step by 1F1B that is told as that of another schedule, a plan that is shown
    without its encoders, and a refusal for too few layers that does not say how many there are."""
    asked = f"{planned.command} --encoder data-parallel --schedule zb-h1 -o {tmp_path / 'plan'}"
    shown = " ".join(printed_by(asked).split())
    for figure in (" encoders ", "data-parallel", "tiles kept", "exchange of features"):
        assert figure in shown
    assert "ms in 1f1b, " in shown
    asked = f"{planned.command} --schedule zb-v -o {tmp_path / 'few'}".replace("--pp 2", "--pp 6")
    assert "here are 6 with 8 layers together" in error_of(capsys, asked)


def test_plans_in_the_pipeline_are_as_without_the_option(planned):
    """Prevents a default that changes: plans and their figures are the same bytes."""
    (default, told), (pipeline, of_option) = planned.plan(None), planned.plan("pipeline")
    assert told == of_option
    assert (default / "plan.json").read_bytes() == (pipeline / "plan.json").read_bytes()
    assert "beside" not in json.loads((default / "plan.json").read_text())
    summary = json.loads(told)
    assert summary["encoder"] == {
        "placement": "pipeline",
        "pipeline_step_ms": summary["step_ms"],
        "beside_step_ms": None,
        "reason": "no other placement was planned",
    }


def test_ranks_share_packs_wherever_encoders_are(tmp_path):
    """Prevents a comparison of unlike packs from being taken for one of placements: long ones are
    shared beside data-parallel encoders too."""
    write_lengths(long_tailed(150, 65_536), tmp_path / "long.parquet")
    printed = printed_by(
        "plan --model internvl2-8b --cluster h100-80g --tp 2 --dp 4 --micro-batches 2 "
        f"--max-tiles 12 --max-tokens 65536 --lengths {tmp_path / 'long.parquet'} "
        f"--encoder data-parallel --json -o {tmp_path / 'plan'}",
    )
    assert json.loads(printed)["encoder"]["placement"] == "beside"
    plan = read_plan(tmp_path / "plan")
    assert plan.beside is not None and plan.has_shared_packs
    assert "fullest stage" in printed_by(f"check {tmp_path / 'plan'}")


def test_both_reasons_are_told_where_neither_fits(capsys, tmp_path):
    """Prevents a user from mending what keeps one placement out, and the other one still would;
    what is wrong with both is said once."""
    command = f"{JOB} --dp 2 --encoder auto -o {tmp_path / 'plan'}"
    large = command.replace("--max-tiles 8", "--max-tiles 800").replace("512", "51200")
    error = error_of(capsys, f"{large} --memory-gib 0.01")
    assert len(error.splitlines()) == 1
    first, second = error.split("; and data-parallel: ")
    assert first.startswith("error: in the pipeline: internvl-digits on 1 pipeline stages needs")
    assert "GiB" in second and second != first
    error = error_of(capsys, f"{command} --lengths {tmp_path / 'none.parquet'}")
    assert error.count("no such lengths file") == 1
    assert not (tmp_path / "plan").exists()


def test_plans_are_checked_simulated_and_shown(tmp_path, planned):
    """Prevents a plan with data-parallel encoders that other commands do not know, or show
    without its encoders."""
    plan, _ = planned.plan("data-parallel")
    assert "every language layer" in printed_by(f"check {plan}")
    stored = json.loads((plan / "plan.json").read_text())["prediction"]
    simulated = json.loads(printed_by(f"simulate {plan} --trace {tmp_path / 'trace.json'} --json"))
    assert simulated["step_ms_mean"] == pytest.approx(stored["step_ms"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"encoders forward", "encoders backward"} <= {event["name"] for event in events}
    # Encoders are on every stage of every rank, and nothing of the pipeline begins before them.
    first = [event for event in events if event["name"] == "encoders forward"]
    assert len(first) == 4
    begun = [event["ts"] for event in events if event["name"] == "forward 0"]
    assert min(begun) >= min(event["dur"] for event in first) * (1 - 1e-9)
    page = tmp_path / "report.html"
    printed_by(f"report {plan} -o {page}")
    assert "Data-parallel encoders: their part" in page.read_text()


def test_edits_by_hand_are_checked(capsys, tmp_path, planned):
    """Prevents a plan that takes more than memory holds from being trained, and a prediction of
    another choice from being believed."""
    plan = planned.copy("data-parallel", tmp_path / "plan")
    path = plan / "plan.json"
    written = json.loads(path.read_text())
    edited = json.loads(path.read_text())
    edited["beside"]["kept_items"] = {"vision": 0}
    path.write_text(json.dumps(edited))
    assert "the stored prediction is of another plan" in error_of(capsys, f"check {plan}")
    del edited["prediction"]
    path.write_text(json.dumps(edited))
    assert "fullest stage" in printed_by(f"check {plan}")
    written["cluster"]["memory_gib"] = 0.01
    path.write_text(json.dumps(written))
    assert "but may fill 0.01 GiB" in error_of(capsys, f"check {plan}")


def test_steps_go_on_with_the_other_placement(tmp_path, planned):
    """Prevents a run that cannot go on when its encoders move: steps stay the same."""
    first, _ = planned.plan("pipeline")
    printed_by(
        "plan --model internvl-digits --cluster laptop-cpu --dp 4 --encoder data-parallel "
        f"--steps-of {first} -o {tmp_path / 'second'}",
    )
    before, after = (
        json.loads((plan / "plan.json").read_text()) for plan in (first, tmp_path / "second")
    )
    assert before["data"]["steps_sha256"] == after["data"]["steps_sha256"]
    assert after["beside"]["pipelines"] in (1, 2, 4)


def test_other_ways_to_plan(tmp_path, planned):
    """Prevents placements that shapes, searched sizes or searched caps do not know."""
    out = tmp_path / "plan"
    shapes = json.loads(printed_by(f"{SHAPES} --encoder auto --json -o {out}"))
    assert shapes["encoder"]["beside_step_ms"] > 0
    sized = planned.command.replace("--pp 2 --dp 2", "--gpus 2 --tp 1")
    found = json.loads(printed_by(f"{sized} --encoder data-parallel --json -o {out}"))
    plan = json.loads((out / "plan.json").read_text())
    assert plan["beside"] is not None
    assert found["strategies"][0]["parallel"] == plan["parallel"]
    capped = planned.command.replace("--max-tiles 8 --max-tokens 512  --pp 2", "--pp 1")
    found = json.loads(printed_by(f"{capped} --encoder data-parallel --json -o {out}"))
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
    error = error_of(capsys, f"plan --cluster laptop-cpu {caps} {options} -o {tmp_path / 'plan'}")
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert expected in error
    assert not (tmp_path / "plan").exists()


def test_text_only_models_have_one_placement(tmp_path):
    """Prevents `auto` from refusing a model that has nothing to place."""
    printed = printed_by(
        "plan --model qwen2.5-32b --cluster laptop-cpu --memory-gib 5000 --limit tokens=64 "
        f"--encoder auto --json -o {tmp_path / 'plan'}",
    )
    assert "encoder" not in json.loads(printed)

"""`omnibal plan --packing-levels`: plans that check, JSON that says the levels, and clear
refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_cases import failure, printed, run
from length_cases import long_tailed, texts
from packing_cases import scheduled_packs
from plan_cases import ISF

from omnibal.cli.level_options import notes_on_steps
from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import data_of_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps

LLAMA = "plan --model llama3.1-8b --cluster h200-141g"
LONG = f"{LLAMA} --micro-batches 2 --max-tokens 65536"
DIGITS = "plan --model internvl-digits --cluster laptop-cpu --pp 2 --dp 2"
CAPPED = f"{DIGITS} --max-tiles 8 --max-tokens 512"


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    write_lengths(long_tailed(1_200, 65_536), tmp_path / "texts.parquet")
    return tmp_path / "texts.parquet"


@pytest.mark.parametrize("levels", ["auto", "hbp", "2"])
def test_plans_of_levels(capsys, tmp_path, texts_file, levels):
    """Prevents plans of levels that do not check, and JSON that does not say what is planned."""
    out = tmp_path / "plan"
    options = "--lengths", texts_file, "--packing-levels", levels, "-o", out, "--json"
    summary = json.loads(printed(capsys, f"{LONG} --dp 4", *options))
    plan, found = read_plan(out), summary["levels"]
    packs, lengths = data_of_plan(plan, out)
    assert len(found) == len(plan.levels) > 1 and found[-1]["max_tokens"] == 65_536
    for index, level in enumerate(found):
        stages = plan.stages_at(index)
        assert level["recompute"] == [stage.recomputed_layers for stage in stages]
        assert level["context"] == plan.levels[index].context
    assert sum(level["packs"] for level in found) == len(packs)
    assert sum(level["samples"] for level in found) == len(lengths)
    shared = np.array([level.context > 1 for level in plan.levels])[packs.level]
    tokens = packs.tokens[shared].sum() / packs.tokens.sum()
    assert summary["communication_ratio"] == pytest.approx(tokens, rel=0.3)
    assert 0 < summary["exchanged_ratio"] <= tokens
    assert 0 <= summary["attention_balance_ratio"] < 0.2
    run("check", out)


def test_levels_of_one_level_are_said_too(capsys, tmp_path, lengths_file):
    """Prevents scripts that must know how many levels a plan has before they read it."""
    files = "--lengths", lengths_file, "-o", tmp_path / "plan"
    summary = json.loads(printed(capsys, f"{CAPPED} --json", *files))
    recompute = [stage["recompute"] for stage in summary["stages"]]
    (level,) = summary["levels"]
    expected = {"samples": 300, "packs": summary["packs"], "max_tiles": 8, "max_tokens": 512}
    assert level == level | expected | {"context": 1, "recompute": recompute}
    assert summary["communication_ratio"] == 0
    summary = json.loads(printed(capsys, f"{CAPPED} --json", "-o", tmp_path / "shapes"))
    assert summary["levels"][0]["packs"] is None and summary["communication_ratio"] is None


def test_short_data_makes_the_plan_of_one_level(tmp_path, lengths_file):
    """Prevents another plan, byte for byte, where levels cannot help."""
    for levels in ("auto", "1"):
        given = f"{CAPPED} --packing-levels {levels} --lengths"
        run(given, lengths_file, "-o", tmp_path / levels)
    for name in ("plan.json", "packs.parquet"):
        assert (tmp_path / "auto" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_steps_of_levels_for_other_ranks(tmp_path, texts_file):
    """Prevents a run that cannot go on with fewer ranks, or goes on at another sample."""
    run(LONG, "--dp", 8, "--lengths", texts_file, "--packing-levels", 2, "-o", tmp_path / "plan")
    run(f"{LLAMA} --dp 2 --tp 2 --steps-of", tmp_path / "plan", "-o", tmp_path / "fewer")
    first, fewer = (read_plan(tmp_path / name) for name in ("plan", "fewer"))
    assert fewer.data.steps_sha256 == first.data.steps_sha256
    assert [level.caps for level in fewer.levels] == [level.caps for level in first.levels]
    assert max(level.context for level in fewer.levels) <= 2
    run("check", tmp_path / "fewer")


def test_a_curriculum_is_planned(capsys, tmp_path, texts_file):
    """Prevents a curriculum that the plan does not hold or say."""
    options = f"{LONG} --dp 4 --lengths {texts_file} --curriculum-steps 3 --packing-levels"
    run(options, 2, "-o", tmp_path / "plan")
    plan = read_plan(tmp_path / "plan")
    packs, _ = data_of_plan(plan, tmp_path / "plan")
    assert plan.data.curriculum_steps == 3
    assert packs.level[packs.step < 3].max() == 0 < packs.level.max()
    run("check", tmp_path / "plan")
    capsys.readouterr()
    longer = options.replace("steps 3", "steps 9999")
    for command, levels, message in (
        (options, 1, "packs are of one level"),
        (longer, "auto", "a curriculum of 9,999 steps was asked for, and an epoch has about"),
    ):
        assert message in failure(capsys, command, levels, "-o", tmp_path / "x")


def test_a_curriculum_needs_two_levels(capsys, tmp_path):
    """Prevents a curriculum of all packs, where one level is shared by ranks."""
    write_lengths(texts(np.full(60, 250_000)), tmp_path / "long.parquet")
    options = f"{LLAMA} --dp 8 --micro-batches 2 --curriculum-steps 1 --lengths"
    message = failure(capsys, options, tmp_path / "long.parquet", "-o", tmp_path / "x")
    assert "there is one level; leave --curriculum-steps out" in message


def test_levels_of_no_packs_do_not_get_into_plans(capsys, tmp_path, monkeypatch):
    """Prevents levels that were chosen on other packs than the plan's, and that it has none of."""
    lengths = texts([3_000] * 64 + [20_000] * 2)
    write_lengths(lengths, tmp_path / "texts.parquet")
    levels = tuple(Level(caps=Caps.of(tokens=tokens)) for tokens in (4_096, 16_384, 32_768))
    data = SampleData(settings=ISF, lengths=lengths, packs_per_step=4, levels=levels)
    monkeypatch.setattr("omnibal.planning._Search._data", lambda *_: data)
    run(f"{LLAMA} --dp 2 --lengths", tmp_path / "texts.parquet", "-o", tmp_path / "plan")
    assert "the level of 16,384 tokens: it is left out" in capsys.readouterr().err
    plan = read_plan(tmp_path / "plan")
    assert [level.caps["tokens"] for level in plan.levels] == [4_096, 32_768]
    run("check", tmp_path / "plan")


def test_steps_of_one_level_are_shared_where_a_rank_cannot_hold_a_pack(capsys, tmp_path):
    """Prevents a run that cannot go on with fewer devices a pack, which ranks could share."""
    write_lengths(texts(np.full(32, 120_000)), tmp_path / "long.parquet")
    first = f"{LLAMA} --tp 4 --dp 4 --micro-batches 2 --packing-levels 1 --max-tokens 131072"
    run(f"{first} --lengths", tmp_path / "long.parquet", "-o", tmp_path / "one")
    again = "plan --model llama3.1-8b --cluster h100-80g --tp 1 --dp 8 --steps-of"
    run(again, tmp_path / "one", "-o", tmp_path / "shared")
    assert "do not fit one rank" in capsys.readouterr().err
    one, shared = (read_plan(tmp_path / name) for name in ("one", "shared"))
    assert not one.levels and shared.levels[0].context > 1
    assert one.data.steps_sha256 == shared.data.steps_sha256
    run("check", tmp_path / "shared")
    capsys.readouterr()
    message = failure(capsys, again, tmp_path / "shared", "--method", "bmp", "-o", tmp_path / "x")
    assert "leave both options out" in message and "--packing-levels" not in message


@pytest.mark.quick
def test_few_uneven_steps_are_told_of():
    """Prevents steps of which one has most of the tokens, without a word."""

    def packs_of(tokens, epoch):
        steps = np.arange(len(tokens))
        packs = scheduled_packs(steps[:, None].tolist(), steps, epoch=epoch, tokens=tokens)
        return notes_on_steps(packs)

    (note,) = packs_of([10, 10, 10, 10, 4, 10], [0, 0, 0, 0, 1, 1])
    assert "2 steps" in note and "2.5 times" in note
    assert packs_of([4, 10, 10, 10], [0] * 4) == packs_of([5, 10], [0, 0]) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{CAPPED} --packing-levels 5 --lengths FILE", "auto, hbp, or a number"),
        (f"{CAPPED} --packing-levels two --lengths FILE", "auto, hbp, or a number"),
        (f"{CAPPED} --packing-levels 4 --lengths FILE", "may have"),
        (f"{CAPPED} --packing-levels 2", "levels are of samples"),
        (f"{CAPPED} --curriculum-steps 2", "levels are of samples"),
        (f"{DIGITS} --gpus 4 --packing-levels 2 --lengths FILE", "can be trained on 4 GPUs"),
        (f"{CAPPED} --packing-levels 2 --method layer --lengths FILE", "only the joint search"),
    ],
)
def test_levels_that_cannot_be(capsys, tmp_path, lengths_file, options, message):
    """Prevents tracebacks, and options that are silently ignored."""
    command = options.replace("FILE", str(lengths_file))
    assert message in failure(capsys, command, "-o", tmp_path / "plan")

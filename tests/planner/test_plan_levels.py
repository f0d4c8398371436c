"""`omnibal plan --packing-levels`: plans that check, JSON that says the levels, and clear
refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_cases import failure, run
from length_cases import long_tailed, texts
from packing_cases import scheduled_packs
from plan_cases import example_lengths

from omnibal.cli.level_options import notes_on_steps
from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import data_of_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.packing.packing import PackingMethod
from omnibal.steps.pack_settings import PackSettings

LONG = "plan --model llama3.1-8b --cluster h200-141g --micro-batches 2 --max-tokens 65536"
DIGITS = "plan --model internvl-digits --cluster laptop-cpu --pp 2 --dp 2"


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    write_lengths(long_tailed(1_200, 65_536), tmp_path / "texts.parquet")
    return tmp_path / "texts.parquet"


@pytest.mark.parametrize("levels", ["auto", "hbp", "2"])
def test_plans_of_levels(capsys, tmp_path, texts_file, levels):
    """Prevents plans of levels that do not check, and JSON that does not say what is planned."""
    out = tmp_path / "plan"
    run(LONG, "--dp", 4, "--lengths", texts_file, "--packing-levels", levels, "-o", out, "--json")
    printed = json.loads(capsys.readouterr().out)
    plan = read_plan(out)
    assert plan.data is not None
    packs, lengths = data_of_plan(plan, out)
    found = printed["levels"]
    assert len(found) == len(plan.levels) > 1
    assert [level["context"] for level in found] == [level.context for level in plan.levels]
    assert [level["max_tokens"] for level in found][-1] == 65_536
    assert sum(level["packs"] for level in found) == len(packs)
    assert sum(level["samples"] for level in found) == len(lengths)
    for index, level in enumerate(found):
        stages = plan.stages_at(index)
        assert level["recompute"] == [stage.recomputed_layers for stage in stages]
    shared = [level.context > 1 for level in plan.levels]
    tokens = packs.tokens[np.array(shared)[packs.level]].sum() / packs.tokens.sum()
    assert printed["communication_ratio"] == pytest.approx(tokens, rel=0.3)
    assert 0 < printed["exchanged_ratio"] <= tokens
    assert 0 <= printed["attention_balance_ratio"] < 0.2
    run("check", out)


def test_levels_of_one_level_are_said_too(capsys, tmp_path):
    """Prevents scripts that must know how many levels a plan has before they read it."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    options = f"{DIGITS} --max-tiles 8 --max-tokens 512 --json"
    run(options, "--lengths", tmp_path / "lengths.parquet", "-o", tmp_path / "plan")
    printed = json.loads(capsys.readouterr().out)
    (level,) = printed["levels"]
    assert level["samples"] == 300 and level["packs"] == printed["packs"]
    assert (level["max_tiles"], level["max_tokens"], level["context"]) == (8, 512, 1)
    assert level["recompute"] == [stage["recompute"] for stage in printed["stages"]]
    assert printed["communication_ratio"] == 0
    run(options, "-o", tmp_path / "shapes")
    printed = json.loads(capsys.readouterr().out)
    assert printed["levels"][0]["packs"] is None and printed["communication_ratio"] is None


def test_short_data_makes_the_plan_of_one_level(tmp_path):
    """Prevents another plan, byte for byte, where levels cannot help."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    options = f"{DIGITS} --max-tiles 8 --max-tokens 512 --lengths {tmp_path}/lengths.parquet"
    for levels in ("auto", "1"):
        run(options, "--packing-levels", levels, "-o", tmp_path / levels)
    for name in ("plan.json", "packs.parquet"):
        assert (tmp_path / "auto" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_steps_of_levels_for_other_ranks(tmp_path, texts_file):
    """Prevents a run that cannot go on with fewer ranks, or goes on at another sample."""
    run(LONG, "--dp", 8, "--lengths", texts_file, "--packing-levels", 2, "-o", tmp_path / "plan")
    options = "plan --model llama3.1-8b --cluster h200-141g --dp 2 --tp 2 --steps-of"
    run(options, tmp_path / "plan", "-o", tmp_path / "fewer")
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
    message = failure(capsys, options, 1, "-o", tmp_path / "x")
    assert "packs are of one level" in message
    message = failure(
        capsys, options.replace("steps 3", "steps 9999"), "auto", "-o", tmp_path / "x"
    )
    assert "a curriculum of 9,999 steps was asked for, and an epoch has about" in message


def test_a_curriculum_needs_two_levels(capsys, tmp_path):
    """Prevents a curriculum of all packs, where one level is shared by ranks."""
    write_lengths(texts(np.full(60, 250_000)), tmp_path / "long.parquet")
    options = "plan --model llama3.1-8b --cluster h200-141g --dp 8 --micro-batches 2 --lengths"
    options = f"{options} {tmp_path / 'long.parquet'} --curriculum-steps 1"
    message = failure(capsys, options, "-o", tmp_path / "x")
    assert "there is one level; leave --curriculum-steps out" in message


def test_levels_of_no_packs_do_not_get_into_plans(capsys, tmp_path, monkeypatch):
    """Prevents levels that were chosen on other packs than the plan's, and that it has none of."""
    lengths = texts([3_000] * 64 + [20_000] * 2)
    write_lengths(lengths, tmp_path / "texts.parquet")
    levels = tuple(Level(caps=Caps.of(tokens=tokens)) for tokens in (4_096, 16_384, 32_768))
    data = SampleData(
        settings=PackSettings(packing=PackingMethod.ISF),
        lengths=lengths,
        packs_per_step=4,
        levels=levels,
    )
    monkeypatch.setattr("omnibal.planning._Search._data", lambda *_: data)
    options = "plan --model llama3.1-8b --cluster h200-141g --dp 2 --lengths"
    run(options, tmp_path / "texts.parquet", "-o", tmp_path / "plan")
    assert "the level of 16,384 tokens: it is left out" in capsys.readouterr().err
    plan = read_plan(tmp_path / "plan")
    assert [level.caps["tokens"] for level in plan.levels] == [4_096, 32_768]
    run("check", tmp_path / "plan")


def test_steps_of_one_level_are_shared_where_a_rank_cannot_hold_a_pack(capsys, tmp_path):
    """Prevents a run that cannot go on with fewer devices a pack, which ranks could share."""
    write_lengths(texts(np.full(32, 120_000)), tmp_path / "long.parquet")
    first = "plan --model llama3.1-8b --cluster h200-141g --tp 4 --dp 4 --micro-batches 2"
    options = "--packing-levels 1 --max-tokens 131072 --lengths"
    run(f"{first} {options}", tmp_path / "long.parquet", "-o", tmp_path / "one")
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
        (
            "--lengths FILE --max-tiles 8 --max-tokens 512 --packing-levels 5",
            "auto, hbp, or a number",
        ),
        (
            "--lengths FILE --max-tiles 8 --max-tokens 512 --packing-levels two",
            "auto, hbp, or a number",
        ),
        ("--lengths FILE --max-tiles 8 --max-tokens 512 --packing-levels 4", "may have"),
        ("--max-tiles 8 --max-tokens 512 --packing-levels 2", "levels are of samples"),
        ("--max-tiles 8 --max-tokens 512 --curriculum-steps 2", "levels are of samples"),
        (
            "--lengths FILE --gpus 4 --packing-levels 2",
            "no levels of packs can be trained on 4 GPUs",
        ),
        (
            "--lengths FILE --max-tiles 8 --max-tokens 1024 --packing-levels 2 --method layer",
            "only the joint search",
        ),
    ],
)
def test_levels_that_cannot_be(capsys, tmp_path, options, message):
    """Prevents tracebacks, and options that are silently ignored."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    given = options.replace("FILE", str(tmp_path / "lengths.parquet"))
    assert message in failure(capsys, f"{DIGITS} {given}", "-o", tmp_path / "plan")

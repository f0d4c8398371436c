"""Packing levels: a search as good as exhaustive, a no-op on short data, and the plan command."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cli_cases import failure, printed, run
from length_cases import long_tailed, texts
from plan_cases import ISF

from omnibal.data.lengths import Lengths, write_lengths
from omnibal.job.job import JobSpec
from omnibal.job.plan import read_plan
from omnibal.job.plan_data import SampleData
from omnibal.job.plan_files import read_plan_data
from omnibal.job.planner import PlanRequest
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import MAX_CONTEXT, Level, are_plain
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packing import PackingMethod, pack_samples
from omnibal.pipeline.stage_memory import GIB
from omnibal.search.level_choice import (
    WholeModel,
    good_forms,
    least_ms_per_sample,
    level_forms,
    possible_contexts,
)
from omnibal.search.level_estimates import (
    ANY_LEVELS,
    LevelEstimates,
    ProfiledLength,
    candidate_caps,
    hbp_levels,
    top_caps,
)
from omnibal.search.level_sets import (
    MIN_LEVELS_GAIN,
    levels_in_use,
    need_levels,
    plan_levels,
    search_with_levels,
)
from omnibal.search.strategy import FreeSizes, Setting, Sizing, Strategy, StrategyRequest
from omnibal.search.strategy_search import StrategySearch

MODEL = load_model("llama3.1-8b")


def job_of(ranks: int, pipeline: int = 1) -> JobSpec:
    cluster, parallel = load_cluster("h200-141g"), Parallel(pipeline=pipeline, data=ranks)
    return JobSpec(model=MODEL, cluster=cluster, parallel=parallel, precision="bf16")


def level_request(lengths, tokens: int, ranks: int, pipeline: int = 1, **changes):
    """Return a request with two full packs per rank and step, in samples of mean length."""
    job = changes.pop("job", job_of(ranks, pipeline))
    tokens_per_step = LevelEstimates.for_job(job, data_of(lengths, ranks, tokens)).tokens_per_step
    given = {
        "job": job,
        "sizes": FreeSizes(gpus=job.parallel.world_size),
        "layouts": (job.parallel,),
        "lengths": lengths,
        "settings": ISF,
        "samples_per_step": max(round(tokens_per_step * ranks / lengths.tokens.mean()), 1),
        "samples": len(lengths),
        "caps": Caps.of(tokens=tokens),
    }
    return StrategyRequest(**(given | changes))


def data_of(lengths: Lengths, ranks: int, tokens: int) -> SampleData:
    levels = (Level(caps=Caps.of(tokens=tokens)),)
    return SampleData(settings=ISF, lengths=lengths, levels=levels, packs_per_step=2 * ranks)


def run_search(request: StrategyRequest, processes: int = 1) -> StrategySearch:
    return search_with_levels(request, ANY_LEVELS, lambda done: None, processes)


TABLE_19 = [(8, 2, 2.69), (16, 1, 2.65), (32, 8, 2.83), (64, 4, 3.01), (128, 8, 3.05)]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("figures", "chosen"),
    [
        (TABLE_19, ((16, 1), (128, 8))),
        # A rank's share of the fastest pack is a level, and of the longest pack if it is long.
        ([(8, 1, 3.0), (32, 4, 2.0), (128, 2, 4.0)], ((8, 1), (32, 4), (64, 1), (128, 2))),
        ([(8, 1, 3.0), (32, 4, 2.0), (128, 8, 4.0)], ((8, 1), (32, 4), (128, 8))),
        # Only the fastest context size of a length counts.
        ([(8, 1, 9.0), (8, 2, 1.0), (16, 1, 2.0), (16, 2, 3.0)], ((4, 1), (8, 2), (16, 1))),
        ([(8, 1, 1.0)], ((8, 1),)),
    ],
)
def test_levels_by_the_rule_of_hbp(figures, chosen):
    """Prevents levels that differ from HBP's Algorithm 1, such as [16K, 128K] in table 19."""
    profiled = [ProfiledLength(tokens=n, context=c, ms=t) for n, c, t in figures]
    assert hbp_levels(profiled) == chosen


@pytest.mark.quick
def test_candidates_suit_the_data():
    """Prevents levels with one sample per pack, and item caps that do not decrease."""
    of_one = Caps.of(tokens=4_096)
    assert candidate_caps(texts(np.full(100, 1_000)), of_one) == (of_one,)
    found = candidate_caps(texts(np.full(100, 100)), Caps.of(tiles=9, tokens=4_000))
    expected = ((2, 500), (3, 1_000), (5, 2_000), (9, 4_000))
    assert found == tuple(Caps.of(tiles=tiles, tokens=tokens) for tiles, tokens in expected)
    assert top_caps(texts([5, 4_097]), ["tokens"]) == Caps.of(tokens=8_192)
    assert top_caps(texts([4_096]), ["tokens"]) == Caps.of(tokens=4_096)


@pytest.mark.parametrize(
    ("pipeline", "slack"), [(1, 2 * MIN_LEVELS_GAIN), (2, 5 * MIN_LEVELS_GAIN)]
)
def test_search_is_as_good_as_trying_everything(pipeline, slack):
    """Prevents estimates that exclude the best levels, and a lower bound above a plan's time.

    Estimates ignore the pipeline bubble, so the slack is larger with a pipeline.
    """
    lengths = long_tailed(800, 65_536)
    request = level_request(lengths, 65_536, 4, pipeline)
    job, best = request.job, run_search(request).best
    caps = (Caps.of(tokens=16_384), Caps.of(tokens=65_536))
    setting, sizing = Setting(request=request.draw_samples(), packs={}), Sizing(job.parallel)
    bound = least_ms_per_sample(job, lengths)
    all_ms = []
    for count in (1, 2):
        for levels in product(*(list(level_forms(job, each)) for each in caps[-count:])):
            _, found = plan_levels(setting, request.caps, (sizing, levels))
            if isinstance(found, Strategy):
                assert bound <= found.ms_per_sample
                all_ms.append(found.ms_per_sample)
    assert best.ms_per_sample <= (1 + slack) * min(all_ms)
    assert 0.5 * best.ms_per_sample < bound <= best.ms_per_sample


def test_no_context_size_is_looked_at_in_vain():
    """Prevents a search that takes minutes, or a traceback, on thousands of ranks."""
    caps = Caps.of(tokens=131_072)
    assert possible_contexts(job_of(8_192), caps) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert max(possible_contexts(job_of(8_192))) == MAX_CONTEXT
    assert possible_contexts(job_of(6), caps) == [1, 2]
    lengths = texts(np.full(64, 16_000))
    packs = pack_samples(lengths, caps, PackingMethod.ISF, 0)
    forms = good_forms(job_of(64), caps, packs, lengths, 1e6)
    contexts, times = [f.level.context for f in forms], [f.rows_ms for f in forms]
    assert contexts == sorted(set(contexts)) and contexts[-1] < 64
    # The search ends after two context sizes slower than the best so far.
    best = int(np.argmin(times))
    assert len(times) - 1 - best <= 2


def test_like_samples_are_shared_where_that_saves_recomputation():
    """Prevents unshared packs of long samples if context parallelism avoids recomputation."""
    lengths = texts(np.random.default_rng(0).integers(60_000, 120_000, 100))
    parallel = Parallel(tensor=4, pipeline=1, data=8)
    job = replace(job_of(8), cluster=load_cluster("h100-80g"), parallel=parallel)
    request = level_request(lengths, 131_072, 8, job=job)
    assert need_levels(request, ANY_LEVELS)
    found = run_search(request)
    alone = next(each for each in found.ranking if are_plain(each.levels))
    assert len(found.best.levels) == 1 and found.best.levels[0].context > 1
    assert alone.recomputed_layers > 0
    assert found.best.ms_per_sample < 0.95 * alone.ms_per_sample


@pytest.mark.parametrize(
    ("tokens", "ranks", "pipeline"),
    [
        ([100] * 9 + [60_000], 8, 1),
        ([100, 90_000], 2, 1),
        ([200] * 45 + [22_000, 25_000, 30_000, 35_000, 38_000], 6, 4),
    ],
)
def test_few_packs_are_shared_by_all_ranks(tokens, ranks, pipeline):
    """Prevents a refusal for too few packs if several ranks could share each pack."""
    top = int(top_caps(texts(tokens), ["tokens"])["tokens"])
    request = replace(level_request(texts(tokens), top, ranks, pipeline), caps=None)
    assert need_levels(request, ANY_LEVELS)
    best = run_search(request).best.levels
    packs, _ = replace(data_of(texts(tokens), ranks, top), levels=best).schedule(request.job)
    assert len(packs.packs.samples) == len(tokens)
    assert best[-1].context > 1


def test_levels_without_packs_are_left_out():
    """Prevents levels without packs in a plan, and a top level too small for some sample."""
    levels = tuple(Level(caps=Caps.of(tokens=tokens)) for tokens in (10, 20, 40, 80))
    one, two, three, _ = levels
    longest = Caps.of(tokens=30)
    assert levels_in_use(levels, np.array([0, 2, 2]), longest) == (one, three)
    assert levels_in_use(levels, np.array([0, 1]), longest) == (one, two, three)
    assert levels_in_use((one,), np.array([0, 0]), longest) == (one,)
    request = level_request(texts([3_000] * 64 + [20_000]), 65_536, 2)
    caps = [Caps.of(tokens=tokens) for tokens in (4_096, 16_384, 32_768, 65_536)]
    setting, tried = Setting(request=request, packs={}), tuple(Level(caps=each) for each in caps)
    _, found = plan_levels(setting, longest, (Sizing(request.job.parallel), tried))
    assert isinstance(found, Strategy)
    assert [level.caps for level in found.levels] == [caps[0], caps[2]]


def test_a_curriculum_starts_with_short_packs():
    """Prevents a curriculum with a single level."""
    request = level_request(long_tailed(400, 32_768), 32_768, 2)
    short = replace(request, settings=replace(ISF, curriculum_steps=2))
    setting, sizing = Setting(request=short.draw_samples(), packs={}), Sizing(short.job.parallel)
    _, refused = plan_levels(setting, short.caps, (sizing, (Level(caps=short.caps),)))
    assert "there is one level" in str(refused)


def test_searches_are_deterministic_on_any_number_of_processes():
    """Prevents plans that differ from run to run."""
    request = level_request(long_tailed(800, 32_768), 32_768, 2)
    one, two = (run_search(request, processes) for processes in (1, 2))
    assert one == two and not are_plain(one.best.levels)


def test_the_recomputed_share_is_the_least_that_fits():
    """Prevents working memory counted as free, and more recomputation than memory requires."""
    job = job_of(8, pipeline=2)
    base = replace(WholeModel.from_job(job), state_bytes=0)
    rng = np.random.default_rng(4)
    room = job.memory_cap_gib * GIB / 100
    some = infinite = 0
    for _ in range(200):
        kept, saved = rng.uniform(0, 60, 2), rng.uniform(0, 1, 2)
        working = rng.uniform(0, 40, (3, 2))
        model = replace(
            base, kept_bytes=kept * room, saved_bytes=(saved * kept * room)[None],
            working_bytes=working * room,
        )  # fmt: skip
        features = rng.uniform(0, 2, (4, 2))
        found = model.recomputed_share(features, job, micro_batches=1)
        shares = np.linspace(0, 1, 201)
        stays = (features @ kept - np.outer(shares, features @ (saved * kept))) / 2
        fits = shares[(stays + (features @ working.T).max(axis=1)).max(axis=1) <= 100]
        assert (fits[0] - 0.0051 <= found <= fits[0] + 1e-9) if len(fits) else found > 0.994
        some += len(fits) > 0 and found > 0
        infinite += not len(fits)
    assert some > 10 and infinite > 10


LLAMA = "plan --model llama3.1-8b --cluster h200-141g"
LONG = f"{LLAMA} --micro-batches 2 --max-tokens 65536"
DIGITS = "plan --model internvl-digits --cluster laptop-cpu --pp 2 --dp 2"
CAPPED = f"{DIGITS} --max-tiles 8 --max-tokens 512"


@pytest.fixture
def texts_file(tmp_path: Path) -> Path:
    write_lengths(long_tailed(1_200, 65_536), tmp_path / "texts.parquet")
    return tmp_path / "texts.parquet"


@pytest.mark.parametrize("levels", ["auto", "hbp", "2", "3"])
def test_plans_of_levels(capsys, tmp_path, texts_file, levels):
    """Prevents plans with levels that fail the check, and JSON that misreports the levels."""
    out = tmp_path / "plan"
    options = "--lengths", texts_file, "--packing-levels", levels, "-o", out, "--json"
    summary = json.loads(printed(capsys, f"{LONG} --dp 4", *options))
    plan, found = read_plan(out), summary["levels"]
    packs, lengths = read_plan_data(plan, out)
    assert len(found) == len(plan.levels) > 1 and found[-1]["max_tokens"] == 65_536
    assert levels in ("auto", "hbp", str(len(found)))
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
    """Prevents a JSON layout that depends on the number of levels."""
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
    """Prevents a changed plan, byte for byte, if levels cannot help."""
    for levels in ("auto", "1"):
        given = f"{CAPPED} --packing-levels {levels} --lengths"
        run(given, lengths_file, "-o", tmp_path / levels)
    for name in ("plan.json", "packs.parquet"):
        assert (tmp_path / "auto" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_steps_of_levels_for_other_ranks(tmp_path, texts_file):
    """Prevents a run that cannot resume with fewer ranks, or resumes at another sample."""
    run(LONG, "--dp", 8, "--lengths", texts_file, "--packing-levels", 2, "-o", tmp_path / "plan")
    run(f"{LLAMA} --dp 2 --tp 2 --steps-of", tmp_path / "plan", "-o", tmp_path / "fewer")
    first, fewer = (read_plan(tmp_path / name) for name in ("plan", "fewer"))
    assert fewer.data.steps_sha256 == first.data.steps_sha256
    assert [level.caps for level in fewer.levels] == [level.caps for level in first.levels]
    assert max(level.context for level in fewer.levels) <= 2
    run("check", tmp_path / "fewer")


def test_a_curriculum_is_planned(capsys, tmp_path, texts_file):
    """Prevents a curriculum missing from the plan, or longer than the epoch."""
    options = f"{LONG} --dp 4 --lengths {texts_file} --curriculum-steps 3 --packing-levels"
    run(options, 2, "-o", tmp_path / "plan")
    plan = read_plan(tmp_path / "plan")
    packs, _ = read_plan_data(plan, tmp_path / "plan")
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


def test_levels_of_no_packs_do_not_get_into_plans(capsys, tmp_path, monkeypatch):
    """Prevents levels without packs in the saved plan, chosen on packs other than the plan's."""
    lengths = texts([3_000] * 64 + [20_000] * 2)
    write_lengths(lengths, tmp_path / "texts.parquet")
    levels = tuple(Level(caps=Caps.of(tokens=tokens)) for tokens in (4_096, 16_384, 32_768))
    data = SampleData(settings=ISF, lengths=lengths, packs_per_step=4, levels=levels)
    monkeypatch.setattr(
        "omnibal.search.goal_requests.GoalRequests.plan_request",
        lambda requests, *_: PlanRequest(job=requests.goal.job, data=data),
    )
    run(f"{LLAMA} --dp 2 --lengths", tmp_path / "texts.parquet", "-o", tmp_path / "plan")
    assert "the level of 16,384 tokens: it is left out" in capsys.readouterr().err
    plan = read_plan(tmp_path / "plan")
    assert [level.caps["tokens"] for level in plan.levels] == [4_096, 32_768]
    run("check", tmp_path / "plan")


def test_steps_of_one_level_are_shared_where_a_rank_cannot_hold_a_pack(capsys, tmp_path):
    """Prevents a run that cannot resume on smaller devices if ranks could share packs."""
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (f"{CAPPED} --packing-levels 5 --lengths FILE", "auto, hbp, or 1 to"),
        (f"{CAPPED} --packing-levels two --lengths FILE", "auto, hbp, or 1 to"),
        (f"{CAPPED} --packing-levels 4 --lengths FILE", "may have"),
        (f"{CAPPED} --packing-levels 2", "levels are of samples"),
        (f"{CAPPED} --curriculum-steps 2", "levels are of samples"),
        (f"{DIGITS} --gpus 4 --packing-levels 2 --lengths FILE", "may have 1"),
        (f"{CAPPED} --packing-levels 2 --method layer --lengths FILE", "only the joint search"),
    ],
)
def test_levels_that_cannot_be(capsys, tmp_path, lengths_file, options, message):
    """Prevents tracebacks, and options that are silently ignored."""
    command = options.replace("FILE", str(lengths_file))
    assert message in failure(capsys, command, "-o", tmp_path / "plan")

"""Windows of a stream: order kept, ranks balanced, and rules for resuming."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, zip_longest

import numpy as np
import pytest
from cli_cases import PLAN, failure, run
from plan_cases import JOB, example_lengths

from omnibal.base.errors import UserError
from omnibal.data.lengths import Lengths
from omnibal.job.check import check_plan
from omnibal.job.job import JobSpec
from omnibal.job.plan import read_plan, write_plan
from omnibal.job.plan_data import StreamData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.balance_metrics import imbalance, rank_sums
from omnibal.packing.packs import Packs, ScheduledPacks, read_packs, write_packs
from omnibal.packing.steps import steps_of
from omnibal.packing.windows import schedule_windows

pytestmark = pytest.mark.quick

CAPS = Caps.of(tiles=8, tokens=512)
PACK_MS = 3.0
"""Fixed time per pack."""


def random_lengths(count: int, seed: int) -> Lengths:
    rng = np.random.default_rng(seed)
    tiles = np.minimum(rng.geometric(0.4, count) - 1, 8).astype(np.int32)
    tokens = np.minimum(tiles * 20 + rng.geometric(0.02, count), 512).astype(np.int32)
    whole = example_lengths(count=count)
    return replace(whole, items={"tiles": tiles}, tokens=tokens, loss_tokens=tokens // 2)


def window_request(samples: int, ranks: int, stages=1, lockstep_ranks=1, **changes) -> dict:
    parallel = Parallel(pipeline=stages, data=ranks, sharded=lockstep_ranks)
    return {"caps": CAPS, "parallel": parallel, "window": samples} | changes


def load_of(lengths: Lengths, pack_ms: float = PACK_MS):
    """Return a load function: a fixed time per pack, plus tiles, tokens and squared tokens."""
    each = lengths.column("tiles") * 9.0 + lengths.tokens + lengths.tokens.astype(float) ** 2 / 200

    def load(packs: Packs) -> np.ndarray:
        return pack_ms + np.add.reduceat(each[packs.samples], packs.offsets[:-1])

    return load


def pack_lists(packs: ScheduledPacks) -> dict[tuple[int, int], list[list[int]]]:
    """Return packs by (step, rank), in slot order."""
    found: dict[tuple[int, int], list[list[int]]] = {}
    for row in range(len(packs)):
        rank = found.setdefault((int(packs.step[row]), int(packs.dp_rank[row])), [])
        assert packs.slot[row] == len(rank)
        rank.append(packs.packs[row].tolist())
    return found


def apart_ms(held: list[list[float]], stages: int) -> float:
    """Return the busiest rank's time: its packs, plus its longest pack per further stage."""
    return max(sum(one) + (stages - 1) * max(one, default=0.0) for one in held)


def busiest_ms(packs: ScheduledPacks, load, stages: int) -> np.ndarray:
    """Return the busiest rank's time in every step."""
    times = np.zeros(packs.steps)
    for (step, _), held in pack_lists(packs).items():
        rank_ms = apart_ms([load(Packs.from_lists(held)).tolist()], stages)
        times[step] = max(times[step], rank_ms)
    return times


@pytest.mark.parametrize("is_dispatched", [True, False])
@pytest.mark.parametrize(
    ("count", "window", "ranks", "lockstep_ranks"),
    [(97, 24, 4, 1), (60, 7, 6, 1), (40, 40, 1, 1), (97, 24, 4, 4), (60, 7, 6, 2)],
)
def test_every_window_is_a_step_in_order(is_dispatched, count, window, ranks, lockstep_ranks):
    """Prevents samples that change steps, repeat, are lost, or exceed a cap."""
    lengths = random_lengths(count, seed=window)
    request = window_request(
        window, ranks, is_dispatched=is_dispatched, epochs=2, lockstep_ranks=lockstep_ranks
    )
    packs = schedule_windows(lengths, load=load_of(lengths), **request)
    windows = -(-count // window)
    assert packs.steps == 2 * windows
    for step in range(packs.steps):
        held = np.sort(packs.packs.take(np.flatnonzero(packs.step == step)).samples)
        first = step % windows * window
        assert held.tolist() == list(range(first, min(first + window, count)))
    assert (packs.column("tiles") <= 8).all() and (packs.tokens <= 512).all()
    assert (packs.epoch == packs.step // windows).all()
    rows = list(zip(packs.step, packs.dp_rank, packs.slot, strict=True))
    assert rows == sorted(set(rows))
    assert packs.dp_rank.max() < ranks
    if is_dispatched:  # no rank idles in a window with enough samples
        full = packs.step % windows < count // window
        busy = set(zip(packs.step[full], packs.dp_rank[full], strict=True))
        assert len(busy) == 2 * (count // window) * ranks
    pack_lists(packs)


def test_undispatched_windows_are_what_a_plain_loader_makes():
    """Prevents comparing with an order that no plain loader has."""
    lengths = random_lengths(50, seed=1)
    packs = schedule_windows(
        lengths, load=load_of(lengths), **window_request(20, 3, is_dispatched=False)
    )
    expected: dict[tuple[int, int], list[list[int]]] = {}
    sizes = np.array([lengths.column("tiles"), lengths.tokens])
    for step, first in enumerate(range(0, 50, 20)):
        made: list[list[int]] = [[]]
        for sample in range(first, min(first + 20, 50)):
            if (sizes[:, [*made[-1], sample]].sum(axis=1) > [8, 512]).any():
                made.append([])
            made[-1].append(sample)
        for turn, pack in enumerate(made):
            expected.setdefault((step, turn % 3), []).append(pack)
    assert pack_lists(packs) == expected


def partitions(samples: list[int]) -> Iterator[list[list[int]]]:
    """Yield all partitions of samples into packs."""
    if not samples:
        yield []
        return
    first, *rest = samples
    for others in partitions(rest):
        yield [[first], *others]
        for place in range(len(others)):
            yield [*others[:place], [first, *others[place]], *others[place + 1 :]]


def lockstep_ms(held: list[list[float]], stages: int) -> float:
    """Return the time of ranks in lockstep, with empty packs after a rank's last."""
    slots = [max(slot) for slot in zip_longest(*held, fillvalue=PACK_MS)]
    return sum(slots) + (stages - 1) * max(slots)


def fastest_ms(lengths: Lengths, ranks: int, stages: int, step_ms=apart_ms) -> float:
    """Return the minimum step time over all packs on all ranks, heaviest first."""
    best, sizes = np.inf, np.array([lengths.column("tiles"), lengths.tokens])
    for packs in partitions(list(range(len(lengths)))):
        if any((sizes[:, pack].sum(axis=1) > [8, 512]).any() for pack in packs):
            continue
        ms = load_of(lengths)(Packs.from_lists(packs)).tolist()
        for code in range(ranks ** (len(packs) - 1)):
            held: list[list[float]] = [[] for _ in range(ranks)]
            for time_ms in ms:
                held[code % ranks].append(time_ms)
                code //= ranks
            best = min(best, step_ms([sorted(one, reverse=True) for one in held], stages))
    return best


def scheduled_ms(
    lengths: Lengths, ranks: int, lockstep_ranks: int, stages: int, step_ms=apart_ms
) -> float:
    """Return step time of one window with all samples."""
    load = load_of(lengths)
    request = window_request(len(lengths), ranks, stages=stages, lockstep_ranks=lockstep_ranks)
    packs = schedule_windows(lengths, load=load, **request)
    held = [load(Packs.from_lists(one)).tolist() for one in pack_lists(packs).values()]
    return step_ms(held, stages)


@pytest.mark.parametrize("stages", [1, 3])
def test_ranks_in_lockstep_wait_little_for_each_other(stages):
    """Prevents expert-parallel slots that mix small and large packs."""
    over, saved = [], []
    for seed in range(15):
        lengths = random_lengths(6, seed)
        best = fastest_ms(lengths, 2, stages, lockstep_ms)
        over.append(scheduled_ms(lengths, 2, 2, stages, lockstep_ms) / best)
        lengths = random_lengths(80, seed)
        alone, alike = (scheduled_ms(lengths, 4, each, stages, lockstep_ms) for each in (1, 4))
        saved.append(1 - alike / alone)
    assert min(over) > 1 - 1e-9
    assert max(over) < 1.4 and np.mean(over) < 1.1
    assert min(saved) > -1e-9 and np.mean(saved) > 0.03


@pytest.mark.parametrize("stages", [1, 3])
def test_ranks_are_nearly_as_fast_as_by_trying_all_packs(stages):
    """Prevents a balanced dispatch far from the optimum."""
    over = []
    for seed in range(25):
        lengths = random_lengths(6, seed)
        over.append(scheduled_ms(lengths, 2, 1, stages) / fastest_ms(lengths, 2, stages))
    assert min(over) > 1 - 1e-9
    assert max(over) < 1.25 and np.mean(over) < 1.05


@pytest.mark.parametrize("pack_ms", [0.0, PACK_MS])
def test_dispatch_does_not_depend_on_the_unit_of_time(pack_ms):
    """Prevents a hard-coded time that suits one model and cluster."""
    lengths = random_lengths(97, seed=3)
    load = load_of(lengths, pack_ms)
    for lockstep_ranks in (1, 2):
        request = window_request(24, 4, stages=2, lockstep_ranks=lockstep_ranks)
        one, other = (
            schedule_windows(lengths, load=lambda packs, unit=unit: unit * load(packs), **request)
            for unit in (1.0, 2.0**-20)
        )
        assert pack_lists(one) == pack_lists(other)


@pytest.mark.parametrize("stages", [1, 4])
def test_dispatch_is_never_slower_than_the_order_as_read(stages):
    """Prevents a balanced step predicted to be slower than the original order."""
    for seed in range(10):
        lengths = random_lengths(120, seed)
        load = load_of(lengths, pack_ms=100.0)
        times, uneven = [], []
        for is_dispatched in (True, False):
            request = window_request(12, 4, stages=stages, is_dispatched=is_dispatched)
            packs = schedule_windows(lengths, load=load, **request)
            times.append(busiest_ms(packs, load, stages))
            uneven.append(imbalance(rank_sums(packs, load(packs.packs), 4)))
        assert (times[0] <= times[1] * (1 + 1e-9)).all()
        assert 1 <= uneven[0] < uneven[1]


def stream(**changes) -> StreamData:
    fields = {"lengths": example_lengths(), "caps": CAPS, "window": 32, "is_dispatched": True,
              "epochs": 2}  # fmt: skip
    return StreamData(**(fields | changes))


def job(data: int, pipeline: int = 1) -> JobSpec:
    return JobSpec(**(JOB | {"parallel": Parallel(pipeline=pipeline, data=data)}))


def test_hash_is_of_the_samples_of_every_step():
    """Prevents resuming with different samples per step, and refusing to resume if only packs and
    ranks differ."""
    hashes = {
        name: stream(**changes).describe(stream(**changes).schedule(job(ranks))[0], job(ranks))
        for name, (ranks, changes) in {
            "on": (2, {}), "off": (2, {"is_dispatched": False}), "more ranks": (5, {}),
            "window": (2, {"window": 31}), "epochs": (2, {"epochs": 1}),
        }.items()
    }  # fmt: skip
    same = {name for name, data in hashes.items() if data.steps_sha256 == hashes["on"].steps_sha256}
    assert same == {"on", "off", "more ranks"}
    assert len({data.packs_sha256 for data in hashes.values()}) == 5
    # Shuffled steps with equal packs are identified by their packs.
    packs = stream().schedule(job(2))[0]
    assert steps_of(packs).sha256 != steps_of(packs).window_sha256


def test_edited_windows_are_found(tmp_path):
    """Prevents training on a plan with steps that left the stream's order."""
    plan = tmp_path / "plan"
    save_plan(make_plan(PlanRequest(job=job(2), data=stream())), plan)
    assert any("steps are windows of 32 samples" in line for line in check_plan(plan))

    def rewrite(packs: ScheduledPacks, **changes) -> str:
        write_packs(packs, plan / "packs.parquet")
        given = read_plan(plan)
        data = given.data.model_copy(update={"packs_sha256": packs.sha256} | changes)
        write_plan(given.model_copy(update={"data": data, "prediction": None}), plan)
        with pytest.raises(UserError) as raised:
            check_plan(plan)
        return str(raised.value)

    packs, data = read_packs(plan / "packs.parquet"), read_plan(plan).data
    assert "the maximum over steps is" in rewrite(packs, packs_per_step=data.packs_per_step + 1)
    samples = packs.packs.samples.copy()
    sizes = example_lengths().sizes(["tiles", "tokens"])[:, samples]
    # Two samples of equal size, from two windows, trade places.
    one, other = next(
        (a, b)
        for a, b in combinations(range(len(samples) // 2), 2)
        if samples[a] // 32 != samples[b] // 32 and (sizes[:, a] == sizes[:, b]).all()
    )
    samples[[one, other]] = samples[[other, one]]
    moved = replace(packs, packs=Packs(samples=samples, offsets=packs.packs.offsets))
    message = rewrite(moved, packs_per_step=data.packs_per_step)
    assert "has a sample of another window" in message and "32 samples in the order" in message


def test_window_of_the_command_line(capsys, tmp_path, lengths_file):
    """Prevents a window lost in the plan, its steps for other ranks or its report."""
    given = ("--dp", 2, "--lengths", lengths_file, "--window", 40, "--json")
    printed = {}
    for dispatch in ("on", "off"):
        run(PLAN, *given, "--dispatch", dispatch, "-o", tmp_path / dispatch)
        printed[dispatch] = json.loads(capsys.readouterr().out)["window"]
    assert printed["on"]["samples"] == 40 and printed["on"]["dispatch"] == "on"
    assert printed["off"]["imbalance"] == printed["off"]["imbalance_as_read"]
    assert printed["on"]["imbalance_as_read"] == printed["off"]["imbalance"]
    assert printed["on"]["imbalance"] < printed["off"]["imbalance"]
    options = "plan --model internvl-digits --cluster laptop-cpu --dp 5 --steps-of"
    run(options, tmp_path / "off", "-o", tmp_path / "wider")
    plans = {name: read_plan(tmp_path / name).data for name in ("on", "off", "wider")}
    assert len({data.steps_sha256 for data in plans.values()}) == 1
    assert [data.method for data in plans.values()] == ["balanced", "next_fit", "next_fit"]
    assert {data.window for data in plans.values()} == {40}
    run("check", tmp_path / "wider")
    run("report", tmp_path / "on", "-o", tmp_path / "page.html")
    assert "in windows of 40 samples in their order" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{} --window 40 --packing-levels 2", "--packing-levels 2 cannot be given"),
        ("{} --window 40 --seed 1 --packing isf", "--packing isf and --seed 1 cannot"),
        ("{} --window 40 --micro-batches 2", "--micro-batches 2 cannot be given"),
        ("{} --dispatch off", "--dispatch off was given without --window"),
        ("--window 40", "--window 40 was given without --lengths"),
        ("{} --window 2 --dp 4", "give --window 4 or more"),
    ],
)
def test_what_contradicts_windows_is_one_line(capsys, tmp_path, lengths_file, options, expected):
    """Prevents options that are silently overruled."""
    given = options.format(f"--lengths {lengths_file}")
    error = failure(capsys, f"{PLAN} {given} -o {tmp_path / 'plan'}")
    assert expected in error and len(error.splitlines()) == 1
    assert not (tmp_path / "plan").exists()

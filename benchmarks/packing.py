"""Comparison of packing rules on real lengths, and their time at growing sizes.

    python benchmarks/packing.py [LENGTHS ...] [--seeds 3] [--quick]

Prints a table per data set and caps: packs against the proven lower bound, the OmniBal paper's dist
ratios (Eq. 2) and the straggler factor in predicted time, over 8 data-parallel ranks with 1 and
with 8 packs per step. Figures are medians over the seeds. Packs of `isf` (the paper's Algorithm 1)
are shuffled and dealt to the ranks in turn; packs of `balanced` are matched.

LENGTHS default to the published ai2d and docvqa files if present, else to the synthetic mixture.
`--quick` leaves out ten million samples.
"""

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from omnibal.cost.analytic import analytic_cost
from omnibal.cost.setting import CostSetting
from omnibal.data.lengths import Lengths, read_lengths
from omnibal.job.job import JobSpec
from omnibal.model.config import load_cluster, load_model
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.balance_metrics import PackMetrics, measure_packs
from omnibal.packing.features import pack_features
from omnibal.packing.isf import pack_isf
from omnibal.packing.pack_bound import packs_lower_bound
from omnibal.packing.pack_settings import PackSettings
from omnibal.packing.packs import Packs, ScheduledPacks
from omnibal.packing.steps import deal_steps, draw_steps
from omnibal.pipeline.stage_cost import model_ms
from omnibal.search.cap_search import search_caps
from omnibal.search.strategy import FreeSizes, StrategyRequest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tools.make_lengths import make_lengths  # noqa: E402

RANKS = 8
MICRO_BATCHES = (1, 8)
MODEL = load_model("internvl-chat-1.5-6b-20b")
CLUSTER = load_cluster("a100-80g")
COST = analytic_cost(CostSetting(MODEL, CLUSTER, Parallel(pipeline=1, data=RANKS), "bf16"))
PUBLISHED = REPOSITORY.parent / "shared" / "data" / "lengths"
SIZES = (126_782, 1_267_819, 10_000_000)

# (lengths, caps, micro-batches per rank and step, seed) -> (full steps over `RANKS` ranks, number
# of packs including an incomplete step).
Schedule = Callable[[Lengths, Caps, int, int], tuple[ScheduledPacks, int]]


def pack_ms(packs: Packs, lengths: Lengths) -> np.ndarray:
    """Return the predicted time of every pack. [packs]"""
    return model_ms(COST, MODEL, pack_features(packs, lengths, COST.features))


def schedule_balanced(
    lengths: Lengths, caps: Caps, micro_batches: int, seed: int
) -> tuple[ScheduledPacks, int]:
    """Pack by `balanced` and match packs into steps."""
    settings, levels = PackSettings(seed=seed), [Level(caps=caps)]

    def load(packs: Packs) -> np.ndarray:
        return pack_ms(packs, lengths)

    steps = draw_steps(
        lengths, settings, levels, load, packs_per_step=RANKS * micro_batches, packs_per_row=RANKS
    )
    scheduled = deal_steps(steps, lengths, load, RANKS, levels)
    return scheduled, len(scheduled)


def schedule_isf(
    lengths: Lengths, caps: Caps, micro_batches: int, seed: int
) -> tuple[ScheduledPacks, int]:
    """Pack by ISF, shuffle, and deal packs to ranks in turn."""
    packs = pack_isf(lengths, caps, seed)
    order = np.random.default_rng(seed).permutation(len(packs))
    per_step = RANKS * micro_batches
    place = np.arange(len(packs) // per_step * per_step)  # without the incomplete step
    step, rank = place // per_step, place % RANKS
    slot = place % per_step // RANKS
    scheduled = ScheduledPacks.from_packs(packs.take(order[place]), lengths, step, rank, slot)
    return scheduled, len(packs)


RULES: dict[str, Schedule] = {"balanced": schedule_balanced, "isf": schedule_isf}


def compare(name: str, lengths: Lengths, caps: Caps, seeds: int, console: Console) -> None:
    """Print a table of all rules on a data set."""
    start = time.perf_counter()
    bound = packs_lower_bound(lengths, caps)
    seconds = time.perf_counter() - start
    table = Table(
        title=f"{name}: {len(lengths):,} samples at {caps['tiles']} tiles / {caps['tokens']} "
        f"tokens; at least {bound:,} packs (proven in {seconds:.1f} s)",
        title_justify="left",
    )
    for column in ("rule", "packs", "/ bound", "dist vision", "dist language", "straggler"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule, schedule in RULES.items():
        medians = [rule_medians(schedule, lengths, caps, bound, m, seeds) for m in MICRO_BATCHES]
        table.add_row(
            rule,
            f"{medians[0]['packs']:,.0f}",
            f"{medians[0]['packs'] / bound:.4f}",
            *(
                "  ".join(f"{figures[key]:.4f}" for figures in medians)
                for key in ("dist_ratio_vision", "dist_ratio_language", "straggler_factor")
            ),
        )
    console.print(table)


def rule_medians(
    schedule: Schedule, lengths: Lengths, caps: Caps, bound: int, micro_batches: int, seeds: int
) -> dict[str, float]:
    """Return figures of a rule, each the median over the seeds."""
    runs: list[PackMetrics] = []
    for seed in range(seeds):
        scheduled, packs = schedule(lengths, caps, micro_batches, seed)
        load = pack_ms(scheduled.packs, lengths)
        metrics = measure_packs(scheduled, lengths, [Level(caps=caps)], RANKS, load, bound)
        runs.append(replace(metrics, packs=packs))
    names = ("packs", "dist_ratio_vision", "dist_ratio_language", "straggler_factor")
    return {name: statistics.median(run.as_dict()[name] for run in runs) for name in names}


def searched_caps(lengths: Lengths) -> Caps:
    """Return the caps of `omnibal caps` for `MODEL` on A100s, PP 8 x DP 8, 32 micro-batches."""
    parallel = Parallel(pipeline=8, data=RANKS)
    job = JobSpec(model=MODEL, cluster=CLUSTER, parallel=parallel, precision="bf16")
    request = StrategyRequest(
        job=job,
        sizes=FreeSizes(gpus=parallel.world_size),
        layouts=(parallel,),
        lengths=lengths,
        samples_per_step=round(4.5 * 32 * RANKS),  # 4.5 samples per pack
        samples=20_000,
    )
    return search_caps(request, "time", lambda done: None).best


def time_packing(samples: int) -> tuple[float, float, int]:
    """Return seconds, peak GiB of the process, and packs of an epoch at 9 tiles, 4,096 tokens."""
    lengths = make_lengths("internvl", samples, seed=0)
    start = time.perf_counter()
    _, packs = schedule_balanced(lengths, Caps.of(tiles=9, tokens=4096), MICRO_BATCHES[-1], seed=0)
    seconds = time.perf_counter() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, packs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lengths", type=Path, nargs="*", help="length files, packed together")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="leave out the largest size")
    arguments = parser.parse_args()
    console = Console(width=110)
    paths = arguments.lengths or sorted(PUBLISHED.glob("*.json"))
    lengths, name = make_lengths("internvl", 22_624, seed=0), "synthetic mixture"
    if paths:
        lengths, name = read_lengths(paths), " + ".join(path.stem for path in paths)
    console.print(f"{RANKS} ranks; dist ratios and straggler: 1 and 8 packs of a rank in a step")
    for caps in (Caps.of(tiles=15, tokens=4096), Caps.of(tiles=9, tokens=4096)):
        compare(name, lengths, caps, arguments.seeds, console)
    compare(f"{name}, own caps", lengths, searched_caps(lengths), arguments.seeds, console)
    for samples in SIZES[: 2 if arguments.quick else 3]:
        # In a process of its own: peak memory is of the process.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            seconds, gib, packs = pool.submit(time_packing, samples).result()
        console.print(
            f"{samples:>10,} samples (synthetic): {packs:,} packs matched into steps in "
            f"{seconds:.1f} s, {seconds / samples * 1e6:.2f} s per million, peak {gib:.2f} GiB"
        )


if __name__ == "__main__":
    main()

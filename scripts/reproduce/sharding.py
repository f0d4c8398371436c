"""Where each way to hold weights wins: whole on every rank, or divided over ranks; simulated.

    python scripts/reproduce/sharding.py --models internvl3.5-8b --gpus 8 64

Every job is planned twice with all else free, in steps of 16 samples a GPU: with weights whole, and
with weights that all data-parallel ranks or those of a node divide. Lengths are made: lognormal
texts, short or with a long tail, and tiles or images in most samples. Costs are counted at the
fitted rates of the preset `h100-80g`; nothing here was measured.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "benchmarks")]
from goals import LONG, SHORT, Job, rate  # noqa: E402

from omnibal import Free, Goal, Planned, Samples, plan, training_job  # noqa: E402
from omnibal.base.errors import UserError  # noqa: E402
from omnibal.job.job import JobSpec  # noqa: E402
from omnibal.model.parallel import WeightSharding  # noqa: E402
from omnibal.search.level_estimates import ANY_LEVELS, LevelRule  # noqa: E402

CLUSTER = "h100-80g"
ITEMS = {
    "internvl3.5-8b": "tiles",
    "internvl3.5-38b": "tiles",
    "internvl3.5-241b-a28b": "tiles",
    "qwen3-vl-32b": "image_tokens",
}
"""Models, and the feature of their encoder's items."""
GPUS = (8, 64, 512)
TAILS = {"short": SHORT, "long": LONG}
SAMPLES_OF_GPU = 16
WAYS = {
    "replicated": (WeightSharding.REPLICATED,),
    "sharded": (WeightSharding.FULL, WeightSharding.HYBRID),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=ITEMS, default=list(ITEMS))
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument("--lengths", nargs="+", choices=TAILS, default=list(TAILS))
    parser.add_argument("--levels", action="store_true", help="search for packs of several sizes")
    given = parser.parse_args()
    levels = ANY_LEVELS if given.levels else LevelRule(count=1)
    print(f"{training_job(next(iter(ITEMS)), CLUSTER).cost.source}, simulated")
    for model in given.models:
        for gpus in given.gpus:
            for tail in given.lengths:
                print(row(model, gpus, tail, levels), flush=True)


def row(model: str, gpus: int, tail: str, levels: LevelRule) -> str:
    """A job's best plan of each way, and how much faster dividing weights is."""
    named = Job(
        name=model, model=model, cluster=CLUSTER, gpus=gpus, tail=TAILS[tail], items=ITEMS[model]
    )
    job, start = training_job(model, CLUSTER), time.process_time()
    texts, rates = list[str](), list[float]()
    for name, ways in WAYS.items():
        found = planned(named, job, ways, levels)
        rates.append(0.0 if found is None else rate(found))
        words = "no plan fits" if found is None else described(found)
        texts.append(f"{name} {rates[-1]:,.2f}/s ({words})")
    whole, sharded = rates
    gain = f"{sharded / whole - 1:+.1%}" if whole and sharded else "-"
    seconds = time.process_time() - start
    return f"{model:<22} {gpus:>4} {tail:<6} {'; '.join(texts)}; {gain}  [{seconds:.0f} s]"


def planned(
    named: Job, job: JobSpec, ways: tuple[WeightSharding, ...], levels: LevelRule
) -> Planned | None:
    """The best plan of some ways to hold weights; None where there is none."""
    free = replace(Free.everything(named.gpus), shardings=ways, levels=levels)
    data = Samples(lengths=named.lengths(), samples_per_step=SAMPLES_OF_GPU * named.gpus)
    try:
        return plan(Goal(job=job, data=data, free=free))
    except UserError as error:
        print(f"  {error}", file=sys.stderr)
        return None


def described(found: Planned) -> str:
    """Sizes and placement of a plan, and the most that its step loses."""
    lost = {name: ms for name, ms in found.prediction.lost.named().items() if name != "ideal"}
    worst = max(lost, key=lambda name: lost[name])
    share = lost[worst] / found.prediction.step_ms
    sizes = found.result.plan.parallel.text
    return f"{sizes}, encoders {found.placement.chosen.option}, {worst} {share:.0%}"


if __name__ == "__main__":
    main()

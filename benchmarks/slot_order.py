"""What the order of micro-batches within a step saves, of made jobs at several sizes.

    python benchmarks/slot_order.py

Packs of two of the jobs of `benchmarks/goals.py` are dealt to ranks, and then every rank's
micro-batches of a step are put in the order that is found best on the planned stages. Printed are
the mean step as dealt and as ordered, and the search's time on one core. Steps are simulated, with
costs counted at the clusters' rates.
"""

import argparse
import time

import numpy as np
from goals import JOBS

from omnibal import training_job
from omnibal.base.errors import UserError
from omnibal.job.plan_data import SampleData
from omnibal.job.planner import PlanRequest, make_ordered_plan, make_plan
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.pipeline.prediction import Prediction
from omnibal.steps.pack_settings import PackSettings

NAMES = ("InternVL 26B, 64", "Qwen3-VL 32B, 64")
SIZES = ((4, 4), (2, 8))
"""Tensor and pipeline sizes."""
DATA_PARALLEL = 4
MAX_TOKENS = 10_240
TOKENS_PER_TILE = 640
MICRO_BATCHES = (8, 16, 32)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name in NAMES:
        for tensor, pipeline in SIZES:
            for micro_batches in MICRO_BATCHES:
                print(row(name, tensor, pipeline, micro_batches), flush=True)


def row(name: str, tensor: int, pipeline: int, micro_batches: int) -> str:
    """A job's steps as dealt and as ordered."""
    made = next(job for job in JOBS if job.name == name)
    lengths = made.lengths()
    kept = np.flatnonzero(lengths.tokens <= MAX_TOKENS)
    items = MAX_TOKENS if made.items == "image_tokens" else MAX_TOKENS // TOKENS_PER_TILE
    parallel = Parallel(
        pipeline=pipeline, tensor=tensor, data=DATA_PARALLEL, sequence_parallel=True
    )
    request = PlanRequest(
        job=training_job(made.model, made.cluster, parallel=parallel),
        data=SampleData(
            lengths=lengths.take(kept),
            levels=(Level(caps=Caps.of(**{made.items or "": items}, tokens=MAX_TOKENS)),),
            settings=PackSettings(),
            packs_per_step=micro_batches * DATA_PARALLEL,
        ),
    )
    where = f"{name:<18} TP {tensor} PP {pipeline} DP {DATA_PARALLEL}, {micro_batches:>2} of a rank"
    try:
        start = time.process_time()
        dealt = make_plan(request).plan.prediction
        middle = time.process_time()
        ordered = make_ordered_plan(request).plan.prediction
        seconds = time.process_time() - middle - (middle - start)
    except UserError as error:
        return f"{where}: {error}"
    assert isinstance(dealt, Prediction) and isinstance(ordered, Prediction)
    gain = 1 - ordered.step_ms / dealt.step_ms
    return (
        f"{where}: {dealt.step_ms:,.0f} ms as dealt, {ordered.step_ms:,.0f} ms ordered "
        f"({gain:.1%} less), bubble {dealt.bubble_fraction:.1%} and "
        f"{ordered.bubble_fraction:.1%}  [{max(seconds, 0):.1f} s]"
    )


if __name__ == "__main__":
    main()

"""The Chrome trace against the simulation that it shows."""

import json

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model

from omnibal.pipeline.simulate import simulate_run
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload
from omnibal.report.trace import chrome_trace

pytestmark = pytest.mark.quick

MODEL = small_model(3, 3)
STAGES = stages_from_cuts(MODEL, (3, 7), [(1, 0), (0, 0), (0, 1)])


def example() -> Workload:
    """Two steps of two ranks; the second rank has fewer micro-batches, in the second step none."""
    rows = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 0, 0), (1, 0, 1)]
    step, rank, slot = np.array(rows).T
    features = random_features(np.random.default_rng(1), len(rows))
    return Workload(features=features, step=step, dp_rank=rank, slot=slot, data_parallel_size=2)


def test_every_block_is_there_and_none_overlaps():
    """Prevents lost micro-batches, and blocks of a stage on top of each other."""
    cost, workload = random_cost(np.random.default_rng(0)), example()
    for step, counts in ((0, (3, 1)), (1, (2, 0))):
        trace = json.loads(json.dumps(chrome_trace(cost, [STAGES], workload, step)))
        blocks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        for rank, count in enumerate(counts):
            for stage in range(3):
                own = [b for b in blocks if (b["pid"], b["tid"]) == (rank, stage)]
                names = [f"{kind} {i}" for kind in ("forward", "backward") for i in range(count)]
                assert sorted(b["name"] for b in own) == sorted(names)
                own.sort(key=lambda b: b["ts"])
                ends = [b["ts"] + b["dur"] for b in own]
                assert all(end <= b["ts"] + 1e-6 for end, b in zip(ends, own[1:], strict=False))
        names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
        assert names.count("data-parallel rank 1") == 1
        assert names.count("stage 2") == 2


def test_the_trace_is_as_long_as_the_slowest_pipeline():
    """Prevents milliseconds in place of microseconds, and another step than the one asked for."""
    cost, workload = random_cost(np.random.default_rng(0)), example()
    alone = simulate_run(cost, STAGES, workload)
    for step in (0, 1):
        events = chrome_trace(cost, [STAGES], workload, step)["traceEvents"]
        blocks = [event for event in events if "ts" in event]
        last_ms = max(block["ts"] + block["dur"] for block in blocks) / 1e3
        # The rest of a step is reduction and update.
        assert 0.8 * alone.step_ms[step] < last_ms < alone.step_ms[step]


def test_ranks_that_share_a_micro_batch_run_it_at_the_same_time():
    """Prevents a trace of ranks that do not wait for each other, though they exchange."""
    rng, (rank, slot) = np.random.default_rng(3), np.divmod(np.arange(8), 2)
    cost = random_cost(rng)
    workload = Workload(
        features=random_features(rng, 8), step=0 * rank, dp_rank=rank, slot=slot,
        data_parallel_size=4, context=np.where(slot == 1, 2, 1),
    )  # fmt: skip
    events = chrome_trace(cost, [STAGES], workload, 0)["traceEvents"]
    begun = {(e["name"], e["tid"], e["pid"]): (e["ts"], e["dur"]) for e in events if "ts" in e}
    for name, stage, number in begun:
        pair = begun[name, stage, number], begun[name, stage, number ^ 1]
        assert (pair[0] == pytest.approx(pair[1], abs=1e-6)) == name.endswith("1"), name

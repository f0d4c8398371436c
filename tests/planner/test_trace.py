"""The Chrome trace against the simulation that it shows."""

import json
from itertools import pairwise

import numpy as np
import pytest
from cost_cases import random_cost, random_features, small_model
from schedule_cases import workload_of

from omnibal.cli.trace import chrome_trace
from omnibal.pipeline.simulate import simulate_levels
from omnibal.pipeline.unit_runs import stages_from_cuts
from omnibal.pipeline.workload import Workload

pytestmark = pytest.mark.quick

MODEL = small_model(3, 3)
STAGES = stages_from_cuts(MODEL, (3, 7), [(1, 0), (0, 0), (0, 1)])


def example() -> Workload:
    """Return two steps of two ranks; the second rank has fewer micro-batches, none in step two."""
    return workload_of([[3, 1], [2, 0]], random_features(np.random.default_rng(1), 6))


def test_every_block_is_there_and_none_overlaps():
    """Prevents lost micro-batches, overlapping blocks, and a wrong time unit."""
    cost, workload = random_cost(np.random.default_rng(0)), example()
    step_ms = simulate_levels(cost, [STAGES], workload).step_ms
    for step, counts in ((0, (3, 1)), (1, (2, 0))):
        trace = json.loads(json.dumps(chrome_trace(cost, [STAGES], workload, step)))
        blocks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        # The rest of a step is reduction and update.
        assert 0.8 < max(one["ts"] + one["dur"] for one in blocks) / 1e3 / step_ms[step] < 1
        for rank, count in enumerate(counts):
            for stage in range(3):
                own = [b for b in blocks if (b["pid"], b["tid"]) == (rank, stage)]
                names = [f"{kind} {i}" for kind in ("forward", "backward") for i in range(count)]
                assert sorted(b["name"] for b in own) == sorted(names)
                own.sort(key=lambda b: b["ts"])
                assert all(b["ts"] + b["dur"] <= after["ts"] + 1e-6 for b, after in pairwise(own))
        names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
        assert names.count("data-parallel rank 1") == 1
        assert names.count("stage 2") == 2


def test_ranks_that_share_a_micro_batch_run_it_at_the_same_time():
    """Prevents a trace where ranks that share a micro-batch run it at different times."""
    rng = np.random.default_rng(3)
    cost, features = random_cost(rng), random_features(rng, 8)
    workload = workload_of([[2] * 4], features, context=np.tile([1, 2], 4))
    events = chrome_trace(cost, [STAGES], workload, 0)["traceEvents"]
    begun = {(e["name"], e["tid"], e["pid"]): (e["ts"], e["dur"]) for e in events if "ts" in e}
    for name, stage, number in begun:
        pair = begun[name, stage, number], begun[name, stage, number ^ 1]
        assert (pair[0] == pytest.approx(pair[1], abs=1e-6)) == name.endswith("1"), name

"""The simulated MFU of benchmarks/mfu.py, beside one that is written out."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import mfu

from megatron.vlm.run.pretrain import pack_flops
from omnibal.cost.analytic import model_flops
from omnibal.cost.model import pack_features
from omnibal.data.lengths import Lengths
from omnibal.job.check import open_plan
from omnibal.job.fake_replay import FakeStage, OperationCount, Roofline
from omnibal.job.job import JobSpec
from omnibal.job.plan_data import MockData
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanRequest, make_plan
from omnibal.model.config import load_cluster, load_model
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel
from omnibal.packing.packs import Packs
from omnibal.pipeline.stage_cost import per_step_costs

MICRO_BATCHES = 3
RATES = Roofline(
    name="r", matrix_tflop_per_s=500, attention_tflop_per_s=250,
    attention_backward_tflop_per_s=125, memory_gb_per_s=1000,
)  # fmt: skip


def counted(phase: str, kind: str, tflop: float, gigabytes: float) -> OperationCount:
    return OperationCount(
        phase=phase, operation=kind, kind=kind, kernels=9, tflop=tflop, gigabytes=gigabytes
    )


def test_utilization_of_one_stage_is_needed_operations_over_its_time(tmp_path: Path):
    """Prevents: operations of another number of micro-batches, and phases at each other's rates."""
    job = JobSpec(
        model=load_model("internvl-digits"), cluster=load_cluster("h100-80g"),
        parallel=Parallel(pipeline=1), precision="bf16",
    )  # fmt: skip
    data = MockData(caps=Caps.of(tiles=8, tokens=256), micro_batches_per_step=MICRO_BATCHES)
    save_plan(make_plan(PlanRequest(job=job, data=data)), tmp_path / "plan")
    files = open_plan(tmp_path / "plan")
    stage = FakeStage(
        stage=0, predicted_gib=1, allocated_gib=1, state_gib=1, activations_gib=0,
        peak_phase="backward", peak_at="", rows=(0, 1), micro_batches=2, kernels=1, tflop=1,
        gigabytes=1, contents=(), host_reads=(), unaligned=(),
        operations=(
            counted("forward", "matrix product", 100, 1), counted("forward", "attention", 50, 1),
            counted("backward", "element-wise", 0, 400),
            counted("optimizer", "element-wise", 0, 99),
        ),
    )  # fmt: skip
    found = mfu.utilization(files, [stage], RATES)
    # Of two micro-batches: 200 ms each of both in forward, 400 ms in backward.
    update_ms = float(per_step_costs(files.job.cost, files.plan.stages).update_ms[0])
    expected_ms = MICRO_BATCHES * (200 + 200 + 400) / 2 + update_ms
    assert found.step_ms == pytest.approx(expected_ms)
    packs, lengths = files.steps
    features = pack_features(packs.packs, lengths, files.job.cost.features)[packs.step == 0]
    flops = (features @ model_flops(files.plan.model, files.plan.cluster, ())).sum()
    assert found.mfu == pytest.approx(flops / (1e-3 * expected_ms * 989e12))
    assert found.element_wise == pytest.approx(0.5)


def test_packs_need_as_much_wherever_encoders_run():
    """Prevents: a run with data-parallel encoders that ends before its first step, or whose
    utilization leaves their operations out."""
    lengths = Lengths(
        items={"tiles": np.array([0, 3, 1], np.int32)},
        tokens=np.array([20, 90, 40], np.int32),
        loss_tokens=np.array([5, 9, 4], np.int32),
        source=np.zeros(3, np.int32),
        source_names=("made up",),
        origin=None,
    )
    packs = Packs.from_lists([[0, 1], [2]])
    job = JobSpec(
        model=load_model("internvl-digits"), cluster=load_cluster("laptop-cpu"),
        parallel=Parallel(pipeline=2, data=2), precision="fp32",
    )  # fmt: skip
    beside = replace(job, placement=EncoderPlacement.DATA_PARALLEL)
    np.testing.assert_array_equal(
        pack_flops(beside, packs, lengths), pack_flops(job, packs, lengths)
    )
    assert pack_flops(beside, packs, lengths)[0] > pack_flops(beside, packs, lengths)[1] > 0

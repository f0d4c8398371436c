"""Checks on a fake device: python tests/training/fake_device_cases.py NAME.

Each runs in its own process, as Megatron-core is prepared for one device only. Shapes: T tokens, N
heads, D head size.
"""

import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import cuda_checks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kept_cases import units_kept
from length_cases import lengths_of
from pipeline_cases import pipeline_plan
from torch.nn.attention.varlen import varlen_attn
from toy import OPTIONS

from megatron.vlm.checkpoint import save_load
from megatron.vlm.measure.fake_device import fake_stage
from megatron.vlm.measure.fake_device.encoding import HeaviestEncoding
from megatron.vlm.measure.fake_device.fake_stage import run_fake_stage
from megatron.vlm.measure.fake_device.mode import fake_cuda
from megatron.vlm.measure.stage_replay import (
    StageReplayer,
    act_as_stage,
    random_rows,
    state_bytes_of,
)
from megatron.vlm.model.groups import create_shard_groups
from megatron.vlm.model.initialize import first_values
from megatron.vlm.model.sharded_units import divide_weights
from megatron.vlm.model.sharded_weights import without_matrices
from megatron.vlm.model.stage import VLMStage, build_stage
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import Trainer, build_trainer
from omnibal.data.lengths import Lengths
from omnibal.job.fake_replay import FakeStage, heaviest_windows
from omnibal.job.job import JobSpec
from omnibal.job.plan import Plan, PlannedLevel
from omnibal.job.plan_data import MockData, SampleData
from omnibal.job.planner import PlanRequest, make_plan, predict_plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import ModelConfig, load_cluster, load_model, with_imbalance
from omnibal.model.data_parallel_encoders import EncoderPlacement
from omnibal.model.levels import Level
from omnibal.model.limits import Caps
from omnibal.model.parallel import Parallel, expert_counts
from omnibal.packing.packs import ScheduledPacks
from omnibal.pipeline.baselines import JOINT, PartitionMethod, RecomputeRule, SplitRule
from omnibal.pipeline.schedules import ONE_FORWARD_ONE_BACKWARD, PipelineSchedule
from omnibal.pipeline.stage_memory import stage_memories
from omnibal.pipeline.stage_units import Stage, merge_spans
from omnibal.pipeline.unit_runs import stages_from_cuts, unit_spans

Planned = tuple[Plan, tuple[ScheduledPacks, Lengths]]

CLUSTER = load_cluster("h100-80g")
MIB = 1 << 20
MOST_DEVIATION = 0.001
"""Maximal relative deviation of predicted from allocated peaks."""
MOST_OF_ADAPTERS = 0.005
"""Bound with adapters: the first adapted layer saves no input, much in two-layer models."""
MOST_OF_SCHEDULES = 0.005
"""Bound for schedules other than 1F1B, which hold a link buffer throughout."""
UNCOUNTED_GIB = 1 / 64
"""Added bound for native resolution: patch angles, fp32 pixels during a forward, and gradients of
deepstack features, large in two-layer stages."""
MOST_TOO_MUCH = 0.1
"""Bound of overestimates: in sharded pipeline stages, the next layer's gradients are counted with
each layer, including a stage's last layer."""


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def memory() -> None:
    """Bytes of allocated tensors, counted by hand."""
    with fake_cuda() as fake_device:
        now, most = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        assert now() == 0
        one, empty = on_device(100, dtype=torch.float32), on_device(0)
        view = one[10:]
        assert now() == 512, "a block for 400 bytes: neither a view nor nothing has memory"
        other = on_device(1025, dtype=torch.uint8)
        del one
        assert now() == 512 + 1536, "the view still holds it"
        del view, other, empty
        assert (now(), most()) == (0, 2048)
        whole = on_device(400)
        part = whole[:100]
        whole.untyped_storage().resize_(0)
        assert now() == 0, "its memory is gone, under two tensors that are there"
        torch.cuda.reset_peak_memory_stats()
        whole.untyped_storage().resize_(1025)
        assert now() == most() == 1536
        del whole, part
        torch.cuda.reset_peak_memory_stats()
        assert now() == most() == 0
        # A product and a norm: saved and temporary tensors.
        x_TD = on_device(1024, 512).requires_grad_()  # 1 MiB
        weight = on_device(512, 512).requires_grad_()  # half
        y_TD = F.linear(x_TD, weight)
        assert now() == 2.5 * MIB
        normed_TD = F.rms_norm(y_TD, (512,), on_device(512), 1e-6)
        assert now() == 3.5 * MIB + 1024 + 4 * 1024, "its output, weight and a number a row"
        watch = fake_device.memory
        watch.watch()
        normed_TD.backward(torch.empty_like(normed_TD))
        # Input, weight and both results, and gradients of input and weight.
        assert now() == 5 * MIB, now()
        assert sum(size for _, size in watch.contents().values()) == watch.highest_bytes
    assert not torch.cuda.is_available(), "the calls are taken back"


def attention() -> None:
    """Attention saves inputs, output and a number per row. Its backward needs an fp32 gradient."""
    with fake_cuda() as fake_device:
        qkv = [on_device(1024, 8, 64).requires_grad_() for _ in range(3)]  # 1 MiB each
        borders = torch.tensor([0, 512, 1024], dtype=torch.int32).to("cuda")
        before = torch.cuda.memory_allocated()
        out = varlen_attn(*qkv, borders, borders, 512, 512, window_size=(-1, 0))
        kept = torch.cuda.memory_allocated() - before
        assert kept == MIB + 4 * 8 * 1024 + 512, kept
        fake_device.memory.watch()
        gradient = torch.empty_like(out)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out.backward(gradient)
        rows = 8 * (1024 + 2 * 128)
        most = torch.cuda.max_memory_allocated() - before
        # Unused outputs have gradients too: zeros.
        assert most == 3 * MIB + rows * (64 + 1) * 4 + 4 * 8 * 1024 + 512, most
        heads = torch.ops.aten.scaled_dot_product_attention
        vision = [on_device(2, 4, 64, 128).requires_grad_() for _ in range(3)]
        before = torch.cuda.memory_allocated()
        out = heads(*vision)
        assert torch.cuda.memory_allocated() - before <= 2 * 4 * 64 * (128 * 2 + 4) + 4 * 512
        heads(vision[0], vision[1][:, :2], vision[2][:, :2], is_causal=True, enable_gqa=True)
        [flash] = [
            one
            for one in fake_device.counts.operations()
            if one.operation == "aten::_scaled_dot_product_flash_attention"
        ]
        # Two products over all pairs, or half if causal, with grouped queries too.
        pairs = 2 * 4 * 64 * 64
        assert round(flash.tflop * 1e12) == round(1.5 * 2 * 2 * pairs * 128), flash


def refusals() -> None:
    """Errors of a real device that fake tensors do not raise."""
    with fake_cuda():
        host = torch.empty(8, 8, dtype=torch.bfloat16)
        borders = torch.tensor([0, 8], dtype=torch.int64).to("cuda")
        summed, pair = on_device(8, 8, dtype=torch.float32), (on_device(8, 8), on_device(8, 8))
        # A sum in the requested dtype.
        torch.addmm(summed, *pair, out_dtype=torch.float32, out=summed)
        cases = {
            "a matrix product": lambda: torch.addmm(summed, *pair),
            "one type": lambda: torch.mm(pair[0], summed),
            "on the device": lambda: torch.mm(pair[0], host),
            "devices": lambda: pair[0] + host,
            "contiguous": lambda: F.scaled_dot_product_attention(
                *(on_device(1, 1, 64, 8).transpose(2, 3) for _ in range(3))
            ),
            "int32": lambda: varlen_attn(
                *(on_device(8, 2, 64) for _ in range(3)), borders, borders, 8, 8
            ),
        }
        for words, wrong in cases.items():
            with pytest.raises(RuntimeError, match=words):
                wrong()


def host_reads() -> None:
    """Device values that the host waits for, by code position. Host tensors do not count."""
    with fake_cuda() as fake_device:
        host_reads, tensor = fake_device.counts.host_reads, on_device(4)
        torch.tensor([1, 2, 3]).tolist()
        assert not host_reads()
        tensor.sum().item()
        tensor.cpu()
        torch.tensor([tensor[0], tensor[1]])
        reads = host_reads()
        assert sum(read.count for read in reads) == 4, reads
        assert all("fake_device_cases.py" in read.where for read in reads), reads


def counts() -> None:
    """Launches, FLOPs and bytes of operations, counted by hand."""
    with fake_cuda() as fake_device:
        counts = fake_device.counts
        left, right = on_device(64, 32), on_device(32, 16)
        left.view(-1)
        assert not counts.operations()
        product = left @ right
        product.zero_()
        product + product
        torch.mm(on_device(8, 30), on_device(30, 8))
        counted = {one.operation: one for one in counts.operations()}
        moved_bytes = {
            "aten::mm": 2 * (64 * 32 + 32 * 16 + 64 * 16) + 2 * (2 * 8 * 30 + 64),
            "aten::zero_": 2 * 64 * 16,
            "aten::add": 3 * 2 * 64 * 16,
        }
        assert {name: round(one.gigabytes * 1e9) for name, one in counted.items()} == moved_bytes
        product = counted["aten::mm"]
        flop = 2 * 64 * 32 * 16 + 2 * 8 * 30 * 8
        assert (product.kernels, round(product.tflop * 1e12)) == (2, flop)
        [odd] = counts.unaligned_products()
        assert odd.sizes == (8, 30, 8) and 30 in odd.leading_dimensions


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """A preset with few layers, and its parallel layout."""

    model: str
    tensor: int = 1
    sequence: bool = False
    vision: int = 2
    language: int = 2
    deepstack: tuple[int, ...] = (0,)
    """Vision layers with deepstack, in models with deepstack."""
    frozen: tuple[str, ...] = ()
    adapters: AdapterConfig | None = None
    recompute: RecomputeRule = RecomputeRule.NONE
    tied: bool = False
    stages: int = 1
    data: int = 1
    sharded: int = 1
    expert: int = 1
    schedule: PipelineSchedule = ONE_FORWARD_ONE_BACKWARD
    """With schedules other than 1F1B, parts have equal numbers of units."""
    edited: bool = False
    """Whether to recompute just each tower's last layer in a stage."""
    kept: int | None = None
    """Items with saved activations in data-parallel encoders, or None if pipelined."""
    encoder_sharded: int = 1


SOME_ADAPTERS = AdapterConfig(rank=8, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
EVERYWHERE = AdapterConfig(rank=16, alpha=32, parts=("vision", "projector", "language"))
INTERLEAVED = PipelineSchedule(name="interleaved", chunks=2)
ZB_H1, ZB_V = PipelineSchedule(name="zb-h1"), PipelineSchedule(name="zb-v", chunks=2)
LAYOUTS = (
    Layout(model="internvl2.5-1b", tied=True, stages=2),
    Layout(model="internvl-chat-1.5-6b-20b", tensor=2, sequence=True, stages=2, edited=True),
    Layout(model="internvl2.5-8b", frozen=("vision", "language"), stages=2),
    Layout(model="qwen2.5-32b", tensor=4, vision=0, recompute=RecomputeRule.FULL),
    Layout(
        model="internvl-chat-1.5-6b-20b", tensor=2, sequence=True, recompute=RecomputeRule.FULL,
        data=4, sharded=2,
    ),
    Layout(model="internvl2.5-1b", tied=True, stages=2, data=4, sharded=2),
    # Expert-parallel, replicated and pipelined experts.
    Layout(model="internvl3.5-30b-a3b", data=4, sharded=4, expert=2, frozen=("vision",)),
    Layout(model="internvl3.5-30b-a3b", data=8, sharded=2, expert=4),
    Layout(
        model="qwen3-vl-30b-a3b", tensor=4, sequence=True, language=4, stages=2, data=4, expert=4
    ),
    Layout(model="qwen3-vl-8b", tensor=4, sequence=True, edited=True),
    Layout(model="qwen3-vl-4b", data=4, sharded=4, recompute=RecomputeRule.FULL),
    Layout(model="qwen2.5-vl-7b", tensor=2),
    # Several chunks, and split backwards.
    Layout(model="internvl2.5-8b", vision=4, language=4, stages=2, schedule=INTERLEAVED),
    Layout(model="internvl2.5-8b", vision=4, language=4, stages=2, schedule=ZB_V),
    Layout(model="internvl2.5-8b", vision=4, language=4, stages=2, schedule=ZB_H1, edited=True),
    # Adapters.
    Layout(
        model="internvl3-8b", frozen=("vision", "projector"), adapters=SOME_ADAPTERS, tensor=2,
        sequence=True, stages=2, recompute=RecomputeRule.FULL,
    ),
    Layout(model="internvl3-8b", adapters=EVERYWHERE, tensor=2),
    Layout(
        model="llama3.1-8b", vision=0, adapters=AdapterConfig(rank=16, alpha=32), data=4, sharded=4
    ),
    # Data-parallel encoders.
    Layout(model="internvl2.5-8b", kept=5, data=4, stages=2, encoder_sharded=8),
    Layout(model="internvl2.5-8b", kept=2, data=4, sharded=4, encoder_sharded=4),
    Layout(
        model="internvl-chat-1.5-6b-20b", kept=0, data=4, frozen=("vision",), tensor=8,
        sequence=True,
    ),
    Layout(
        model="qwen3-vl-8b", vision=3, kept=0, data=4, deepstack=(0, 1), encoder_sharded=4
    ),
    Layout(model="qwen2.5-vl-7b", vision=3, kept=3000, data=4, stages=2),
)  # fmt: skip


def _with_last_recomputed(stage: Stage) -> Stage:
    spans = [span for span in stage.units if span.layers]
    return stage.model_copy(update={"recompute": merge_spans(span.units[-1] for span in spans)})


def job_of(model: ModelConfig, parallel: Parallel, **options: Any) -> JobSpec:
    options = {"cluster": CLUSTER, "precision": "bf16"} | options
    return JobSpec(model=model, parallel=parallel, **options)


@cache
def plan_of(layout: Layout) -> Planned:
    """Return a plan and its scheduled micro-batches."""
    job = _job_of(layout)
    data = _data_of(layout, job.model.images is not None)
    rule = SplitRule(method=PartitionMethod.LAYER, recompute=layout.recompute)
    made = make_plan(PlanRequest(job=job, data=data, split=rule if layout.kept is None else JOINT))
    plan, scheduled = made.plan, made.data or data.schedule(job)
    changed: dict[str, Any] = {}
    if layout.schedule != ONE_FORWARD_ONE_BACKWARD:
        parts, units = layout.stages * layout.schedule.chunks, len(unit_spans(job.model))
        cuts = [round(part * units / parts) for part in range(1, parts)]
        changed = {"stages": stages_from_cuts(job.model, cuts), "schedule": layout.schedule}
    if layout.edited:
        stages = changed.get("stages", plan.stages)
        changed["stages"] = tuple(map(_with_last_recomputed, stages))
    if layout.kept is not None:
        most = 4 if job.model.images is None else 1024
        passes = {"items_per_pass": {"vision": most}, "kept_items": {"vision": layout.kept}}
        passes |= {"pipelines": 2, "sharded": layout.encoder_sharded}
        changed["data_parallel_encoders"] = plan.data_parallel_encoders.model_copy(update=passes)
    return _change_and_predict((plan, scheduled), **changed) if changed else plan, scheduled


def _job_of(layout: Layout) -> JobSpec:
    model = load_model(layout.model).with_tower("language", tied_head=layout.tied)
    towers = {"language": layout.language} | ({"vision": layout.vision} if layout.vision else {})
    model = model.with_layers(**towers)
    if expert_counts(model):  # a fake device fills experts evenly
        model = with_imbalance(model, 1.0)
    if model.images is not None:
        deepstack = layout.deepstack if model.images.deepstack_layers else ()
        full = (1,) if model.images.full_layers else ()
        model = model.with_tower("vision", deepstack_layers=deepstack, full_layers=full)
    parallel = Parallel(
        tensor=layout.tensor, pipeline=layout.stages, data=layout.data, sharded=layout.sharded,
        expert=layout.expert, sequence_parallel=layout.sequence,
    )  # fmt: skip
    options = {"frozen": layout.frozen, "adapters": layout.adapters}
    if layout.kept is not None:
        return job_of(model, parallel, placement=EncoderPlacement.DATA_PARALLEL, **options)
    # A fake device has no communication buffers.
    return job_of(model, parallel, cluster=CLUSTER.model_copy(update={"peer_mib": 0.0}), **options)


def _data_of(layout: Layout, has_images: bool) -> MockData | SampleData:
    """Return micro-batches at caps, or uneven images for data-parallel native encoders."""
    if layout.kept is not None and has_images:
        rng = np.random.default_rng(0)
        number, size = rng.integers(0, 4, 96), rng.integers(4, 24, 96) ** 2
        cells = (number * size).astype(np.int32)
        lengths = lengths_of(
            image_tokens=cells, squared_image_tokens=number * size**2,
            tokens=cells + rng.integers(20, 90, 96), loss_tokens=np.ones(96),
        )  # fmt: skip
        level = Level(caps=Caps.of(image_tokens=2200, tokens=2400))
        return SampleData(lengths=lengths, levels=(level,), packs_per_step=16)
    images = {"image_tokens": 700} if has_images else {"tiles": 3} if layout.vision else {}
    number = 3 if layout.schedule == ONE_FORWARD_ONE_BACKWARD else 4
    caps = Caps.of(**images, tokens=1000)
    return MockData(caps=caps, micro_batches_per_step=number * layout.data)


def _change_and_predict(planned: Planned, **changed: object) -> Plan:
    """Return the plan with changes and their prediction."""
    plan, scheduled = planned[0].model_copy(update=changed), planned[1]
    job = JobSpec.of_plan(plan)
    workload = job.workload(*scheduled, plan.pack_levels)
    prediction = predict_plan(plan, job, scheduled[0], workload)
    return plan.model_copy(update={"prediction": prediction})


def heaviest_of(planned: Planned, stage: int, windows: int = 1) -> FakeStage:
    """Run a stage at its `windows` heaviest moments on the fake device."""
    plan, scheduled = planned
    job = JobSpec.of_plan(plan)
    workload = job.workload(*scheduled, plan.pack_levels)
    encoding = None
    if plan.data_parallel_encoders is not None:
        encoding = HeaviestEncoding.find(plan, job, *scheduled, workload)
    heaviest = heaviest_windows(job.cost_of_all(plan.pack_levels), plan, stage, workload)
    load = random_rows(plan, stage, *scheduled)
    return run_fake_stage(plan, stage, heaviest[:windows], load, lambda: None, encoding)


def stages() -> None:
    """Predicted peaks of stages in many layouts, and contents that add up to them. State is exact
    for one-chunk stages that hold all of their weights."""
    for layout in LAYOUTS:
        planned = plan_of(layout)
        is_plain = layout.schedule == ONE_FORWARD_ONE_BACKWARD and layout.kept is None
        for stage in range(layout.stages):
            checked = partial(_checked_replayer, stage) if is_plain else StageReplayer
            with patch.object(fake_stage, "StageReplayer", checked):
                counted = heaviest_of(planned, stage)
            _check_counted(layout, planned[0], counted)


def _check_counted(layout: Layout, plan: Plan, counted: FakeStage) -> None:
    where, deviation = (layout, counted.stage), counted.deviation or 1.0
    too_little, too_much = _bounds(layout, plan, counted)
    assert -too_little < deviation < too_much, (*where, deviation)
    for total, phases in ((counted.allocated_gib, None), (counted.state_gib, ("state",))):
        parts = [one.gib for one in counted.contents if phases is None or one.phase in phases]
        assert abs(sum(parts) - total) < 1e-9, (*where, phases)
    computing = ("forward", "backward", "backward_weight", "optimizer")
    encoding = () if layout.kept is None else ("encoder",)
    assert counted.peak_phase in computing + encoding, where
    phases = {one.phase for one in counted.operations}
    assert ("backward_weight" in phases) == layout.schedule.in_two, (*where, phases)
    assert ("encoder" in phases) == (layout.kept is not None), (*where, phases)
    inside = [read for read in counted.host_reads if read.phase != "optimizer"]
    if plan.parallel.expert > 1:  # Core reads the token counts per destination.
        inside = [read for read in inside if "token_dispatcher" not in read.where]
    assert not inside, (*where, inside)


def _bounds(layout: Layout, plan: Plan, counted: FakeStage) -> tuple[float, float]:
    """Return the maximal relative under- and overestimate of allocated memory."""
    if layout.schedule != ONE_FORWARD_ONE_BACKWARD:
        return MOST_OF_SCHEDULES, MOST_OF_SCHEDULES
    if layout.adapters is not None or layout.kept is not None:
        return MOST_DEVIATION, MOST_OF_ADAPTERS if layout.kept is None else MOST_DEVIATION
    # Relevant in two-layer models.
    most = MOST_TOO_MUCH if layout.stages > 1 and layout.sharded > 1 else MOST_DEVIATION
    if plan.model.images is None:
        return MOST_DEVIATION, most
    return (most + UNCOUNTED_GIB / counted.allocated_gib,) * 2


def tied() -> None:
    """A peak after the head's backward, with the full gradient of the tied matrix waiting for the
    embedding's: packs of few tokens, fewer of them with loss."""
    model = load_model("internvl2.5-1b").with_layers(language=2, vision=1)
    model = model.with_tower("language", tied_head=True)
    # Short texts with shorter answers, one per pack.
    lengths = lengths_of(tiles=[0] * 16, tokens=[500] * 16, loss_tokens=[5] * 16)
    levels = (Level(caps=Caps.of(tiles=1, tokens=500)),)
    data = SampleData(lengths=lengths, packs_per_step=8, levels=levels)
    for sharded in (4, 1):
        job = job_of(model, Parallel(pipeline=1, data=4, sharded=sharded))
        made = make_plan(PlanRequest(job=job, data=data))
        assert made.data is not None
        counted = heaviest_of((made.plan, made.data), 0)
        assert counted.peak_at.startswith("embedding.word_embeddings"), counted.peak_at
        assert abs(counted.deviation or 1.0) < MOST_DEVIATION, (sharded, counted.deviation)


def building() -> None:
    """A rank with sharded weights builds with one full unit at most, within the planned peak."""
    plain = [one for one in LAYOUTS if not one.adapters and one.kept is None]
    for layout in [one for one in plain if one.sharded > 1][::2]:
        plan, _ = plan_of(layout)
        with fake_cuda(), act_as_stage(plan.parallel, 0) as links:
            now, most = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
            with without_matrices():
                stage = build_stage(plan, 0)
            parameters = list(stage.parameters())
            vectors = [one.nbytes for one in parameters if one.dim() < 2]
            assert now() <= sum(vectors) + 512 * len(parameters), layout
            divide_weights(stage, *create_shard_groups(plan.parallel), first_values(stage, 0))
            units = [set(unit.flats) for unit in stage.sharded.units]
            whole_bytes = {
                flat: sum(p.nbytes for p in flat.parameters) for unit in units for flat in unit
            }
            own = sum(size / flat.groups.shards.size() for flat, size in whole_bytes.items())
            largest = max(sum(whole_bytes[flat] for flat in unit) for unit in units)
            assert most() <= 1.01 * (own + largest), layout
            del stage, units, whole_bytes, parameters
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            build_trainer(plan, links, OPTIONS, steps=1, seed=0)
            assert most() < plan.prediction.stages[0].memory.peak_gib * 2**30, layout


def levels() -> None:
    """A peak with two levels: the longer recomputes every layer, the shorter none."""
    # Two stages. Nine packs of one long sample, and nine of three short samples.
    tiles = np.repeat([9, 2], [9, 27]).astype(np.int32)
    tokens = tiles * 256 + np.repeat([1600, 250], [9, 27])
    lengths = lengths_of(tiles=tiles, tokens=tokens, loss_tokens=[200] * 36)
    caps = Caps.of(tiles=6, tokens=2_400), Caps.of(tiles=9, tokens=4_000)
    own_levels = tuple(Level(caps=each) for each in caps)
    data = SampleData(lengths=lengths, packs_per_step=6, levels=own_levels)
    model = load_model("internvl2.5-8b").with_layers(vision=4, language=4)
    made = make_plan(PlanRequest(job=job_of(model, Parallel(pipeline=2)), data=data))
    again = tuple(
        merge_spans(one for span in stage.units for one in span.units if one.layers)
        for stage in made.plan.stages
    )
    recomputed = tuple(
        PlannedLevel(**dict(level), recompute=recompute)
        for level, recompute in zip(data.levels, (((),) * len(again), again), strict=True)
    )
    scheduled = packs, lengths = made.data
    plan = _change_and_predict((made.plan, scheduled), levels=recomputed)
    job = JobSpec.of_plan(plan)
    cost, workload = job.cost_of_all(plan.pack_levels), job.workload(packs, lengths, plan.levels)
    both = [stage_memories(cost, [plan.stages_at(level)] * 2, workload) for level in (0, 1)]
    for stage in range(len(plan.stages)):
        counted = heaviest_of((plan, scheduled), stage, windows=len(packs))
        # Link tensors are predicted at the run's maximum: at most two here.
        largest_bytes = packs.tokens.max() * plan.model.language.hidden_size * 2
        too_much = counted.predicted_gib - counted.allocated_gib
        rounding = MOST_DEVIATION * counted.allocated_gib
        assert -rounding < too_much < rounding + 2 * largest_bytes / 2**30, (stage, too_much)
        none, every = (memories[stage].peak_gib for memories in both)
        apart = min(none - counted.predicted_gib, counted.predicted_gib - every)
        assert abs(counted.allocated_gib - counted.predicted_gib) < apart / 5, "levels count little"


def _checked_replayer(stage: int, plan: Plan, links: PipelineLinks, **more: Any) -> StageReplayer:
    """Return a replayer after asserting its state bytes: the planned state, padding in buffers or
    sharded units, step counts, and rotary frequencies."""
    replayer = StageReplayer(plan, links, **more)
    trainer = replayer.trainer
    room_bytes = _padding_bytes(trainer, plan.parallel.sharded > 1)
    others = sum(one.nbytes for one in trainer.stage.buffers())
    # Step counts are the only scalar state.
    kept = trainer.data_parallel.optimizer_state()
    others += sum(one.nbytes for one in kept if one.dim() == 0)
    memory = plan.prediction.stages[stage].memory
    planned = memory.weights_gib + memory.gradients_gib + memory.optimizer_gib
    exact = round(planned * 2**30 + room_bytes) + others
    assert state_bytes_of(trainer) == exact, (plan.model.name, stage)
    return replayer


def _padding_bytes(trainer: Trainer, is_sharded: bool) -> float:
    """Return bytes of padding, in all kinds of state."""
    room_bytes = 0.0
    if not is_sharded:
        for one in (*trainer.models[0].buffers, *trainer.models[0].expert_parallel_buffers):
            held, ranks = sum(p.numel() for p in one.params), one.data_parallel_world_size
            room_bytes += (2 + 4) * (one.numel - held)
            # The first rank's optimizer shard has no padding.
            room_bytes += (4 + 4 + 4) * (min(one.numel / ranks, held) - held / ranks)
        return room_bytes
    for flat in trainer.stage.sharded.flats:
        share = sum(p.numel() for p in flat.parameters) / flat.groups.shards.size()
        room_bytes += (flat.part_size - share) * (2 + 4 + 4 if flat.is_trained else 2)
        if flat.is_trained:  # moments have no padding, so first ranks hold more
            room_bytes += (sum(one.end - one.first for one in flat.ranges()) - share) * (4 + 4)
    return room_bytes


def device_checks() -> None:
    """Device checks of cuda_checks.py, without comparing values."""
    with fake_cuda() as fake_device:
        for sizes in (([5, 300, 1], [5, 300, 1]), ([5, 300, 1], [5, 700, 260])):
            both = cuda_checks.attend_both_ways(*sizes)
            shapes = [[one.shape for one in way] for way in both]
            assert shapes[0] == shapes[1]
        assert {one.phase for one in fake_device.counts.operations()} == {"build"}
    for precision in ("fp32", "bf16"):
        plan = pipeline_plan().model_copy(update={"precision": precision})
        with fake_cuda(), act_as_stage(plan.parallel, 0) as links:
            trainer = build_trainer(plan, links, OPTIONS, steps=20, seed=3)
            assert len(cuda_checks._steps(trainer, 0, 1)) == 1
            weights = list(trainer.stage.parameters())
            bucket = ("file", "file", ([], [(None, weight) for weight in weights]))
            with patch.object(save_load, "_lock_pages"):
                [(_, _, (_, copied))] = save_load._copy_to_host([bucket], set(), {})
            assert {one.device.type for one in weights} == {"cuda"}
            assert {one.device.type for _, one in copied} == {"cpu"}
    real = cuda_checks.real_size_plan()
    with fake_cuda(), act_as_stage(real.parallel, 0) as links:
        sizes = (9, (1500, 1500, 1096), 400)
        losses = cuda_checks.train_on_one_pack(links, real, *sizes)
        assert len(losses) == 4
        assert torch.cuda.max_memory_allocated() > 5 << 30


def planted() -> None:
    """Planted mistakes in the model, each found by running one stage."""
    planned, forward = plan_of(Layout(model="internvl2.5-1b")), VLMStage.forward

    def run_with(change: Callable[[torch.Tensor], torch.Tensor]) -> FakeStage:
        with patch.object(VLMStage, "forward", lambda stage, batch: change(forward(stage, batch))):
            return heaviest_of(planned, 0)

    def add_mixed_product(loss: torch.Tensor) -> torch.Tensor:
        return loss + torch.mm(on_device(8, 8), on_device(8, 8, dtype=torch.float32)).sum()

    for change, words in (
        (add_mixed_product, "one type"),
        (lambda loss: loss + torch.ones(3).sum(0, keepdim=True), "device"),
    ):
        with pytest.raises(RuntimeError, match=words):
            run_with(change)
    found = run_with(lambda loss: loss * (1 + loss.item()))
    [read] = [one for one in found.host_reads if one.phase == "forward"]
    assert "fake_device_cases.py" in read.where and read.count == found.micro_batches


CASES = (
    memory, attention, refusals, host_reads, counts, stages, tied, units_kept, building, levels,
    device_checks, planted,
)  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for case in CASES:
        if not sys.argv[1:] or case.__name__ in sys.argv[1:]:
            case()
            print(f"passed {case.__name__}", flush=True)

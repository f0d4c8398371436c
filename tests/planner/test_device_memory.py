"""Device memory of launch lines against measured jobs, and against sums by hand."""

import numpy as np
import pytest
from launch_cases import of_line

from omnibal.families.named import named_model
from omnibal.trainers.lint.device_memory import device_memories
from omnibal.trainers.lint.line_job import LineJob
from omnibal.trainers.lint.predict_line import Costed, predict_line

MIB = 2**20
LLAMA, DEEPSEEK = "llama3.1-70b", "tests/planner/hub_configs/deepseek-v2"


RAN = (
    (LLAMA, 12, {"pipeline": 2}, 66.55, 70.88),
    (LLAMA, 12, {"tensor": 2}, 60.68, 62.53),
    (LLAMA, 12, {"tensor": 4}, 39.07, 40.18),
    (LLAMA, 12, {"tensor": 8}, 28.29, 29.12),
    (DEEPSEEK, 4, {"expert": 8}, 45.63, 48.79),
    (DEEPSEEK, 4, {"pipeline": 2, "expert": 4}, 44.7, 47.05),
)
"""Jobs on 8 B200: model, layers, sizes, and the largest GiB of any rank that torch allocated and
reserved. From SimuMax v1.2 (MooreThreads/SimuMax, docs/b200): Megatron-LM with Transformer Engine
2.11, mock data of 4,096 tokens, fused cross entropy, distributed optimizer, no recomputation; equal
for 4, 8 and 32 micro-batches."""


UNFUSED = "--no-gradient-accumulation-fusion"
LINE = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --use-distributed-optimizer "
    "--micro-batch-size 1 --transformer-impl transformer_engine --cross-entropy-loss-fusion"
)


def make_line_job(ran: tuple, more: str = "", *, length: int = 4096) -> LineJob:
    name, layers, sizes, *_ = ran
    tensor, pipeline, expert = (sizes.get(each, 1) for each in ("tensor", "pipeline", "expert"))
    flags = (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
        f"--global-batch-size {4 * 8 // tensor // pipeline} --seq-length {length}"
    )
    if expert > 1:
        flags += f" --expert-model-parallel-size {expert} --expert-tensor-parallel-size 1"
    if tensor > 1:
        flags += " --sequence-parallel"
    model = named_model(name).with_layers(language=layers)
    return of_line(f"{LINE} {flags} {more}", model)


def predict_memory(ran: tuple, more: str = "", *, length: int = 4096) -> Costed:
    return predict_line(make_line_job(ran, more, length=length))


@pytest.mark.parametrize("ran", RAN)
def test_memory_is_what_jobs_took(ran: tuple):
    """Prevents a job reported as fitting that runs out of memory through library buffers."""
    memory, (*_, allocated_gib, reserved_gib) = predict_memory(ran).memory, ran
    assert max(each.allocated_gib for each in memory) == pytest.approx(allocated_gib, rel=0.005)
    assert max(each.reserved_gib for each in memory) == pytest.approx(reserved_gib, rel=0.02)


def test_first_stage_by_hand():
    """Prevents a Transformer Engine tensor counted twice or not at all. Llama-3-70B's layer: hidden
    size 8,192, qkv 10,240, feed-forward 28,672. The first stage has six, a vocabulary of 128,256
    and 12 micro-batches of 4,096 tokens."""
    h, made, f, words, tokens = 8192, 8192 + 2048, 28672, 128256, 4096
    layer = h * made + h * h + 3 * h * f + 2 * h
    # Weights in bf16, gradients in fp32, 12 bytes of optimizer state over four ranks.
    state = (6 * layer + words * h) * (2 + 4 + 12 / 4)
    # Input, norm, qkv, attention's output, residual, norm, gate and value, product; both norms'
    # moments, and log-sum-exp of 64 heads.
    kept = tokens * 2 * (5 * h + made + 3 * f) + tokens * 4 * (2 + 64)
    # SwiGLU's backward: gradients of residual, product, gate and value, minus the freed product.
    # Both tensors of the link to the next stage, and token ids.
    working = tokens * 2 * (h + 3 * f - f) + 2 * tokens * 2 * h + 2 * 8 * tokens
    # An empty gradient per weight shape, shared by all layers; two workspaces.
    empty = 2 * (h * made + h * h + 2 * h * f + h * f) + 64 * MIB
    first = predict_memory(RAN[0]).memory[0]
    by_hand = (state + 12 * kept + working + empty) / 2**30
    assert first.allocated_gib == pytest.approx(by_hand, rel=1e-4)


def test_gradients_without_the_fused_sum_come_and_go():
    """Prevents memory for empty gradients with local layers or unfused gradient accumulation."""
    engine, local, unfused = (
        predict_memory(RAN[1], flag).memory[0].allocated_gib
        for flag in ("", "--transformer-impl local", UNFUSED)
    )
    assert local == unfused
    # The peak is the head's backward, with its largest gradient allocated either way.
    h, made, f = 8192, 10240, 28672
    empty = 2 * (h * made + h * h + 3 * h * f) / 2 + 64 * MIB
    assert engine - local == pytest.approx(empty / 2**30, rel=1e-3)


def test_empty_gradients_are_one_for_all_layers_and_chunks():
    """Prevents empty-gradient memory that grows with layers, or differs with interleaved chunks."""
    ways = ("", "--num-virtual-stages-per-pipeline-rank 3")
    plain, chunks = engine = [predict_memory(RAN[0], way) for way in ways]
    assert chunks.prediction.bubble_fraction < plain.prediction.bubble_fraction
    held = [
        np.subtract(each.peaks_gib, predict_memory(RAN[0], f"{way} {UNFUSED}").peaks_gib)
        for each, way in zip(engine, ways, strict=True)
    ]
    assert held[0] == pytest.approx(held[1], rel=0.02)


def test_an_exchange_of_heads_keeps_one_output_more():
    """Prevents omitting the attention output kept before the all-to-all back, in each layer."""
    flags = "--context-parallel-size 4 --cp-comm-type"
    heads, ring = (
        predict_memory((LLAMA, 12, {}), f"{flags} {exchange}", length=32768)
        .prediction.stages[0]
        .memory
        for exchange in ("a2a", "p2p")
    )
    one = 12 * (32768 // 4) * 8192 * 2 / 2**30
    assert heads.activations_gib - ring.activations_gib == pytest.approx(one)


def test_a_device_holds_more_than_torch():
    """Prevents NCCL memory counted as torch's, and a communicator without buffers."""
    expert, alone = predict_memory(RAN[4]), predict_memory(RAN[3])
    for line in (expert, alone):
        for memory in line.memory:
            assert memory.allocated_gib < memory.reserved_gib < memory.device_gib
    # Seven peers of an all-to-all. The plan's peak counts them too.
    peak_gib = expert.prediction.stages[0].memory.peak_gib
    assert peak_gib - expert.peaks_gib[0] == pytest.approx(7 * 384 / 1024)
    # Tensor-parallel communicators of eight GPUs: the group itself, and the norm's.
    outside = alone.memory[0].device_gib - alone.memory[0].reserved_gib
    assert outside == pytest.approx(0.5 + 2 * 688 / 1024)


def test_memory_grows_with_what_passes_keep():
    """Prevents allocator overhead charged on the total, though only activations fragment it."""
    job = make_line_job(RAN[1])
    line = predict_line(job)
    (stage,) = line.prediction.stages

    def reserved_gib(**more: float) -> float:
        sizes = {name: getattr(stage.memory, name) + gib for name, gib in more.items()}
        tensors = [stage.memory.model_copy(update=sizes)]
        (device,) = device_memories(job.job, job.levels, line.stages, job.workload, tensors)
        return device.reserved_gib

    assert reserved_gib(weights_gib=10) - reserved_gib() == pytest.approx(10)
    assert reserved_gib(activations_gib=10) - reserved_gib() == pytest.approx(11)

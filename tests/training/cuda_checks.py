"""Checks on a CUDA device: PYTHONPATH=. python tests/training/cuda_checks.py FOLDER [NAME ...]

Prints PASSED, FAILED or SKIPPED, name, seconds and peak device memory per check. Without a device,
checks that need one are skipped. Other checks run on the CPU.

Shapes: T packed tokens, N heads, G key/value heads, D head size.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import fused_checks
import mixture_cases
import torch
import torch.distributed as dist
from pipeline_cases import pipeline_plan
from toy import OPTIONS, cut_plan, toy_batch, toy_model

from megatron.vlm.backend import WeightGradients, current_device, has_cuda
from megatron.vlm.checkpoint.save_load import CheckpointWriter, load_checkpoint
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream, borders_of
from megatron.vlm.measure.random_batches import random_batch
from megatron.vlm.model.attention import attend_by_segment, attend_flash
from megatron.vlm.run.launch import RankLaunch, initialize_distributed, shut_down_distributed
from megatron.vlm.step.links import PipelineLinks
from megatron.vlm.step.train import Trainer, build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import load_cluster, load_model
from omnibal.model.encoders import ImagesEncoder, ImageText
from omnibal.model.parallel import Parallel
from omnibal.pipeline.stage_units import Stage

PACKS = [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)]]


def join() -> PipelineLinks:
    """Initialize a world of this process, on the first device."""
    launch = RankLaunch(rank=0, world_size=1, local_rank=0)
    return initialize_distributed(launch, Parallel(pipeline=1), seed=0)


def attention(folder: Path) -> None:
    """The packed kernel equals a call per sample, for full samples and pieces."""
    segments = [5, 300, 1, 128]
    for keys in (segments, [5, 700, 260, 1024]):
        torch.testing.assert_close(*attend_both_ways(segments, keys), rtol=3e-2, atol=3e-2)


def attend_both_ways(segments: list[int], keys: list[int]) -> list[list[torch.Tensor]]:
    """Return outputs and input gradients, by a call per range and by the packed kernel.

    Args: queries and keys per range.
    """
    packed = borders_of(segments, keys, current_device())
    torch.manual_seed(0)
    shapes = ((sum(segments), 8, 64), (sum(keys), 2, 64), (sum(keys), 2, 64))
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    results = []
    for attend in (attend_by_segment, attend_flash):
        own = [tensor.clone().requires_grad_() for tensor in inputs]
        output_TND = attend(*own, packed, True)
        output_TND.float().square().sum().backward()
        results.append([output_TND, *(tensor.grad for tensor in own)])
    return results


def weight_gradients(folder: Path) -> None:
    """A product accumulates into an fp32 buffer as in float64, in place and unrounded."""
    torch.manual_seed(0)
    input_RI, gradient_RO, buffer = (
        torch.randn(shape, device="cuda") for shape in ((300, 72), (300, 40), (40, 72))
    )
    inputs = [tensor.to(torch.bfloat16) for tensor in (input_RI, gradient_RO)]
    expected = buffer.double() + inputs[1].double().t() @ inputs[0].double()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    WeightGradients.wgrad_gemm_accum_fp32(*inputs, buffer)
    assert torch.cuda.max_memory_allocated() - before < 2 * buffer.numel()
    torch.testing.assert_close(buffer.double(), expected, rtol=1e-5, atol=1e-4)


def _toy_packs(plan: Plan, step: int) -> list[MicroBatch]:
    """Return three packs. Native-resolution images have two sizes."""
    model = plan.model
    if model.images is not None:
        sizes = ((6,), (2, 8), (1,))  # tokens of the images
        return [random_batch(model, 0, (20, 9 + step), 8, images=own) for own in sizes]
    return [toy_batch(model, pack, seed=10 * step + i) for i, pack in enumerate(PACKS)]


def _steps(trainer: Trainer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        own = [pack.to(current_device()) for pack in _toy_packs(trainer.plan, step)]
        losses.append(train_step(trainer, MicroBatchStream.of(own)).loss)
    return losses


def _compare_precisions(plan: Plan) -> None:
    """Assert that a model learns, alike in fp32 and bf16, which use different kernels."""
    links, losses = join(), []
    for precision in ("fp32", "bf16"):
        plan = plan.model_copy(update={"precision": precision})
        losses.append(_steps(build_trainer(plan, links, OPTIONS, steps=20, seed=3), 0, 20))
    fp32, bf16 = map(torch.tensor, losses)
    assert fp32[-1] < fp32[0]
    torch.testing.assert_close(bf16, fp32, rtol=0.05, atol=0.0)


def precisions_agree(folder: Path) -> None:
    """Tiles and packed text."""
    _compare_precisions(pipeline_plan())


def native_resolution(folder: Path) -> None:
    """Attention within images of different sizes, and within their windows."""
    sizes = {
        "layers": 4, "hidden_size": 32, "heads": 2, "ffn_hidden_size": 40, "patch_size": 4,
        "merge_size": 2, "frames_per_patch": 2, "min_pixels": 64, "max_pixels": 4096,
        "normalization": "RMSNorm", "qkv_bias": True, "qk_norm": False, "window_pixels": 16,
        "full_layers": (1,), "image_text": ImageText(),
    }  # fmt: skip
    # Head sizes 16 and 8, supported by the packed kernel.
    model = toy_model().with_tower("language", hidden_size=32)
    model = model.model_copy(update={"encoders": {"vision": ImagesEncoder(**sizes)}})
    _compare_precisions(cut_plan(model))


def adapters(folder: Path) -> None:
    """LoRA on frozen weights in all parts."""
    parts = ("vision", "projector", "language")
    _compare_precisions(
        cut_plan(toy_model(), adapters=AdapterConfig(rank=8, alpha=16, parts=parts))
    )


def idle_experts(folder: Path) -> None:
    """Experts without tokens get zero gradients even in memory with stale values."""
    model = mixture_cases.model_of(ffn_hidden_size=16)  # rows of 16 bytes, required by products
    plan = mixture_cases.plan_of(model=model).model_copy(update={"precision": "bf16"})
    trainer = build_trainer(plan, join(), OPTIONS, steps=10, seed=3)
    layers = [layer.mlp.experts for layer in trainer.stage.language.layers]
    batch = toy_batch(plan.model, [(0, 3)], seed=0).to(current_device())
    for _ in range(2):
        for size in (2**10, 2**16, 2**20):
            torch.full((size,), torch.nan, device=current_device())
        gradients: list[torch.Tensor] = []
        assert train_step(trainer, MicroBatchStream.of([batch])).grad_norm > 0
        for layer in layers:
            gradients += [one.main_grad for one in layer.parameters()]
        assert all(one.isfinite().all() for one in gradients)
    # Three tokens with two experts each: at least two of eight experts are idle.
    for one in gradients:
        moved = one.view(8, -1).any(1)
        assert 0 < moved.sum() <= 6, moved


def fused(folder: Path) -> None:
    """Fused operations, compiled, against plain torch."""
    if not has_cuda():
        fused_checks.compare_compiled_for_cpu()
        return
    for check in fused_checks.CHECKS:
        check(fused_checks.Case("cuda", torch.bfloat16))


def real_size_plan() -> Plan:
    """Return a plan of two layers of InternViT-6B and two of InternLM2-20B, on one device."""
    model = load_model("internvl-chat-1.5-6b-20b")
    small = model.with_layers(vision=2, language=2)
    whole = Stage.parse(
        *("vision embed", "vision 0..1", "projector", "language embed", "language 0..1", "head"),
        recompute=["vision 0", "language 1"],
    )
    return Plan(
        model=small, precision="bf16", parallel=Parallel(pipeline=1), stages=(whole,),
        cluster=load_cluster("h200-141g"), data=None,
    )  # fmt: skip


def train_on_one_pack(links: PipelineLinks, plan: Plan, *sizes: object) -> list[float]:
    """Return the losses of four steps on one random pack, at a rate for full-size models."""
    options = replace(OPTIONS, lr=1e-5, min_lr=0.0)
    trainer = build_trainer(plan, links, options, steps=10, seed=0)
    batch = random_batch(plan.model, *sizes).to(current_device())
    return [train_step(trainer, MicroBatchStream.of([batch])).loss for _ in range(4)]


def real_size_stage(folder: Path) -> None:
    """Layers of the paper's largest towers learn a pack at its caps."""
    losses = train_on_one_pack(join(), real_size_plan(), 9, (1500, 1500, 1096), 400)
    assert losses[-1] < losses[0], losses
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, losses {losses}")


def checkpoint(folder: Path) -> None:
    """A checkpoint saved during training resumes with equal losses."""
    links, plan = join(), pipeline_plan()
    trainers = [build_trainer(plan, links, OPTIONS, steps=20, seed=3) for _ in range(2)]
    first, second = trainers
    parts, others = (
        (plan, one.stages, one.optimizers, one.scheduler, asdict(OPTIONS)) for one in trainers
    )
    writer = CheckpointWriter(folder, *parts, keep_last=None, asynchronous=True)
    _steps(first, 0, 3)
    writer.save(3, {})
    rest = _steps(first, 3, 6)
    writer.finish()
    assert load_checkpoint(folder, *others).step == 3
    torch.testing.assert_close(torch.tensor(_steps(second, 3, 6)), torch.tensor(rest))


CHECKS = (
    *(fused, attention, weight_gradients, precisions_agree, native_resolution, adapters),
    *(idle_experts, real_size_stage, checkpoint),
)
OF_A_DEVICE = (attention, weight_gradients, real_size_stage)


def run(check: Callable[[Path], None], folder: Path) -> bool:
    """Run a check and print its result; return False if it failed."""
    result, start_s = "PASSED", time.perf_counter()
    if has_cuda():
        torch.cuda.reset_peak_memory_stats()
    if not has_cuda() and check in OF_A_DEVICE:
        result = "SKIPPED"
    else:
        try:
            check(folder)
        except Exception:
            result = "FAILED"
            traceback.print_exc(file=sys.stdout)
        finally:
            if dist.is_initialized():
                shut_down_distributed()
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if has_cuda() else 0.0
    seconds = time.perf_counter() - start_s
    print(f"{result} {check.__name__} {seconds:.1f} s {peak_gib:.2f} GiB", flush=True)
    return result != "FAILED"


if __name__ == "__main__":
    names = sys.argv[2:] or [check.__name__ for check in CHECKS]
    passed = [run(globals()[name], Path(sys.argv[1])) for name in names]
    sys.exit(not all(passed))

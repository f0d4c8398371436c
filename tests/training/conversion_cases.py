"""Released checkpoints of toy models."""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint_cases import save
from released import IMAGE_TOKEN, KINDS
from safetensors.torch import load_file
from tensor_parallel_cases import by_name, gather_gradients, whole
from toy import OPTIONS, ToySample
from transformers import AutoModelForImageTextToText, PreTrainedModel

from megatron.vlm.checkpoint.save_load import load_weights
from megatron.vlm.conversion.tensor_map import TensorLayout, find_released, parameters
from megatron.vlm.inputs.batch import MicroBatch, MicroBatchStream
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.job.plan import Plan
from omnibal.model.config import ModelConfig, load_model
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun

TOLERANCE = 1e-4
OURS = {
    "transformers": TensorLayout.TRANSFORMERS,
    "prefixed": TensorLayout.TRANSFORMERS_PREFIXED,
    "stacked": TensorLayout.TRANSFORMERS_STACKED,
    "qwen2": TensorLayout.INTERNVL_QWEN2,
    "llama": TensorLayout.INTERNVL_LLAMA,
    "internlm2": TensorLayout.INTERNVL_INTERNLM2,
    "qwen3": TensorLayout.INTERNVL_QWEN3,
    "qwen3_moe": TensorLayout.INTERNVL_QWEN3_MOE,
}


def load_in_transformers(folder: Path) -> PreTrainedModel:
    """Return Transformers' model of a folder; asserts that all tensors match."""
    loaded, told = AutoModelForImageTextToText.from_pretrained(
        folder, dtype="auto", local_files_only=True, output_loading_info=True
    )
    assert not any(told.values()), told
    # With the CUDA stand-ins, loading leaves the unstored RoPE tables undefined.
    made = type(loaded)(loaded.config).eval()
    made.load_state_dict(loaded.state_dict())
    made.generation_config = loaded.generation_config
    return made


def example(model: ModelConfig, seed: int, *runs: int) -> ToySample:
    """Return random text and images. `runs` alternates text tokens and tiles."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    for place, count in enumerate(runs):
        if place % 2:
            ids += [IMAGE_TOKEN] * (count * model.vision.tokens_per_item)
        else:
            ids += random.integers(1, model.language.vocab_size, count).tolist()
    size = model.vision.image_size
    pixels = random.standard_normal((sum(runs[1::2]), 3, size, size)).astype(np.float32)
    mask = [place > 1 and token != IMAGE_TOKEN for place, token in enumerate(ids)]
    return ToySample(ids=ids, loss_mask=mask, pixels_TCPP=torch.from_numpy(pixels))


def micro_batches(model: ModelConfig) -> list[list[ToySample]]:
    """Return micro-batches with images, of several tiles and per sample, and of text only."""
    return [
        [example(model, 0, 3, 2, 4, 1, 6), example(model, 1, 9), example(model, 2, 1, 3, 5)],
        [example(model, 3, 7), example(model, 4, 5)],
    ]


def predicting_positions(sample: ToySample) -> torch.Tensor:
    return torch.tensor(sample.loss_mask).nonzero().squeeze(1) - 1


@functools.cache
def model_of(name: str) -> ModelConfig:
    """Return the hand-written description of the model."""
    kind = KINDS[name]
    is_6b = kind.vision == "6b"
    toy = load_model("internvl-digits").with_tower(
        "vision", layers=2, hidden_size=24, heads=3 if is_6b else 4, ffn_hidden_size=40,
        image_size=16, patch_size=4, normalization="RMSNorm" if is_6b else "LayerNorm",
        norm_eps=1e-6 if is_6b else 1e-3, qkv_bias=not is_6b, qk_norm=is_6b,
    )  # fmt: skip
    experts = ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=20)
    qwen3 = {"qk_norm": True, "head_size": 6} if "qwen3" in kind.language else {}
    if kind.language == "qwen3_moe":
        qwen3["runs"] = (LayerRun(layers=1, experts=experts),)
    return toy.model_copy(update={"name": name}).with_tower(
        "language", **qwen3, layers=2, hidden_size=32, heads=8, kv_heads=4, ffn_hidden_size=44,
        vocab_size=51, qkv_bias=kind.language == "qwen2", norm_eps=1e-3, rope_base=5000,
        tied_head=kind.tied,
    )  # fmt: skip


def logits_of(model: torch.nn.Module, sample: ToySample) -> torch.Tensor:
    """Return logits of Transformers' InternVL at positions before a token with loss."""
    out = model(
        input_ids=torch.tensor([sample.ids]),
        pixel_values=sample.pixels_TCPP if len(sample.pixels_TCPP) else None,
        attention_mask=torch.ones(1, len(sample.ids), dtype=torch.long),
    )
    return out.logits[0, predicting_positions(sample)]


@dataclass(frozen=True, kw_only=True)
class Computed:
    """Logits per micro-batch, their loss, and gradients by name."""

    logits_LW: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def compute_samples(
    model: torch.nn.Module,
    packs: Iterable[Sequence[ToySample]],
    logits_of: Callable[[torch.nn.Module, ToySample], torch.Tensor] = logits_of,
) -> Computed:
    """Return logits, loss and gradients of a Transformers model, sample by sample."""
    logits, losses = [], []
    for samples in packs:
        own = [logits_of(model, sample) for sample in samples]
        for found, sample in zip(own, samples, strict=True):
            labels = torch.tensor(sample.ids)[torch.tensor(sample.loss_mask)]
            losses.append(F.cross_entropy(found, labels, reduction="none"))
        logits.append(torch.cat(own).detach())
    loss = torch.cat(losses).mean()
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Computed(logits_LW=logits, loss=loss.item(), gradients=gradients)


def observe(links, plan: Plan, run: Path, batches: Sequence[MicroBatch], *others: str):
    """Run a step from imported weights; return (loss, norm), outputs by module, and gradients."""
    trainer = build_trainer(plan, links, replace(OPTIONS, clip_grad=0.0), steps=1, seed=9)
    load_weights(run, plan, trainer.stages)
    seen: dict[str, list[torch.Tensor]] = {part: [] for part in ("head", *others)}
    for part, module in trainer.stage.named_children():
        if part in seen:
            module.register_forward_hook(functools.partial(keep, seen[part]))
    result = train_step(trainer, MicroBatchStream.of(batches))
    gather_gradients(trainer.models[0])
    gradients = by_name(trainer.stage, lambda parameter: parameter.main_grad)
    return (result.loss, result.grad_norm), seen, gradients


def train_and_save(links, plan: Plan, run: Path, directory: Path, batches: Sequence[MicroBatch]):
    """Train a step and save; return the next step's logits, computed from the saved weights."""
    trainer = build_trainer(plan, links, OPTIONS, steps=4, seed=9)
    load_weights(run, plan, trainer.stages)
    trainer.optimizers[0].reload_model_params()
    train_step(trainer, MicroBatchStream.of(batches))
    save(trainer, directory, 1)
    logits: list[torch.Tensor] = []
    if trainer.stage.head is not None:
        trainer.stage.head.register_forward_hook(functools.partial(keep, logits))
    train_step(trainer, MicroBatchStream.of(batches))
    return [each.squeeze(1) for each in logits]


def add_adapter_products(model: torch.nn.Module, folder: Path) -> None:
    """Add an adapter folder's products to a Transformers model's weights, by PEFT's formula."""
    config, used = json.loads((folder / "adapter_config.json").read_text()), set()
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    for path, module in model.named_modules():
        if re.fullmatch(config["target_modules"], path):
            pair = [f"base_model.model.{path}.lora_{which}.weight" for which in "AB"]
            used |= {*pair}
            module.weight.data += scale * tensors[pair[1]] @ tensors[pair[0]]
    assert used == tensors.keys(), "all modules that are matched, and no others, have tensors"


def group_ranks(plan: Plan, ranks: Sequence) -> list[Sequence]:
    """Return ranks' results by tensor-parallel group."""
    tensor = plan.parallel.tensor
    return [ranks[first : first + tensor] for first in range(0, len(ranks), tensor)]


def reassemble_shards(
    plan: Plan, ranks: Sequence[Mapping[str, torch.Tensor]], gated=()
) -> dict[str, torch.Tensor]:
    """Return full tensors of all ranks, by name."""
    return {
        name: whole(name, [rank[name] for rank in group], gated)
        for group in group_ranks(plan, ranks)
        for name in group[0]
    }


def keep(outputs: list[torch.Tensor], module, given, output) -> None:
    tensor = output[0] if isinstance(output, tuple) else output
    outputs.append(tensor.detach().clone())


def as_released(
    found: Mapping[str, torch.Tensor], model: ModelConfig, layout: TensorLayout
) -> dict[str, torch.Tensor]:
    """Return parameters or gradients split and named as in an export."""
    split = {}
    for parameter in parameters(model):
        made_of = find_released(parameter, model, layout)
        real = found[parameter.name][tuple(slice(size) for size in parameter.shape)]
        pieces = made_of.arrangement.divide(real)
        split |= dict(zip(made_of.names, pieces, strict=True))
    return split


def assert_computes(
    plan: Plan,
    ranks: Sequence[tuple],
    expected: Computed,
    layout: TensorLayout,
    gated: tuple[str, ...] = (),
) -> None:
    """Assert that `observed` results equal Transformers' logits, loss and gradients."""
    results, seen, gradients = zip(*ranks, strict=True)
    words, last_stage = plan.model.language.vocab_size, group_ranks(plan, seen)[-1]
    of_ranks = zip(*(own["head"] for own in last_stage), strict=True)
    for parts, other in zip(of_ranks, expected.logits_LW, strict=True):
        logits = torch.cat([part.squeeze(1) for part in parts], -1)[:, :words]
        assert_near(logits, other, "logits")
    norm = sum(one.square().sum().item() for one in expected.gradients.values()) ** 0.5
    for result in results:
        assert result == pytest.approx((expected.loss, norm), rel=TOLERANCE)
    ours = as_released(reassemble_shards(plan, gradients, gated), plan.model, layout)
    assert ours.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        # Without RoPE, shifting all keys equally changes nothing but rounding errors.
        is_none = key.endswith("attention.k_proj.bias")
        assert_near(ours[key], gradient, key, least=1.0 if is_none else 0.0)


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: str, least: float = 0.0):
    """Assert equality within 1e-4 of the tensor's largest value."""
    assert found.shape == expected.shape, what
    scale = max(expected.abs().max().item(), least)
    error = (found - expected).abs().max().item()
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.3g} of {scale:.3g}"

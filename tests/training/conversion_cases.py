"""Released checkpoints of toy models."""

import functools
from collections.abc import Mapping

import numpy as np
import torch
from released import IMAGE_TOKEN, KINDS
from toy import ToySample

from megatron.vlm.conversion.tensor_map import Layout, parameters, released
from omnibal.model.config import ModelConfig, load_model
from omnibal.model.layers import ExpertsConfig, LayerRun

TOLERANCE = 1e-4
OURS = {
    "transformers": Layout.TRANSFORMERS,
    "prefixed": Layout.TRANSFORMERS_PREFIXED,
    "stacked": Layout.TRANSFORMERS_STACKED,
    "qwen2": Layout.INTERNVL_QWEN2,
    "llama": Layout.INTERNVL_LLAMA,
    "internlm2": Layout.INTERNVL_INTERNLM2,
    "qwen3": Layout.INTERNVL_QWEN3,
    "qwen3_moe": Layout.INTERNVL_QWEN3_MOE,
}


def example(model: ModelConfig, seed: int, *runs: int) -> ToySample:
    """Random text and pictures; `runs` are words, tiles, words, tiles and so on."""
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
    """Two pictures in one sample, text alone, a picture of several tiles; then no picture at all,
    and a sample after a picture is cut short."""
    return [
        [example(model, 0, 3, 2, 4, 1, 6), example(model, 1, 9), example(model, 2, 1, 3, 5)],
        [example(model, 3, 7), example(model, 4, 5)],
    ]


def predicting_positions(sample: ToySample) -> torch.Tensor:
    return torch.tensor(sample.loss_mask).nonzero().squeeze(1) - 1


@functools.cache
def model_of(name: str) -> ModelConfig:
    """This project's description of the model, written by hand."""
    kind = KINDS[name]
    is_6b, qwen2 = kind.vision == "6b", kind.language == "qwen2"
    toy = load_model("internvl-digits")
    vision = toy.vision.model_copy(
        update={
            "layers": 2, "hidden_size": 24, "heads": 3 if is_6b else 4, "ffn_hidden_size": 40,
            "image_size": 16, "patch_size": 4, "normalization": "RMSNorm" if is_6b else "LayerNorm",
            "norm_eps": 1e-6 if is_6b else 1e-3, "qkv_bias": not is_6b, "qk_norm": is_6b,
        }
    )  # fmt: skip
    experts = ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=20)
    qwen3 = {"qk_norm": True, "head_size": 6} if "qwen3" in kind.language else {}
    if kind.language == "qwen3_moe":
        qwen3["runs"] = (LayerRun(layers=1, experts=experts),)
    language = toy.language.model_copy(
        update={
            **qwen3,
            "layers": 2, "hidden_size": 32, "heads": 8, "kv_heads": 4, "ffn_hidden_size": 44,
            "vocab_size": 51, "qkv_bias": qwen2, "norm_eps": 1e-3, "rope_base": 5000,
            "tied_head": kind.tied,
        }
    )  # fmt: skip
    changes = {"name": name, "encoders": {"vision": vision}, "language": language}
    return toy.model_copy(update=changes)


def keep(outputs: list[torch.Tensor], module, given, output) -> None:
    tensor = output[0] if isinstance(output, tuple) else output
    outputs.append(tensor.detach().clone())


def as_released(
    found: Mapping[str, torch.Tensor], model: ModelConfig, layout: Layout
) -> dict[str, torch.Tensor]:
    """Parameters, or their gradients, by name here, taken apart as an export does it."""
    split = {}
    for parameter in parameters(model):
        made_of = released(parameter, model, layout)
        real = found[parameter.name][tuple(slice(size) for size in parameter.shape)]
        pieces = made_of.arrangement.split(real)
        split |= dict(zip(made_of.names, pieces, strict=True))
    return split


def assert_near(found: torch.Tensor, expected: torch.Tensor, what: str, least: float = 0.0):
    """To 1e-4 of the largest value of the tensor."""
    assert found.shape == expected.shape, what
    scale = max(expected.abs().max().item(), least)
    error = (found - expected).abs().max().item()
    assert error <= TOLERANCE * scale, f"{what}: off by {error:.3g} of {scale:.3g}"

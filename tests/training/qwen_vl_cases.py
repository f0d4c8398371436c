"""Small random Qwen-VL models of Transformers, and their hand-written descriptions."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import native_resolution_cases
import torch
from native_resolution_cases import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl
from released import randomize, word_tokenizer
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from omnibal.model.config import ModelConfig
from omnibal.model.encoders import VideoConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun

PIECES = (
    "<unk> <|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> "
    "<|video_pad|> a b c"
).split()
IDS = {
    "image_token_id": PIECES.index("<|image_pad|>"),
    "video_token_id": PIECES.index("<|video_pad|>"),
    "vision_start_token_id": PIECES.index("<|vision_start|>"),
    "vision_end_token_id": PIECES.index("<|vision_end|>"),
}
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string %}{{ message.content }}{%- else %}"
    "{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
"""Qwen's template, without tools."""
_OLDER_PIXELS = {
    "min_pixels": 56 * 56, "max_pixels": 128 * 28 * 28 * 128,
    "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
    "pixel_std": (0.26862954, 0.26130258, 0.27577711),
}  # fmt: skip
_NEWER_VIDEO = VideoConfig(
    min_pixels=4096,
    max_pixels=24_576 * 1024,
    counts_frames=True,
    times="before",
    sampling="ends",
    around=("<|vision_start|>", "<|vision_end|>"),
)
_NEWER_PIXELS = {"min_pixels": 256 * 256, "max_pixels": 4096 * 4096, "video": _NEWER_VIDEO}


class Kind(NamedTuple):
    """A model under test."""

    config: PretrainedConfig
    make: type[PreTrainedModel]
    layout: str
    """Layout written by `save_pretrained`."""
    model: ModelConfig
    """The hand-written model description."""


def _kind(model: ModelConfig, layout: str, **tower: Any) -> Kind:
    """Return a toy model described like a release: with ids, maximal positions and image sizes."""
    made = native_resolution_cases.transformers_model(model)
    made.config.update(IDS)
    ends = {"max_position_embeddings": 640, "eos_token_id": 3, "bos_token_id": None}
    made.config.text_config.update(ends)
    named = model.model_copy(update={"name": "released", "chat_template": "tokenizer"})
    limited = named.with_tower("language", max_positions=640)
    described = limited.with_tower("vision", **tower)
    return Kind(made.config, type(made), layout, described)


_EXPERTS = ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=20)
_SIZES = {"norm_eps": 1e-3, "rope_base": 5000}
"""No value is a class default."""
KINDS = {
    "qwen2-vl": _kind(qwen2_vl(**_SIZES), "qwen2-vl", **_OLDER_PIXELS),
    "qwen2.5-vl-tied": _kind(qwen2_5_vl(**_SIZES, tied_head=True), "qwen2.5-vl", **_OLDER_PIXELS),
    "qwen3-vl-tied": _kind(qwen3_vl(**_SIZES, tied_head=True), "qwen3-vl", **_NEWER_PIXELS),
    "qwen3-vl-moe": _kind(
        qwen3_vl(**_SIZES, runs=(LayerRun(layers=1, experts=_EXPERTS),)),
        "qwen3-vl-moe-stacked",
        **_NEWER_PIXELS,
    ),
    "qwen3.5-tied": _kind(qwen3_5(rope_base=5000, tied_head=True), "qwen3.5", **_NEWER_PIXELS),
    "qwen3.5-moe": _kind(qwen3_5_moe(rope_base=5000), "qwen3.5-moe-apart", **_NEWER_PIXELS),
}


def transformers_model(name: str, seed: int = 0) -> PreTrainedModel:
    return randomize(KINDS[name].make(KINDS[name].config), seed)


def write_companions(folder: Path) -> None:
    """Write a release's other files: tokenizer, template, processors, license."""
    words = word_tokenizer(PIECES)
    words.add_special_tokens([piece for piece in PIECES if piece.startswith("<|")])
    words.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "LICENSE").write_text("Yours.\n")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"patch_size": 4, "merge_size": 2}))


def as_released(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return Transformers 5's Qwen3-VL-MoE tensors with expert matrices transposed as released."""
    return {
        name: torch.stack([matrix.T for matrix in value]) if ".experts." in name else value
        for name, value in tensors.items()
    }


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the tensors of a folder written by `save_pretrained`."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})

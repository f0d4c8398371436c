"""Small random Qwen-VL models by transformers, and this project's description of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from released import randomized
from safetensors.torch import save_file
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from omnibal.model.config import LanguageConfig, ModelConfig, RopeSections
from omnibal.model.encoders import ImagesEncoder, VideoConfig
from omnibal.model.layers import ExpertsConfig, LayerRun

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
"""Qwen's, without tools."""
_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 44, "vocab_size": 51, "rms_norm_eps": 1e-3,
    "max_position_embeddings": 640,
}  # fmt: skip
_OURS = {
    "layers": 3, "hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_hidden_size": 44,
    "vocab_size": 51, "norm_eps": 1e-3, "max_positions": 640, "rope_base": 5000,
}  # fmt: skip
_TOWER = {
    "layers": 3, "hidden_size": 24, "heads": 3, "ffn_hidden_size": 40, "patch_size": 4,
    "frames_per_patch": 2, "qkv_bias": True, "qk_norm": False,
}  # fmt: skip
_OLDER_PIXELS = {
    "min_pixels": 56 * 56, "max_pixels": 128 * 28 * 28 * 128,
    "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
    "pixel_std": (0.26862954, 0.26130258, 0.27577711),
}  # fmt: skip
_NEWER_PIXELS = {"min_pixels": 256 * 256, "max_pixels": 4096 * 4096}
_NEWER_VIDEO = VideoConfig(
    min_pixels=4096,
    max_pixels=24_576 * 1024,
    counts_frames=True,
    times="before",
    sampling="ends",
    around=("<|vision_start|>", "<|vision_end|>"),
)
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_OLDER_SECTIONS = RopeSections(time=1, rows=1, columns=2)
_NEWER_SECTIONS = RopeSections(time=4, rows=2, columns=2, interleaved=True)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model that is tried; no size is the default of its class."""

    config: PretrainedConfig
    make: type[PreTrainedModel]
    model: ModelConfig
    """This project's description of it, written by hand."""
    layout: str
    """Of what `save_pretrained` writes."""


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {
        "rope_type": "default", "rope_theta": 5000.0, "mrope_section": list(sections), **more
    }  # fmt: skip


def _older(kind: type[PretrainedConfig], vision: dict[str, Any], tied: bool) -> PretrainedConfig:
    """Of Qwen2-VL or Qwen2.5-VL."""
    sizes = {"depth": 3, "num_heads": 3, "patch_size": 4, **vision}
    text = _TEXT | {
        "rope_parameters": _rope(1, 1, 2), "bos_token_id": None, "eos_token_id": 3,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    return kind(text_config=text, vision_config=sizes, tie_word_embeddings=tied, **IDS)


def _newer(kind: type[PretrainedConfig], tied: bool, **text: Any) -> PretrainedConfig:
    """Of Qwen3-VL, whose heads are wider than hidden / heads."""
    vision = {
        "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 3, "patch_size": 4,
        "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
    }  # fmt: skip
    rope = _rope(4, 2, 2, mrope_interleaved=True)
    whole = _TEXT | {
        "head_dim": 16, "rope_parameters": rope, "tie_word_embeddings": tied, **text
    }  # fmt: skip
    return kind(text_config=whole, vision_config=vision, tie_word_embeddings=tied, **IDS)


def _described(language: dict[str, Any], **tower: Any) -> ModelConfig:
    return ModelConfig(
        name="released",
        chat_template="tokenizer",
        encoders={"vision": ImagesEncoder(**_TOWER, **tower)},
        language=LanguageConfig(**_OURS, **language),
    )


def _described_newer(**language: Any) -> ModelConfig:
    return _described(
        {"qk_norm": True, "head_size": 16, "rope_sections": _NEWER_SECTIONS, **language},
        normalization="LayerNorm",
        activation="gelu_tanh",
        learned_positions=16,
        deepstack_layers=(0, 2),
        video=_NEWER_VIDEO,
        **_NEWER_PIXELS,
    )


def _described_older(tied: bool, **tower: Any) -> ModelConfig:
    return _described(
        {"qkv_bias": True, "rope_sections": _OLDER_SECTIONS, "tied_head": tied},
        patch_bias=False,
        **tower,
        **_OLDER_PIXELS,
    )


KINDS = {
    "qwen2-vl": Kind(
        config=_older(
            Qwen2VLConfig, {"embed_dim": 24, "mlp_ratio": 2, "hidden_size": 32}, tied=False
        ),
        make=Qwen2VLForConditionalGeneration,
        model=_described_older(
            False, normalization="LayerNorm", activation="quick_gelu", video=VideoConfig()
        ).with_tower("vision", ffn_hidden_size=48),
        layout="qwen2-vl",
    ),
    "qwen2.5-vl-tied": Kind(
        config=_older(
            Qwen2_5_VLConfig,
            {
                "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 32,
                "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2,
            },
            tied=True,
        ),
        make=Qwen2_5_VLForConditionalGeneration,
        model=_described_older(
            True,
            normalization="RMSNorm",
            gated=True,
            window_pixels=16,
            full_layers=(1,),
            video=VideoConfig(positions_per_second=2),
        ),
        layout="qwen2.5-vl",
    ),
    "qwen3-vl-tied": Kind(
        config=_newer(Qwen3VLConfig, tied=True),
        make=Qwen3VLForConditionalGeneration,
        model=_described_newer(tied_head=True),
        layout="qwen3-vl",
    ),
    "qwen3-vl-moe": Kind(
        config=_newer(Qwen3VLMoeConfig, tied=False, **_EXPERTS),
        make=Qwen3VLMoeForConditionalGeneration,
        model=_described_newer(
            runs=(
                LayerRun(
                    layers=1,
                    experts=ExpertsConfig(experts=4, experts_per_token=2, ffn_hidden_size=20),
                ),
            )
        ),
        layout="qwen3-vl-moe-stacked",
    ),
}  # fmt: skip


def transformers_model(name: str, seed: int = 0) -> PreTrainedModel:
    return randomized(KINDS[name].make(KINDS[name].config), seed)


def write_companions(folder: Path) -> None:
    """What stands beside a released checkpoint: tokenizer, template, processors, a licence."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.add_special_tokens([piece for piece in PIECES if piece.startswith("<|")])
    words.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "LICENSE").write_text("Yours.\n")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"patch_size": 4, "merge_size": 2}))


def as_released(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of Transformers 5's Qwen3-VL-MoE as released files have them, stated anew: a token's
    row times an expert's matrix."""
    return {
        name: torch.stack([matrix.T for matrix in value]) if ".experts." in name else value
        for name, value in tensors.items()
    }


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put other tensors into a folder that `save_pretrained` has written."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    whole = {name: value.contiguous() for name, value in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})

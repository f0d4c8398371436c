"""Qwen3-VL, dense and sparse, and Qwen2.5-VL at toy size, and transformers' models of the same
weights.

Shapes: Y patches of X values, S tokens, M image tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from megatron.vlm.inputs.batch import MicroBatch
from omnibal.data.native_resolution import Grid
from omnibal.model.config import LanguageConfig, ModelConfig, RopeSections
from omnibal.model.encoders import ImagesEncoder, ImageText, VideoConfig
from omnibal.model.layers import ExpertsConfig, LayerRun

IMAGE, VIDEO, START, END = 0, 1, 2, 3
"""Tokens of images and of videos, and those around both."""
_FIRST_WORD = 4


def toy_tower(**changes: Any) -> ImagesEncoder:
    """Five layers, two with deepstack features, heads of 12 and learned positions: Qwen3-VL's."""
    sizes = {
        "layers": 5, "hidden_size": 36, "heads": 3, "ffn_hidden_size": 28, "patch_size": 4,
        "merge_size": 2, "frames_per_patch": 2, "min_pixels": 64, "max_pixels": 4096,
        "normalization": "LayerNorm", "qkv_bias": True, "qk_norm": False, "activation": "gelu_tanh",
        "learned_positions": 25, "deepstack_layers": (1, 3),
        "video": VideoConfig(times="before"), "image_text": ImageText(),
    }  # fmt: skip
    return ImagesEncoder(**{**sizes, **changes})


def toy_language(sections: RopeSections, **changes: Any) -> LanguageConfig:
    """Three layers, with room for two deepstack features."""
    sizes = {
        "layers": 3, "hidden_size": 24, "heads": 4, "kv_heads": 2, "head_size": 16,
        "ffn_hidden_size": 40, "vocab_size": 51, "rope_base": 1000.0, "rope_sections": sections,
    }  # fmt: skip
    return LanguageConfig(**{**sizes, **changes})


def qwen3_vl(vision: dict[str, Any] | None = None, **language: Any) -> ModelConfig:
    """Qwen3-VL at toy size."""
    sections = RopeSections(time=4, rows=2, columns=2, interleaved=True)
    return ModelConfig(
        name="toy-qwen3-vl",
        encoders={"vision": toy_tower(**(vision or {}))},
        language=toy_language(sections, **{"qk_norm": True, "qkv_bias": False, **language}),
    )


def qwen3_vl_moe(**language: Any) -> ModelConfig:
    """Sparse Qwen3-VL at toy size."""
    experts = ExpertsConfig(experts=6, experts_per_token=2, ffn_hidden_size=12)
    return qwen3_vl(runs=(LayerRun(layers=1, experts=experts),), **language)


_OLDER = {"learned_positions": 0, "deepstack_layers": (), "patch_bias": False}


def qwen2_5_vl(vision: dict[str, Any] | None = None, **language: Any) -> ModelConfig:
    """Qwen2.5-VL at toy size: windows of 2 x 2 cells in all layers but two."""
    tower = {
        **_OLDER, "normalization": "RMSNorm", "gated": True, "activation": "gelu",
        "window_pixels": 16, "full_layers": (1, 4), "video": VideoConfig(positions_per_second=4.0),
        **(vision or {}),
    }  # fmt: skip
    return _older("toy-qwen2.5-vl", tower, **language)


def qwen2_vl(**language: Any) -> ModelConfig:
    """Qwen2-VL at toy size."""
    tower = {**_OLDER, "ffn_hidden_size": 72, "activation": "quick_gelu", "video": VideoConfig()}
    return _older("toy-qwen2-vl", tower, **language)


def _older(name: str, tower: dict[str, Any], **language: Any) -> ModelConfig:
    sections = RopeSections(time=2, rows=1, columns=3)
    # Heads take the whole width.
    language = {"qkv_bias": True, "head_size": None, "heads": 2, "kv_heads": 1, **language}
    return ModelConfig(
        name=name,
        encoders={"vision": toy_tower(**tower)},
        language=toy_language(sections, **language),
    )


@dataclass(frozen=True)
class ImageSample:
    """Random text with images and videos in it."""

    ids: list[int]
    loss_mask: list[bool]
    grids: tuple[Grid, ...]
    patches_YX: torch.Tensor
    positions_3S: torch.Tensor
    """As transformers' own `get_rope_index` has them."""


def sample_of(
    model: ModelConfig, grids: Sequence[Grid], text_tokens: int, *, seed: int
) -> ImageSample:
    """A sample of random content: a word, then every image between words, then the rest.

    Frames of a video stand apart by a word where the model writes their times as text.
    """
    random, tower = np.random.default_rng(seed), model.images
    assert tower is not None and tower.video is not None
    words = random.integers(_FIRST_WORD, model.language.vocab_size, text_tokens).tolist()
    ids = [words[0]]
    for grid in grids:
        cells = grid.rows * grid.columns // tower.positions_per_item
        token = IMAGE if grid.times == 1 else VIDEO
        apart = tower.video.times == "before"
        runs = [cells] * grid.times if apart else [cells * grid.times]
        for tokens in runs:
            ids += [words[1], START, *[token] * tokens, END]
    masked = len(ids)
    ids += words[1:]
    patches = random.standard_normal((sum(g.patches for g in grids), tower.values_per_patch))
    return ImageSample(
        ids=ids,
        loss_mask=[False] * masked + [True] * (len(ids) - masked),
        grids=tuple(grids),
        patches_YX=torch.from_numpy(patches.astype(np.float32)),
        positions_3S=rope_positions(model, ids, grids),
    )


def rope_positions(model: ModelConfig, ids: Sequence[int], grids: Sequence[Grid]) -> torch.Tensor:
    """Time, row and column of every token by transformers' `get_rope_index`, int64 [3, S]."""
    with torch.device("meta"):
        theirs = transformers_model(model).model
    ids_1S = torch.tensor([ids])
    positions_31S, _ = theirs.get_rope_index(ids_1S, **_grid_arguments(ids_1S, grids))
    return positions_31S[:, 0]


def _grid_arguments(ids_1S: torch.Tensor, grids: Sequence[Grid]) -> dict[str, torch.Tensor]:
    given: dict[str, torch.Tensor] = {
        "mm_token_type_ids": (ids_1S == IMAGE).int() + 2 * (ids_1S == VIDEO).int()
    }
    images, videos = ([grid for grid in grids if (grid.times > 1) == moves] for moves in (0, 1))
    if images:
        given["image_grid_thw"] = torch.tensor(images)
    if videos:
        given["video_grid_thw"] = torch.tensor(videos)
    return given


def pixel_arguments(sample: ImageSample) -> dict[str, torch.Tensor]:
    """Images and videos of a sample as transformers' models take them."""
    if not sample.grids:
        return {}
    parts = sample.patches_YX.split([grid.patches for grid in sample.grids])
    given = _grid_arguments(torch.tensor([sample.ids]), sample.grids)
    for moves, name in ((False, "pixel_values"), (True, "pixel_values_videos")):
        each = [p for p, grid in zip(parts, sample.grids, strict=True) if (grid.times > 1) == moves]
        if each:
            given[name] = torch.cat(each)
    return given


def pack_of(samples: Sequence[ImageSample]) -> MicroBatch:
    """The samples as one micro-batch, with the fields of all stages."""
    ids_S = torch.tensor([token for sample in samples for token in sample.ids])
    mask_S = torch.tensor([learned for sample in samples for learned in sample.loss_mask])
    predicted = mask_S.nonzero().squeeze(1)
    places_M = (ids_S <= VIDEO).nonzero().squeeze(1)
    return MicroBatch(
        tiles=0,
        image_tokens=len(places_M),
        tokens=len(ids_S),
        segment_tokens=tuple(len(sample.ids) for sample in samples),
        loss_weight=float(len(predicted)),
        image_grids=tuple(grid for sample in samples for grid in sample.grids),
        patches_YX=torch.cat([sample.patches_YX for sample in samples]),
        rope_positions_3S=torch.cat([sample.positions_3S for sample in samples], 1),
        token_ids_S=ids_S,
        image_positions_M=places_M,
        loss_positions_L=predicted - 1,
        labels_L=ids_S[predicted],
        loss_weights_L=torch.ones(len(predicted)),
    )


_KINDS: dict[str, tuple[type, type]] = {
    "toy-qwen3-vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "toy-qwen3-vl-moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "toy-qwen2.5-vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "toy-qwen2-vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
}


def transformers_model(model: ModelConfig) -> Any:
    """Transformers' model of these sizes, with weights of its own."""
    experts = model.language.kinds[0].experts
    config, kind = _KINDS[model.name if experts is None else f"{model.name}-moe"]
    made = kind(
        config(
            text_config=_text_config(model.language),
            vision_config=_vision_config(model),
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=model.language.tied_head,
        )
    )
    made.config._attn_implementation = "sdpa"
    return made


def _text_config(language: LanguageConfig) -> dict[str, Any]:
    sections = language.rope_sections
    assert sections is not None
    experts = language.kinds[0].experts
    of_experts = {} if experts is None else {
        "moe_intermediate_size": experts.ffn_hidden_size,
        "num_experts": experts.experts,
        "num_experts_per_tok": experts.experts_per_token,
    }  # fmt: skip
    return {
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "num_hidden_layers": language.layers,
        "num_attention_heads": language.heads,
        "num_key_value_heads": language.kv_heads,
        "head_dim": language.head_width,
        "intermediate_size": language.ffn_hidden_size,
        "rms_norm_eps": language.norm_eps,
        "tie_word_embeddings": language.tied_head,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": language.rope_base,
            "mrope_section": [sections.time, sections.rows, sections.columns],
        },
        **of_experts,
    }


def _vision_config(model: ModelConfig) -> dict[str, Any]:
    tower, width = model.images, model.language.hidden_size
    assert tower is not None and tower.video is not None
    common = {
        "depth": tower.layers,
        "hidden_size": tower.hidden_size,
        "num_heads": tower.heads,
        "intermediate_size": tower.ffn_hidden_size,
        "patch_size": tower.patch_size,
        "spatial_merge_size": tower.merge_size,
        "temporal_patch_size": tower.frames_per_patch,
        "out_hidden_size": width,
    }
    if model.name == "toy-qwen2-vl":
        del common["intermediate_size"], common["out_hidden_size"]
        ratio = tower.ffn_hidden_size // tower.hidden_size
        return common | {"embed_dim": tower.hidden_size, "hidden_size": width, "mlp_ratio": ratio}
    if tower.window_pixels is not None:
        rate = tower.video.positions_per_second
        return common | {
            "window_size": tower.window_pixels,
            "fullatt_block_indexes": list(tower.full_layers),
            "tokens_per_second": None if rate is None else int(rate),
        }
    return common | {
        "num_position_embeddings": tower.learned_positions,
        "deepstack_visual_indexes": list(tower.deepstack_layers),
    }


_OF_LAYER = {
    "qwen3": {
        "input_layernorm": "norm1", "pre_mlp_layernorm": "norm2",
        "mlp.linear_fc1": "mlp.linear_fc1", "mlp.linear_fc2": "mlp.linear_fc2",
        "self_attention.linear_proj": "attn.proj",
    },
    "qwen2.5": {
        "input_layernorm": "norm1", "pre_mlp_layernorm": "norm2", "mlp.linear_fc2": "mlp.down_proj",
        "self_attention.linear_proj": "attn.proj",
    },
    "qwen2": {
        "input_layernorm": "norm1", "pre_mlp_layernorm": "norm2", "mlp.linear_fc1": "mlp.fc1",
        "mlp.linear_fc2": "mlp.fc2", "self_attention.linear_proj": "attn.proj",
    },
}  # fmt: skip
"""Modules of an encoder's layer that have one of transformers' for themselves."""


def renamed(model: ModelConfig, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This project's tensors under transformers' names and in their shapes.

    Args:
        own: whole tensors, without padding.
    """
    return dict(_vision_tensors(model, own)) | dict(_language_tensors(model, own))


def _vision_tensors(model: ModelConfig, own: dict[str, torch.Tensor]) -> Any:
    tower, there = model.images, "model.visual"
    assert tower is not None
    kind = "qwen3" if "3" in model.name else "qwen2.5" if tower.gated else "qwen2"
    weight = own["vision_embedding.patch_projection.weight"]
    sides = (3, tower.frames_per_patch, tower.patch_size, tower.patch_size)
    yield f"{there}.patch_embed.proj.weight", weight.view(-1, *sides)
    if tower.patch_bias:
        yield f"{there}.patch_embed.proj.bias", own["vision_embedding.patch_projection.bias"]
    if tower.learned_positions:
        yield f"{there}.pos_embed.weight", own["vision_embedding.positions"]
    for name, tensor in own.items():
        if name.startswith("vision.layers."):
            yield from _vision_layer(tower, kind, name, tensor)
        if name.startswith("vision_deepstack."):
            yield f"{there}.deepstack_merger_list.{name.removeprefix('vision_deepstack.')}", tensor
        if name.startswith("projector."):
            yield f"{there}.merger.{_of_projector(kind, name.removeprefix('projector.'))}", tensor


def _of_projector(kind: str, name: str) -> str:
    if kind == "qwen3":
        return name
    for one, other in (("norm", "ln_q"), ("linear_fc1", "mlp.0"), ("linear_fc2", "mlp.2")):
        name = name.replace(one, other)
    return name


def _vision_layer(tower: ImagesEncoder, kind: str, name: str, tensor: torch.Tensor) -> Any:
    _, _, number, rest = name.split(".", 3)
    module, _, parameter = rest.rpartition(".")
    there = f"model.visual.blocks.{number}"
    if module == "self_attention.linear_qkv":
        heads = tensor.unflatten(0, (tower.heads, 3, tower.head_width))
        yield f"{there}.attn.qkv.{parameter}", heads.transpose(0, 1).flatten(0, 2)
    elif module == "mlp.linear_fc1" and tower.gated:
        for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
            yield f"{there}.mlp.{part}.{parameter}", half
    else:
        yield f"{there}.{_OF_LAYER[kind][module]}.{parameter}", tensor


def _language_tensors(model: ModelConfig, own: dict[str, torch.Tensor]) -> Any:
    language, there = model.language, "model.language_model"
    yield f"{there}.embed_tokens.weight", own["embedding.word_embeddings.weight"]
    yield f"{there}.norm.weight", own["language.final_layernorm.weight"]
    if not language.tied_head:
        yield "lm_head.weight", own["head.weight"]
    names = {
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
    }
    for name, tensor in own.items():
        if not name.startswith("language.layers."):
            continue
        _, _, number, rest = name.split(".", 3)
        layer = f"{there}.layers.{number}"
        if rest.startswith("self_attention.linear_qkv."):
            yield from _qkv(language, layer, rest.rpartition(".")[2], tensor)
        elif rest == "mlp.linear_fc1.weight":
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{layer}.mlp.{part}.weight", half
        else:
            yield f"{layer}.{names[rest]}", tensor


def _qkv(language: LanguageConfig, layer: str, parameter: str, tensor: torch.Tensor) -> Any:
    groups, per_group = language.kv_heads, language.heads // language.kv_heads
    heads = tensor.unflatten(0, (groups, per_group + 2, language.head_width))
    for name, part in zip("qkv", heads.split([per_group, 1, 1], dim=1), strict=True):
        yield f"{layer}.self_attn.{name}_proj.{parameter}", part.flatten(0, 2)

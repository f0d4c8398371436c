"""Qwen3-VL, dense and sparse, and Qwen2.5-VL at toy size, and their Transformers models.

Shapes: Y patches of X values, S tokens, M image tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensor_parallel_cases import with_unequal_weights
from toy import ToySample, pack
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron.vlm.conversion.config_files import qwen_files
from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.inputs.batch import MicroBatch
from omnibal.data.native_resolution import Grid
from omnibal.families.folder import CONFIG_FILE
from omnibal.model.config import LanguageConfig, ModelConfig, RopeSections
from omnibal.model.encoders import ImagesEncoder, ImageText, VideoConfig
from omnibal.model.layer_kinds import ExpertsConfig, LayerRun, LinearAttention

IMAGE, VIDEO, START, END = 0, 1, 2, 3
"""Tokens of images, of videos, and around both."""
WORD = 4
"""First text token."""


_TOWER = {
    "layers": 5, "hidden_size": 36, "heads": 3, "ffn_hidden_size": 28, "patch_size": 4,
    "merge_size": 2, "frames_per_patch": 2, "min_pixels": 64, "max_pixels": 4096,
    "normalization": "LayerNorm", "qkv_bias": True, "qk_norm": False, "image_text": ImageText(),
}  # fmt: skip
"""Five layers, head size 12."""
_LANGUAGE = {
    "layers": 3, "hidden_size": 24, "heads": 4, "kv_heads": 2, "head_size": 16,
    "ffn_hidden_size": 40, "vocab_size": 51, "rope_base": 1000.0,
}  # fmt: skip
"""Three layers, enough for two deepstack features."""


def _model(
    name: str, sections: RopeSections, tower: dict[str, Any], language: dict[str, Any]
) -> ModelConfig:
    return ModelConfig(
        name=name,
        encoders={"vision": ImagesEncoder(**_TOWER | tower)},
        language=LanguageConfig(**_LANGUAGE | {"rope_sections": sections} | language),
    )


def qwen3_vl(vision: dict[str, Any] | None = None, **language: Any) -> ModelConfig:
    """Return a toy Qwen3-VL: deepstack features of two layers, learned positions."""
    sections = RopeSections(time=4, rows=2, columns=2, interleaved=True)
    tower = {
        "activation": "gelu_tanh", "learned_positions": 25, "deepstack_layers": (1, 3),
        "video": VideoConfig(times="before"), **(vision or {}),
    }  # fmt: skip
    own = {"qk_norm": True, "qkv_bias": False, **language}
    return _model("toy-qwen3-vl", sections, tower, own)


def qwen3_vl_moe(**language: Any) -> ModelConfig:
    """Return a toy sparse Qwen3-VL."""
    experts = ExpertsConfig(experts=6, experts_per_token=2, ffn_hidden_size=12)
    return qwen3_vl(runs=(LayerRun(layers=1, experts=experts),), **language)


DELTA = LinearAttention(
    key_heads=2, value_heads=4, key_head_size=12, value_head_size=10, convolution_width=3
)


def qwen3_5(**language: Any) -> ModelConfig:
    """Return a toy Qwen3.5: gated delta layers, then one with a gated output and partial RoPE."""
    runs = (LayerRun(layers=2, linear=DELTA), LayerRun(layers=1))
    own = {
        "qk_norm": True, "qkv_bias": False, "output_gate": True, "zero_centered_norms": True,
        "norm_eps": 1e-2, "runs": runs, **language,
    }  # fmt: skip
    tower = {
        "activation": "gelu_tanh",
        "learned_positions": 25,
        "video": VideoConfig(times="before"),
    }
    sections = RopeSections(time=2, rows=1, columns=1, interleaved=True)
    return _model("toy-qwen3.5", sections, tower, own)


def qwen3_5_moe(**language: Any) -> ModelConfig:
    """Return a toy sparse Qwen3.5, with a gated shared expert."""
    experts = ExpertsConfig(
        experts=6, experts_per_token=2, ffn_hidden_size=12, shared_ffn_hidden_size=20,
        shared_gate=True,
    )  # fmt: skip
    runs = (LayerRun(layers=2, linear=DELTA, experts=experts), LayerRun(layers=1, experts=experts))
    return qwen3_5(runs=runs, **language)


def qwen2_5_vl(vision: dict[str, Any] | None = None, **language: Any) -> ModelConfig:
    """Return a toy Qwen2.5-VL: windows of 2 x 2 cells in all layers but two."""
    tower = {
        "normalization": "RMSNorm", "gated": True, "activation": "gelu", "window_pixels": 16,
        "full_layers": (1, 4), "video": VideoConfig(positions_per_second=4.0), **(vision or {}),
    }  # fmt: skip
    return _older("toy-qwen2.5-vl", tower, language)


def qwen2_vl(**language: Any) -> ModelConfig:
    """Return a toy Qwen2-VL."""
    tower = {"ffn_hidden_size": 72, "activation": "quick_gelu", "video": VideoConfig()}
    return _older("toy-qwen2-vl", tower, language)


def _older(name: str, tower: dict[str, Any], language: dict[str, Any]) -> ModelConfig:
    """Return a model with heads over the full width."""
    sections = RopeSections(time=2, rows=1, columns=3)
    own = {"qkv_bias": True, "head_size": None, "heads": 2, "kv_heads": 1, **language}
    return _model(name, sections, {"patch_bias": False, **tower}, own)


Grids = tuple[Grid, ...]
Pack = Sequence[tuple[Grids, int]]
"""Samples of (images and videos, number of text tokens)."""

# Packs of each step: images with partial windows, videos, a sample longer than an encoder pass,
# text-only packs, all images in one pack, a step without images, one pack for all ranks. Token
# counts are odd and even.
STEPS: list[list[Pack]] = [
    [
        [((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((Grid(1, 4, 4),), 6)],
        [((), 12), ((), 7)],
        [((Grid(3, 4, 6),), 5), ((Grid(1, 2, 4), Grid(1, 2, 2)), 9)],
        [((Grid(1, 2, 2),), 8), ((), 6), ((Grid(1, 4, 10),), 11)],
        [((), 9)],
    ],
    [[((), 7)], [((Grid(1, 8, 4),), 12), ((Grid(1, 4, 4),), 3), ((Grid(1, 2, 6),), 5)], [((), 4)]],
    [[((), 12), ((), 4)], [((), 5)]],
    [[((Grid(2, 2, 6), Grid(1, 4, 2)), 8)]],
]


@dataclass(frozen=True, kw_only=True)
class ImageSample(ToySample):
    """Random text with images and videos."""

    grids: Grids
    patches_YX: torch.Tensor
    positions_3S: torch.Tensor
    """By Transformers' `get_rope_index`."""


def sample_of(model: ModelConfig, grids: Grids, text_tokens: int, *, seed: int) -> ImageSample:
    """Return a random sample: a word, the images between words, then the other words.

    A word separates video frames if the model writes their times as text.
    """
    random, tower = np.random.default_rng(seed), model.images
    assert tower is not None and tower.video is not None
    words = random.integers(WORD, model.language.vocab_size, text_tokens).tolist()
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


_WITHOUT_WEIGHTS: dict[str, Any] = {}
"""Transformers' models on the device `meta`, by JSON description."""


def rope_positions(model: ModelConfig, ids: Sequence[int], grids: Grids) -> torch.Tensor:
    """Return time, row and column per token by Transformers' `get_rope_index`, int64 [3, S]."""
    key, ids_1S = model.model_dump_json(), torch.tensor([ids])
    if key not in _WITHOUT_WEIGHTS:
        with torch.device("meta"):
            _WITHOUT_WEIGHTS[key] = transformers_model(model).model
    theirs = _WITHOUT_WEIGHTS[key]
    positions_31S, _ = theirs.get_rope_index(ids_1S, **_grid_arguments(ids_1S, grids))
    return positions_31S[:, 0]


def _grid_arguments(ids_1S: torch.Tensor, grids: Grids) -> dict[str, torch.Tensor]:
    kinds = (ids_1S == IMAGE).int() + 2 * (ids_1S == VIDEO).int()
    images, videos = ([grid for grid in grids if (grid.times > 1) == moves] for moves in (0, 1))
    named = {"image_grid_thw": images, "video_grid_thw": videos}
    return {"mm_token_type_ids": kinds} | {n: torch.tensor(own) for n, own in named.items() if own}


def pixel_arguments(sample: ImageSample) -> dict[str, torch.Tensor]:
    """Return a sample's images and videos as arguments of Transformers' models."""
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
    """Return the samples as a micro-batch, with the fields of all stages."""
    batch = pack(samples)
    places_M = (batch.token_ids_S <= VIDEO).nonzero().squeeze(1)
    return replace(
        batch,
        image_tokens=len(places_M),
        image_positions_M=places_M,
        image_grids=tuple(grid for sample in samples for grid in sample.grids),
        patches_YX=torch.cat([sample.patches_YX for sample in samples]),
        rope_positions_3S=torch.cat([sample.positions_3S for sample in samples], 1),
    )


def parity_packs(model: ModelConfig) -> list[list[ImageSample]]:
    """Return packs of images (some with partial windows), a video and text, and of text only."""
    first = [((Grid(1, 6, 4), Grid(1, 2, 8)), 9), ((), 7), ((Grid(3, 4, 6),), 8)]
    rows = [first, [((Grid(1, 10, 14),), 6)], [((), 5), ((), 4)]]
    return [
        [sample_of(model, *counts, seed=10 * row + place) for place, counts in enumerate(samples)]
        for row, samples in enumerate(rows)
    ]


def packs_of(model: ModelConfig, number: int, packs: Sequence[Pack]) -> Iterator[MicroBatch]:
    """Yield the packs of step `number`, with loss weights that differ by position."""
    for index, samples in enumerate(packs):
        seed = 100 * number + 10 * index
        made = [sample_of(model, *one, seed=seed + i) for i, one in enumerate(samples)]
        yield with_unequal_weights(pack_of(made))


_LAYOUTS = {
    "toy-qwen3-vl": TensorLayout.QWEN3_VL,
    "toy-qwen3-vl-moe": TensorLayout.QWEN3_VL_MOE_STACKED,
    "toy-qwen3.5": TensorLayout.QWEN3_5,
    "toy-qwen3.5-moe": TensorLayout.QWEN3_5_MOE,
    "toy-qwen2.5-vl": TensorLayout.QWEN2_5_VL,
    "toy-qwen2-vl": TensorLayout.QWEN2_VL,
}
_IDS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO,
    "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip


def transformers_model(model: ModelConfig) -> Any:
    """Return Transformers' model of these sizes, with random weights."""
    layout = _LAYOUTS[model.name + ("-moe" if model.language.kinds[0].experts else "")]
    files = qwen_files(model, model.images, layout, "float32", _IDS)
    config = AutoConfig.for_model(**files[CONFIG_FILE])
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")

"""A toy model, plans with any cuts, and random packs, for the training tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import LossWeighting, sample_loss_weights
from megatron.vlm.inputs.pack_share import PackShare
from megatron.vlm.measure.random_batches import ProfileOptions
from megatron.vlm.step.train import OptimizationOptions
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.config import LanguageConfig, ModelConfig, load_cluster
from omnibal.model.encoders import ClipsEncoder, TilesEncoder
from omnibal.model.levels import Level
from omnibal.model.parallel import Parallel
from omnibal.packing.cut import item_bounds
from omnibal.packing.item_shares import ImagePieces
from omnibal.pipeline.stage_units import Stage, merge_spans
from omnibal.pipeline.unit_runs import stages_from_cuts

IMAGE_TOKEN = 0
AUDIO_TOKEN = 1


def toy_model(**vision_changes: object) -> ModelConfig:
    """Return four vision and three language layers, with all optional parts of InternViT."""
    vision = {
        "layers": 4, "hidden_size": 16, "heads": 4, "ffn_hidden_size": 32, "image_size": 16,
        "patch_size": 4, "normalization": "LayerNorm", "qkv_bias": True, "qk_norm": True,
        "layer_scale_init": 0.1,
    }  # fmt: skip
    return ModelConfig(
        name="toy",
        encoders={"vision": TilesEncoder(**{**vision, **vision_changes})},
        language=LanguageConfig(
            layers=3, hidden_size=24, heads=4, kv_heads=2, ffn_hidden_size=40, vocab_size=50
        ),
    )


def toy_audio_encoder(**changes: object) -> ClipsEncoder:
    """Return four layers like Whisper's, with three tokens per clip."""
    sizes = {
        "layers": 4, "hidden_size": 12, "heads": 3, "ffn_hidden_size": 20, "frames": 12,
        "mel_bins": 5, "normalization": "LayerNorm", "norm_eps": 1e-5, "qkv_bias": True,
        "qk_norm": False,
    }  # fmt: skip
    return ClipsEncoder(**{**sizes, **changes})


def toy_omni_model(**audio_changes: object) -> ModelConfig:
    """Return the toy model with a vision and an audio encoder."""
    model = toy_model()
    audio = toy_audio_encoder(**audio_changes)
    return model.model_copy(update={"encoders": model.encoders | {"audio": audio}})


def toy_text_model(**language_changes: object) -> ModelConfig:
    """Return three language layers without encoder."""
    language = toy_model().language.model_copy(update=language_changes)
    return ModelConfig(name="toy-text", language=language)


def toy_plan(model: ModelConfig, stages: Sequence[Stage], **sizes: object) -> Plan:
    """Return a plan of these parallel sizes, without data or prediction."""
    return Plan(
        model=model,
        precision="fp32",
        parallel=Parallel(**{"pipeline": len(stages), "data": 1, **sizes}),
        stages=tuple(stages),
        cluster=load_cluster("laptop-cpu"),
        data=None,
    )


def cut_plan(
    model: ModelConfig,
    *cuts: int,
    recompute: Mapping[str, tuple[int, ...]] | None = None,
    frozen: tuple[str, ...] = (),
    adapters: AdapterConfig | None = None,
    **sizes: object,
) -> Plan:
    """Return a plan of stages from cut positions, with recomputed layers by tower."""
    plan = toy_plan(model, stages_of(model, *cuts, **(recompute or {})), **sizes)
    return plan.model_copy(update={"frozen": frozen, "adapters": adapters})


def stages_of(model: ModelConfig, *cuts: int, **recompute: tuple[int, ...]) -> list[Stage]:
    """Return stages from cut positions in the unit sequence (1: after the vision embed)."""
    stages = []
    for stage in stages_from_cuts(model, cuts):
        units = [unit for span in stage.units for unit in span.units if unit.layers]
        again = [unit for unit in units if unit.layers[0] in recompute.get(unit.name, ())]
        stages.append(stage.model_copy(update={"recompute": merge_spans(again)}))
    return stages


@dataclass(frozen=True)
class ToySample:
    """Random text, pixels and frames of a sample: image tokens after the first text token, audio
    tokens after the second."""

    ids: list[int]
    loss_mask: list[bool]
    pixels_TCPP: torch.Tensor | None = None
    """None if the model takes no tiles."""
    frames_CBF: torch.Tensor | None = None
    """None if the model takes no recordings."""


def toy_sample(
    model: ModelConfig, tiles: int, text_tokens: int, clips: int = 0, *, seed: int
) -> ToySample:
    random = np.random.default_rng(seed)
    assert not tiles or model.takes_images
    assert not clips or model.takes_audio
    image, sound, items = [], [], dict[str, torch.Tensor]()
    first = 2 if model.takes_audio else len(model.encoders)
    text = random.integers(first, model.language.vocab_size, text_tokens).tolist()
    if model.takes_images:
        image = [IMAGE_TOKEN] * (tiles * model.vision.tokens_per_item)
        size = model.vision.image_size
        items["pixels_TCPP"] = _normal(random, tiles, 3, size, size)
    if model.takes_audio:
        sound = [AUDIO_TOKEN] * (clips * model.audio.tokens_per_item)
        items["frames_CBF"] = _normal(random, clips, model.audio.mel_bins, model.audio.frames)
    return ToySample(
        ids=[text[0], *image, text[1], *sound, *text[2:]],
        loss_mask=[False] * (len(image) + len(sound) + 2) + [True] * (text_tokens - 2),
        **items,
    )


def _normal(random: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(shape).astype(np.float32))


def pack(
    samples: Sequence[ToySample], weighting: LossWeighting = LossWeighting.TOKEN
) -> MicroBatch:
    """Return the samples as one micro-batch, with the fields of all stages."""
    loss_tokens = np.array([sum(sample.loss_mask) for sample in samples])
    weights = np.repeat(sample_loss_weights(loss_tokens, weighting), loss_tokens)
    token_ids = torch.tensor([token for sample in samples for token in sample.ids])
    mask = torch.tensor([learned for sample in samples for learned in sample.loss_mask])
    predicted = mask.nonzero().squeeze(1)
    images: dict[str, torch.Tensor] = {}
    if samples[0].pixels_TCPP is not None:
        images["pixels_TCPP"] = torch.cat([sample.pixels_TCPP for sample in samples])
        images["image_positions_M"] = (token_ids == IMAGE_TOKEN).nonzero().squeeze(1)
    if samples[0].frames_CBF is not None:
        images["frames_CBF"] = torch.cat([sample.frames_CBF for sample in samples])
        images["audio_positions_N"] = (token_ids == AUDIO_TOKEN).nonzero().squeeze(1)
    return MicroBatch(
        tiles=len(images.get("pixels_TCPP", ())),
        clips=len(images.get("frames_CBF", ())),
        tokens=len(token_ids),
        segment_tokens=tuple(len(sample.ids) for sample in samples),
        loss_weight=float(weights.sum()),
        token_ids_S=token_ids,
        **images,
        loss_positions_L=predicted - 1,
        labels_L=token_ids[predicted],
        loss_weights_L=torch.from_numpy(weights),
    )


def share_of(whole: MicroBatch, level: Level, part: int) -> MicroBatch:
    """Return one rank's shard of a pack, cut from all fields token by token."""
    if level.context == 1:
        return whole
    feature, bounds = "tiles", item_bounds(whole.tiles, level.context)
    if whole.patches_YX is not None:
        feature, bounds = "image_tokens", _image_bounds(whole, level)
    share = PackShare.cut(np.array(whole.segment_tokens), level, part, {feature: bounds})
    starts, pieces = np.cumsum(whole.segment_tokens) - whole.segment_tokens, share.pieces
    rows: list[list[int]] = [[] for _ in range(level.context)]  # by rank, in the pack
    for rank, start, first, stop in zip(
        pieces.rank, starts[pieces.sample], pieces.first, pieces.stop, strict=True
    ):
        rows[rank] += range(start + first, start + stop)
    local = {row: index for index, row in enumerate(rows[part])}
    images: dict[str, object] = {}
    if whole.image_positions_M is not None:
        holder = {row: rank for rank, owned in enumerate(rows) for row in owned}
        positions = whole.image_positions_M.tolist()
        per_item = max(len(positions) // max(int(bounds[-1]), 1), 1)
        maker = np.searchsorted(bounds, np.arange(len(positions)) // per_item, "right") - 1
        holders = np.array([holder[position] for position in positions], int)
        made, own = holders[maker == part], holders == part
        counts = [
            tuple(np.bincount(ranks, minlength=level.context).tolist())
            for ranks in (made, maker[own])
        ]
        images = {
            "image_positions_M": torch.tensor(
                [local[position] for position in positions if position in local], dtype=torch.int64
            ),
            "sent_features_F": torch.from_numpy(made.argsort(kind="stable")) if positions else None,
            "feature_counts": tuple(counts) if positions else ((), ()),
            **_own_items(whole, feature, share.own_items(feature)),
        }
    if whole.rope_positions_3S is not None:
        images["rope_positions_3S"] = whole.rope_positions_3S[:, rows[part]]
    kept = [i for i, row in enumerate(whole.loss_positions_L.tolist()) if row in local]
    return MicroBatch(
        **{"tiles": 0, feature: len(share.own_items(feature))},
        tokens=len(local),
        segment_tokens=tuple(share.own_pieces.tokens.tolist()),
        level=whole.level,
        share=share,
        token_ids_S=whole.token_ids_S[rows[part]],
        **images,
        loss_positions_L=torch.tensor(
            [local[whole.loss_positions_L[i].item()] for i in kept], dtype=torch.int64
        ),
        labels_L=whole.labels_L[kept],
        loss_weight=whole.loss_weight * (share.tokens / whole.tokens),
        loss_weights_L=whole.loss_weights_L[kept],
    )


def _image_bounds(whole: MicroBatch, level: Level) -> np.ndarray:
    """Return bounds of each rank's image tokens, as dealt by the planner."""
    grids = zip(_cells(whole), whole.image_grids, strict=True)
    tokens = np.array([cells for cells, grid in grids for _ in range(grid.times)], np.int64)
    pieces = ImagePieces(
        tokens=tokens, squares=tokens**2, sample=0 * tokens, offsets=np.array([0, len(tokens)])
    )
    return pieces.tokens_before(pieces.bounds(level))[0]


def _cells(whole: MicroBatch) -> list[int]:
    """Return the image tokens per frame of each image or video."""
    per_cell = len(whole.patches_YX) // max(whole.image_tokens, 1)
    return [grid.rows * grid.columns // per_cell for grid in whole.image_grids]


def _own_items(whole: MicroBatch, feature: str, own: range) -> dict[str, object]:
    """Return the fields of these items."""
    if feature == "tiles":
        fields = {name: vars(whole)[name] for name in ("pixels_TCPP", "drop_path_keys_T")}
        return {n: None if one is None else one[own.start : own.stop] for n, one in fields.items()}
    per_cell, grids, start = len(whole.patches_YX) // max(whole.image_tokens, 1), [], 0
    for grid, cells in zip(whole.image_grids, _cells(whole), strict=True):
        places = range(start, start + grid.times * cells, cells)
        times = sum(place in own for place in places)
        grids += [grid._replace(times=times)] * (times > 0)
        start = places.stop
    values = whole.patches_YX[own.start * per_cell : own.stop * per_cell]
    return {"image_grids": tuple(grids), "patches_YX": values}


def toy_batch(model: ModelConfig, samples: Sequence[tuple[int, ...]], seed: int) -> MicroBatch:
    """Return a pack of random samples of (tiles, text tokens) or (tiles, text tokens, clips)."""
    return pack(
        [toy_sample(model, *counts, seed=1000 * seed + i) for i, counts in enumerate(samples)]
    )


OPTIONS = OptimizationOptions(
    lr=1e-2, min_lr=1e-3, lr_decay_style="cosine", lr_warmup_fraction=0.1, weight_decay=0.1,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip

PROFILE = ProfileOptions(max_tiles=6, max_tokens=120, tokens_per_sample=24, layers=2, repetitions=1)

"""A toy model, plans that split it anywhere, and random packs, for the training tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.inputs.data import LossWeighting, sample_loss_weights
from megatron.vlm.step.train import OptimizationOptions
from omnibal.config import LanguageConfig, ModelConfig, load_cluster
from omnibal.encoders import TilesEncoder
from omnibal.parallel import Parallel
from omnibal.pipeline.stage import Stage, joined
from omnibal.pipeline.units import stages_from_cuts
from omnibal.plan import Plan

IMAGE_TOKEN = 0


def toy_model(**vision_changes: object) -> ModelConfig:
    """Four vision and three language layers; every optional part of InternViT switched on."""
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


def toy_text_model(**language_changes: object) -> ModelConfig:
    """Three language layers and no encoder."""
    language = toy_model().language.model_copy(update=language_changes)
    return ModelConfig(name="toy-text", language=language)


def toy_plan(
    model: ModelConfig,
    stages: Sequence[Stage],
    data: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
) -> Plan:
    """A hand-written plan, without data or prediction."""
    parallel = Parallel(
        tensor=tensor, pipeline=len(stages), data=data, sequence_parallel=sequence_parallel
    )
    return Plan(
        model=model,
        precision="fp32",
        parallel=parallel,
        stages=tuple(stages),
        cluster=load_cluster("laptop-cpu"),
        data=None,
    )


def stages_of(model: ModelConfig, *cuts: int, **recompute: tuple[int, ...]) -> list[Stage]:
    """Stages from cut positions in the unit sequence (1 is right after the vision embed)."""
    stages = []
    for stage in stages_from_cuts(model, cuts):
        again = [
            unit
            for span in stage.units
            for unit in span.units
            if unit.layers and unit.layers[0] in recompute.get(unit.name, ())
        ]
        stages.append(stage.model_copy(update={"recompute": joined(again)}))
    return stages


@dataclass(frozen=True)
class ToySample:
    """Random text and pixels of one sample, image tokens after the first token."""

    ids: list[int]
    loss_mask: list[bool]
    pixels_TCPP: torch.Tensor | None
    """None where the model has no encoder."""


def toy_sample(model: ModelConfig, tiles: int, text_tokens: int, seed: int) -> ToySample:
    random = np.random.default_rng(seed)
    if not model.encoders:
        assert not tiles
        text = random.integers(0, model.language.vocab_size, text_tokens).tolist()
        mask = [False] * 2 + [True] * (text_tokens - 2)
        return ToySample(ids=text, loss_mask=mask, pixels_TCPP=None)
    image = [IMAGE_TOKEN] * (tiles * model.vision.tokens_per_item)
    text = random.integers(1, model.language.vocab_size, text_tokens).tolist()
    size = model.vision.image_size
    pixels = random.standard_normal((tiles, 3, size, size)).astype(np.float32)
    return ToySample(
        ids=[text[0], *image, *text[1:]],
        loss_mask=[False] * (len(image) + 2) + [True] * (text_tokens - 2),
        pixels_TCPP=torch.from_numpy(pixels),
    )


def pack(
    samples: Sequence[ToySample], weighting: LossWeighting = LossWeighting.TOKEN
) -> MicroBatch:
    """The samples as one micro-batch, with the fields of all stages."""
    loss_tokens = np.array([sum(sample.loss_mask) for sample in samples])
    weights = np.repeat(sample_loss_weights(loss_tokens, weighting), loss_tokens)
    token_ids = torch.tensor([token for sample in samples for token in sample.ids])
    mask = torch.tensor([learned for sample in samples for learned in sample.loss_mask])
    predicted = mask.nonzero().squeeze(1)
    images: dict[str, torch.Tensor] = {}
    if samples[0].pixels_TCPP is not None:
        images["pixels_TCPP"] = torch.cat([sample.pixels_TCPP for sample in samples])
        images["image_positions_M"] = (token_ids == IMAGE_TOKEN).nonzero().squeeze(1)
    return MicroBatch(
        tiles=len(images.get("pixels_TCPP", ())),
        tokens=len(token_ids),
        segment_tokens=tuple(len(sample.ids) for sample in samples),
        token_ids_S=token_ids,
        **images,
        loss_positions_L=predicted - 1,
        labels_L=token_ids[predicted],
        loss_weights_L=torch.from_numpy(weights),
    )


def toy_batch(model: ModelConfig, samples: Sequence[tuple[int, int]], seed: int) -> MicroBatch:
    """A pack of random samples, each given as (tiles, text tokens)."""
    return pack(
        [
            toy_sample(model, tiles, text_tokens, seed=1000 * seed + i)
            for i, (tiles, text_tokens) in enumerate(samples)
        ]
    )


OPTIONS = OptimizationOptions(
    lr=1e-2, min_lr=1e-3, lr_decay_style="cosine", lr_warmup_fraction=0.1, weight_decay=0.1,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
)  # fmt: skip

"""Native-resolution images and videos, and packs of them, at toy size."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from data_cases import Data, noisy_pictures
from native_resolution_cases import qwen2_5_vl, qwen3_5, qwen3_vl
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import ModelConfig

CUTS = (1, 6, 8, 9)
"""Stages: embed, layers, projector and language embed, a layer, other layers and head."""
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
    f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")
]


def native_models() -> dict[str, ModelConfig]:
    """Return toy models of each family, with the vocabulary of `write_tokenizer`."""
    found, made = {}, {"qwen3-vl": qwen3_vl(), "qwen2.5-vl": qwen2_5_vl(), "qwen3.5-vl": qwen3_5()}
    for name, model in made.items():
        small = {"min_pixels": 512, "max_pixels": 4096}
        video = model.images.video.model_copy(update=small)
        larger = model.with_tower("language", vocab_size=320).with_tower("vision", video=video)
        found[name] = larger.model_copy(update={"chat_template": "tokenizer"})
    return found


def write_tokenizer(folder: Path, special: Sequence[str] = SPECIAL) -> None:
    """Write a byte-level tokenizer with a Qwen-like chat template."""
    folder.mkdir(exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["What is it? A cat, 1.5 seconds."] * 3, trainer)
    bpe.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def talk(*texts: str, **shown: Any) -> dict[str, Any]:
    """Return a record of alternating questions and answers."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=False)]
    return {"messages": messages, **shown}


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def write_samples(folder: Path) -> None:
    """Write six samples: images of several sizes, a video between images, text only."""
    for number, size in enumerate([(30, 22), (9, 40), (64, 16), (25, 25)]):
        picture(*size, number).save(folder / f"{number}.png")
    (folder / "clip").mkdir()
    for number in range(5):
        picture(20, 28, 10 + number).save(folder / f"clip/{number}.png")
    records = [
        talk("<image>What is it?", "A cat.", images=["0.png"]),
        talk("<image>a<image>b", "c", "and<image>?", "d", images=["1.png", "2.png", "3.png"]),
        talk("no picture", "none"),
        talk("<image>then<video>What?", "e", "<image>", "f", images=["0.png", "3.png"],
             videos=["clip"]),
        talk("<video>", "g", videos=["clip"]),
        talk("<image>", "h", images=["2.png"]),
    ]  # fmt: skip
    write_records(folder, records)


def write_records(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write annotations and a tokenizer."""
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_tokenizer(folder / "tokenizer")


class NativeData(Data):
    """Samples of a folder for a model, their lengths and packs."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        super().__init__(folder / "a.jsonl", open_tokenizer(folder / "tokenizer"), model)


def data_of(kind: str, folder: Path, tokenizer) -> Data:
    """Return tiled pictures if `kind` is "tiles", else samples for a model of `native_models`."""
    if kind == "tiles":
        return noisy_pictures(folder, tokenizer)
    write_samples(folder)
    return NativeData(folder, native_models()[kind])

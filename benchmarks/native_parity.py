"""Whether images and videos at their native resolution are read as Transformers' processors do.

    python benchmarks/native_parity.py [--images 2000] [--clips 50] [--seed 0]

Makes images (JPEG, PNG, WebP, TIFF; grey, palette, CMYK, with alpha, turned by EXIF; of random
sizes and ratios), folders of frames and, where PyAV is installed, clips (MP4, WebM, AVI), and
conversations of several turns about some of them, in two forms of a record. Each goes through a
pack of this project and through the processor, chat template and `get_rope_index` of Qwen2.5-VL and
of Qwen3-VL, with random limits of pixels: token ids, grids, values of patches, places of image
tokens and positions of RoPE must be equal, bit by bit, and so must the counts of the scan.

Transformers resizes with torchvision, which must be installed. It is given images as its
`load_image` loads them, and all frames of clips as PyAV decodes them.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import load_image
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.video_utils import VideoMetadata

from megatron.vlm.backend import prepare_megatron_core

prepare_megatron_core()

from megatron.vlm.inputs.batch import MicroBatch  # noqa: E402
from megatron.vlm.inputs.data import PackDataset  # noqa: E402
from megatron.vlm.inputs.reader import SampleReader  # noqa: E402
from omnibal.base.errors import UserError  # noqa: E402
from omnibal.data.annotations import Annotations  # noqa: E402
from omnibal.data.scan import scan_lengths  # noqa: E402
from omnibal.data.tokenizer import open_tokenizer  # noqa: E402
from omnibal.families.named import named_model  # noqa: E402
from omnibal.model.config import ModelConfig  # noqa: E402
from omnibal.packing.packs import Packs, ScheduledPacks  # noqa: E402
from omnibal.pipeline.unit_runs import stages_from_cuts  # noqa: E402

# In the manner of the released ones of both families.
TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
    f"<|{name}|>" for name in ("vision_start", "vision_end", "image_pad", "video_pad")
]
WORDS = "What is on this picture? And: 1.5 seconds \u4f60\u597d \n\n a  b \U0001f600"
MODES = (
    "RGB",
    "RGB",
    "RGB",
    "L",
    "P",
    "RGBA",
    "LA",
    "1",
    "CMYK",
    "turned",
    "palette alpha",
)
CODECS = {"mp4": "mpeg4", "avi": "mpeg4", "webm": "libvpx"}
SIDES = (2, 700)
"""Least and largest side of an image in pixels."""


@dataclass(frozen=True)
class Family:
    """One family's model and reference."""

    name: str
    patch: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    processor: str
    video_processor: str
    rope: Any
    vision: dict[str, Any] = field(default_factory=dict)


FAMILIES = (
    Family(
        name="qwen2.5-vl-3b",
        patch=14,
        mean=(0.48145466, 0.4578275, 0.40821073),
        std=(0.26862954, 0.26130258, 0.27577711),
        processor="Qwen2_5_VLProcessor",
        video_processor="Qwen2VLVideoProcessor",
        rope=modeling_qwen2_5_vl.Qwen2_5_VLModel,
        vision={"tokens_per_second": 2},
    ),
    Family(
        name="qwen3-vl-2b",
        patch=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        processor="Qwen3VLProcessor",
        video_processor="Qwen3VLVideoProcessor",
        rope=modeling_qwen3_vl.Qwen3VLModel,
    ),
)


@dataclass(frozen=True)
class Clip:
    """A video: a file, or a folder of frames."""

    path: Path
    frames: list[np.ndarray]
    """Of a file, as PyAV decodes all of them; of a folder, as they are loaded; uint8 [H, W, C]."""
    frames_per_second: float


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with the template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([WORDS] * 3, trainer)
    bpe.add_special_tokens([AddedToken(piece, normalized=False) for piece in SPECIAL])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def noise(rng: random.Random, width: int, height: int) -> Image.Image:
    """Smooth noise, with some that is not smooth."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    coarse = Image.fromarray(numbers.integers(0, 256, (5, 7, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    rough = smooth + numbers.integers(-20, 21, smooth.shape)
    return Image.fromarray(rough.clip(0, 255).astype(np.uint8))


def random_side(rng: random.Random) -> int:
    """A side, evenly spread over magnitudes."""
    least, most = SIDES
    return round(least * (most / least) ** rng.random())


def write_image(path: Path, rng: random.Random) -> Path:
    """An image of a random mode, format, size and ratio."""
    width, height = random_side(rng), random_side(rng)
    while max(width, height) > 200 * min(width, height):
        width, height = random_side(rng), random_side(rng)
    image, mode = noise(rng, width, height), rng.choice(MODES)
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = rng.randint(1, 8)
        suffix = rng.choice(("jpg", "png", "webp", "tif"))
        image.save(path.with_suffix(f".{suffix}"), exif=exif)
        return path.with_suffix(f".{suffix}")
    if mode == "CMYK":
        image.convert("CMYK").save(path.with_suffix(".jpg"), quality=rng.randint(5, 95))
        return path.with_suffix(".jpg")
    if mode == "palette alpha":
        image.convert("P").save(path.with_suffix(".png"), transparency=rng.randint(0, 255))
        return path.with_suffix(".png")
    if mode in ("RGB", "L") and rng.random() < 0.6:
        image.convert(mode).save(path.with_suffix(".jpg"), quality=rng.randint(5, 95))
        return path.with_suffix(".jpg")
    image = image.convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(noise(rng, width, height).convert("L"))
    image.save(path.with_suffix(".png"))
    return path.with_suffix(".png")


def write_clip(path: Path, rng: random.Random) -> Clip:
    """A folder of frames, or a clip where PyAV is installed."""
    width, height = (2 * rng.randint(8, 60) for _ in range(2))
    if find_spec("av") is None or rng.random() < 0.3:
        return _write_folder(path, rng, (width, height))
    import av

    suffix = rng.choice(sorted(CODECS))
    path = path.with_suffix(f".{suffix}")
    rate = rng.choice((1, 5, 12, 24, 25, 30, 60))
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(CODECS[suffix], rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(rng.randint(2, 90)):
            frame = av.VideoFrame.from_image(noise(rng, width, height))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        decoded = [each.to_ndarray(format="rgb24") for each in container.decode(video=0)]
        average: Any = container.streams.video[0].average_rate
        return Clip(path, decoded, float(average))


def _write_folder(path: Path, rng: random.Random, size: tuple[int, int]) -> Clip:
    path.mkdir()
    for number in range(rng.randint(2, 12)):
        noise(rng, *size).save(path / f"{number}.png")
    frames = sorted(path.iterdir(), key=lambda each: int(each.stem))
    return Clip(path, [np.asarray(load_image(str(each))) for each in frames], 2.0)


def conversations(
    images: list[Path], clips: list[Clip], rng: random.Random
) -> Iterator[tuple[dict[str, Any], list[Path | Clip]]]:
    """Records, and what each shows in order, until all images and clips are shown."""
    images, clips = list(images), list(clips)
    while images or clips:
        shown: list[Path | Clip] = []
        for _ in range(rng.randint(1, 4)):
            if clips and (not images or rng.random() < 0.2):
                # All of a conversation files or all frames: the reference samples all or none.
                if all(
                    isinstance(e, Path) or e.path.is_dir() == clips[-1].path.is_dir() for e in shown
                ):
                    shown.append(clips.pop())
            elif images:
                shown.append(images.pop())
        if shown:
            yield _record(shown, rng), shown


def _record(shown: list[Path | Clip], rng: random.Random) -> dict[str, Any]:
    """One conversation in the form of parts, or in that of marks."""
    left, in_parts = list(shown), rng.random() < 0.5
    messages: list[dict[str, Any]] = []
    while left or not messages:
        content: list[dict[str, str]] = []
        for _ in range(rng.randint(0 if messages else 1, 2)):
            if left:
                item = left.pop(0)
                kind = "image" if isinstance(item, Path) else "video"
                name = str(item if isinstance(item, Path) else item.path)
                content.append({"type": kind, kind: name})
            if rng.random() < 0.7:
                content.append({"type": "text", "text": _words(rng)})
        content.append({"type": "text", "text": _words(rng)})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": _words(rng)})
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _words(rng)})
    return {"messages": messages} if in_parts else _with_marks(messages)


def _with_marks(messages: list[dict[str, Any]]) -> dict[str, Any]:
    names: dict[str, list[str]] = {"image": [], "video": []}
    written = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            for part in content:
                if part["type"] in names:
                    names[part["type"]].append(part[part["type"]])
            content = "".join(part.get("text", f"<{part['type']}>") for part in content)
        written.append({"role": message["role"], "content": content})
    named = {f"{kind}s": each for kind, each in names.items() if each}
    return {"messages": written, **named}


def _words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS.split(" "), k=rng.randint(1, 6))).strip() or "a"


def small(family: Family, rng: random.Random) -> ModelConfig:
    """The family's model with random limits of pixels."""
    model = named_model(family.name)
    cell = (2 * family.patch) ** 2
    least = rng.randint(1, 16) * cell
    vision = model.images
    assert vision is not None and vision.video is not None
    video = vision.video.model_copy(
        update={"min_pixels": rng.randint(1, 8) * cell, "max_pixels": rng.randint(40, 300) * cell}
    )
    limits = {"min_pixels": least, "max_pixels": least + rng.randint(20, 500) * cell}
    return model.with_tower("vision", video=video, **limits)


class Reference:
    """Transformers' processor of one family with the model's limits."""

    def __init__(self, family: Family, model: ModelConfig, folder: Path) -> None:
        vision = model.images
        assert vision is not None and vision.video is not None
        cut = {"patch_size": family.patch, "temporal_patch_size": 2, "merge_size": 2}
        same: dict[str, Any] = {"image_mean": family.mean, "image_std": family.std, **cut}
        sizes, video_sizes = (
            {"shortest_edge": each.min_pixels, "longest_edge": each.max_pixels}
            for each in (vision, vision.video)
        )
        videos = getattr(transformers, family.video_processor)
        self._processor = getattr(transformers, family.processor)(
            image_processor=transformers.Qwen2VLImageProcessor(size=sizes, **same),
            tokenizer=PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
            ),
            video_processor=videos(size=video_sizes, cap_pixels_per_frame=False, **same),
            chat_template=TEMPLATE,
        )
        self._family = family

    def __call__(self, record: dict[str, Any], shown: list[Path | Clip]) -> dict[str, Any]:
        """Token ids, grids, values in the order of tokens, and positions."""
        messages = [self._message(message) for message in record["messages"]]
        text = self._processor.apply_chat_template(messages, tokenize=False)
        clips = [each for each in shown if isinstance(each, Clip)]
        images = [_loaded(each) for each in shown if isinstance(each, Path)]
        given: dict[str, Any] = {}
        if images:
            given["images"] = images
        if clips:
            in_files = not clips[0].path.is_dir()
            given["videos"] = [np.stack(clip.frames) for clip in clips]
            sampled = (
                {"do_sample_frames": True, "fps": 2} if in_files else {"do_sample_frames": False}
            )
            given["videos_kwargs"] = {
                **sampled,
                "return_metadata": True,
                "video_metadata": [_metadata(clip) for clip in clips],
            }
        found = self._processor(
            text=[text],
            return_tensors="pt",
            return_mm_token_type_ids=True,
            **given,
        )
        config = {"spatial_merge_size": 2, **self._family.vision}
        model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**config)))
        model.get_vision_position_ids = lambda *args, **more: (
            self._family.rope.get_vision_position_ids(model, *args, **more)
        )
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        positions, _ = self._family.rope.get_rope_index(
            model,
            found["input_ids"],
            found["mm_token_type_ids"],
            **{name: found[name] for name in names if name in found},
        )
        return self._in_order(found, shown) | {"positions": positions[:, 0]}

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        return message if isinstance(content, list) else {**message, "content": _parts(content)}

    def _in_order(self, found: Any, shown: list[Path | Clip]) -> dict[str, Any]:
        left = {}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            grids = found.get(f"{kind}_grid_thw", torch.zeros((0, 3), dtype=torch.int64))
            values = found.get(name, torch.zeros(0))
            left[kind] = iter(
                zip(grids.tolist(), values.split(grids.prod(1).tolist()), strict=True)
            )
        each = [next(left["image" if isinstance(item, Path) else "video"]) for item in shown]
        return {
            "ids": found["input_ids"][0],
            "grids": [tuple(grid) for grid, _ in each],
            "values": torch.cat([values for _, values in each]),
        }


def _loaded(path: Path) -> Image.Image:
    """An image as Transformers loads one by its path, whose alpha it leaves out.

    Of a palette's transparent colour it does so with torchvision alone; else it makes it white.
    """
    image = load_image(str(path))
    image.info.pop("transparency", None)
    return image


def _metadata(clip: Clip) -> VideoMetadata:
    total = len(clip.frames)
    indices = list(range(total)) if clip.path.is_dir() else None
    return VideoMetadata(total_num_frames=total, fps=clip.frames_per_second, frames_indices=indices)


def _parts(text: str) -> list[dict[str, str]]:
    """Text with marks as parts."""
    pieces = text.replace("<image>", "\0image\0").replace("<video>", "\0video\0").split("\0")
    return [
        {"type": piece} if place % 2 else {"type": "text", "text": piece}
        for place, piece in enumerate(pieces)
        if piece
    ]


def micro_batches(
    reader: SampleReader, samples: int, rng: random.Random
) -> tuple[list[list[int]], PackDataset]:
    """Packs of a few samples each, as the trainer reads them whole."""
    lengths = scan_lengths(
        reader.annotations, reader.model, reader.tokenizer, lambda _: None
    ).lengths
    order = rng.sample(range(samples), samples)
    lists = []
    while order:
        count = rng.randint(1, 4)
        lists.append([order.pop() for _ in range(min(count, len(order)))])
    rows = np.arange(len(lists))
    scheduled = ScheduledPacks.of(Packs.from_lists(lists), lengths, rows)
    [whole] = stages_from_cuts(reader.model, ())
    return lists, PackDataset(reader, scheduled, lengths, rows, whole)


def differences(batch: MicroBatch, expected: list[dict[str, Any]], pads: list[int]) -> Counter[str]:
    """What of a micro-batch differs from the reference's samples."""
    ids = torch.cat([each["ids"] for each in expected])
    values = torch.cat([each["values"] for each in expected])
    assert batch.token_ids_S is not None and batch.patches_YX is not None
    assert batch.rope_positions_3S is not None and batch.image_positions_M is not None
    equal = {
        "token ids": torch.equal(batch.token_ids_S, ids),
        "grids": list(batch.image_grids) == [grid for each in expected for grid in each["grids"]],
        "values": torch.equal(batch.patches_YX, values),
        "positions": torch.equal(
            batch.rope_positions_3S, torch.cat([each["positions"] for each in expected], 1)
        ),
        "places": torch.equal(
            batch.image_positions_M, torch.isin(ids, torch.tensor(pads)).nonzero()[:, 0]
        ),
        "counts": (batch.tokens, batch.image_tokens) == (len(ids), len(batch.image_positions_M)),
    }
    return Counter(name for name, is_equal in equal.items() if not is_equal)


def main() -> int:
    """Compare all; the exit status is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--clips", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, wrong = random.Random(arguments.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tokenizer(folder)
        images = [write_image(folder / f"i{k}", rng) for k in range(arguments.images)]
        clips = [write_clip(folder / f"c{k}", rng) for k in range(arguments.clips)]
        for family in FAMILIES:
            found = compare(family, images, clips, folder, rng)
            wrong += found
            files = sum(not clip.path.is_dir() for clip in clips)
            print(
                f"{family.name}: {len(images)} images, {files} clips and {len(clips) - files} "
                f"folders of frames; different: {dict(found) or 'nothing'}"
            )
    return 1 if wrong else 0


def compare(
    family: Family, images: list[Path], clips: list[Clip], folder: Path, rng: random.Random
) -> Counter[str]:
    """What differs, of all images and clips in random conversations."""
    model = small(family, rng)
    reference = Reference(family, model, folder)
    made = list(conversations(images, clips, rng))
    lines = "".join(json.dumps(record) + "\n" for record, _ in made)
    (folder / f"{family.name}.jsonl").write_text(lines)
    tokenizer = open_tokenizer(folder)
    reader = SampleReader(Annotations.open(folder / f"{family.name}.jsonl"), tokenizer, model)
    pads = [tokenizer.require_id(f"<|{kind}_pad|>") for kind in ("image", "video")]
    lists, dataset = micro_batches(reader, len(made), rng)
    wrong = Counter[str]()
    for row, pack in enumerate(lists):
        batch = dataset[row]
        if isinstance(batch, UserError):
            raise batch
        found = differences(batch, [reference(*made[index]) for index in pack], pads)
        if found:
            print(f"{family.name}, pack {pack}: {dict(found)}", file=sys.stderr)
        wrong += found
    return wrong


if __name__ == "__main__":
    sys.exit(main())

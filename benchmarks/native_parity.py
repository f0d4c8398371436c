"""Parity of images and videos at native resolution with Transformers' processors.

    python benchmarks/native_parity.py [--images 2000] [--clips 50] [--seed 0]

Makes images (JPEG, PNG, WebP, TIFF; grey, palette, CMYK, alpha, turned by EXIF; random sizes and
ratios), folders of frames and, if PyAV is installed, clips (MP4, WebM, AVI), and conversations
about them in two forms of records. Each goes through a pack of this project, and through the
processor, chat template and `get_rope_index` of Qwen2.5-VL and Qwen3-VL, with random limits of
pixels. Token ids, grids, patch values, places of image tokens, RoPE positions and the scan's counts
must be bitwise equal.

Transformers resizes with torchvision, which must be installed. It gets images from its
`load_image`, and all frames of clips as decoded by PyAV.
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
from omnibal.data.annotations import Annotations  # noqa: E402
from omnibal.data.scan import scan_lengths  # noqa: E402
from omnibal.data.tokenizer import open_tokenizer  # noqa: E402
from omnibal.families.named import named_model  # noqa: E402
from omnibal.model.config import ModelConfig  # noqa: E402
from omnibal.packing.packs import Packs, ScheduledPacks  # noqa: E402
from omnibal.pipeline.unit_runs import stages_from_cuts  # noqa: E402

# Like the released templates of both families.
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
MODES = ("RGB", "RGB", "RGB", *"L P RGBA LA 1 CMYK turned".split(), "palette alpha")
CODECS = {"mp4": "mpeg4", "avi": "mpeg4", "webm": "libvpx"}
MIN_SIDE, MAX_SIDE = 2, 700  # of images, in pixels


@dataclass(frozen=True)
class Family:
    """A family's model and reference implementation."""

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
    """A video file, or a folder of frames."""

    path: Path
    frames: list[np.ndarray]  # all, uint8 [H, W, C]
    frames_per_second: float


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with the template."""
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
    """Return an image of smooth plus rough noise."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    coarse = Image.fromarray(numbers.integers(0, 256, (5, 7, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    rough = smooth + numbers.integers(-20, 21, smooth.shape)
    return Image.fromarray(rough.clip(0, 255).astype(np.uint8))


def random_side(rng: random.Random) -> int:
    """Return a side in pixels, log-uniform."""
    return round(MIN_SIDE * (MAX_SIDE / MIN_SIDE) ** rng.random())


def write_image(path: Path, rng: random.Random) -> Path:
    """Write an image of random mode, format, size and ratio, and return its path."""
    width, height = random_side(rng), random_side(rng)
    # The processors refuse larger ratios.
    while max(width, height) > 200 * min(width, height):
        width, height = random_side(rng), random_side(rng)
    image, mode = noise(rng, width, height), rng.choice(MODES)
    if mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = rng.randint(1, 8)  # orientation
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
    """Write a folder of frames, or, if PyAV is installed, possibly a clip."""
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
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        average: Any = container.streams.video[0].average_rate
        return Clip(path, decoded, float(average))


def _write_folder(path: Path, rng: random.Random, size: tuple[int, int]) -> Clip:
    path.mkdir()
    for number in range(rng.randint(2, 12)):
        noise(rng, *size).save(path / f"{number}.png")
    frames = sorted(path.iterdir(), key=lambda file: int(file.stem))
    return Clip(path, [np.asarray(load_image(str(frame))) for frame in frames], 2.0)


def conversations(
    images: list[Path], clips: list[Clip], rng: random.Random
) -> Iterator[tuple[dict[str, Any], list[Path | Clip]]]:
    """Yield records with their media in order, until all images and clips are used."""
    images, clips = list(images), list(clips)
    while images or clips:
        shown: list[Path | Clip] = []
        for _ in range(rng.randint(1, 4)):
            if clips and (not images or rng.random() < 0.2):
                # Only files or only folders in a conversation: the processor samples frames of
                # all videos or of none.
                is_folder = {item.path.is_dir() for item in shown if isinstance(item, Clip)}
                if is_folder <= {clips[-1].path.is_dir()}:
                    shown.append(clips.pop())
            elif images:
                shown.append(images.pop())
        if shown:
            yield _record(shown, rng), shown


def _record(shown: list[Path | Clip], rng: random.Random) -> dict[str, Any]:
    """Return a conversation with media as parts of messages, or as marks in texts."""
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
                content.append({"type": "text", "text": _random_text(rng)})
        content.append({"type": "text", "text": _random_text(rng)})
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": _random_text(rng)})
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": _random_text(rng)})
    return {"messages": messages} if in_parts else _with_marks(messages)


def _with_marks(messages: list[dict[str, Any]]) -> dict[str, Any]:
    names: dict[str, list[str]] = {"image": [], "video": []}
    marked = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            for part in content:
                if part["type"] in names:
                    names[part["type"]].append(part[part["type"]])
            content = "".join(part.get("text", f"<{part['type']}>") for part in content)
        marked.append({"role": message["role"], "content": content})
    return {"messages": marked, **{f"{kind}s": files for kind, files in names.items() if files}}


def _random_text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS.split(" "), k=rng.randint(1, 6))).strip() or "a"


def limit_pixels(family: Family, rng: random.Random) -> ModelConfig:
    """Return the family's model with random limits of pixels."""
    model = named_model(family.name)
    cell = (2 * family.patch) ** 2  # pixels of a token: 2 x 2 merged patches
    min_pixels = rng.randint(1, 16) * cell
    vision = model.images
    assert vision is not None and vision.video is not None
    video = vision.video.model_copy(
        update={"min_pixels": rng.randint(1, 8) * cell, "max_pixels": rng.randint(40, 300) * cell}
    )
    limits = {"min_pixels": min_pixels, "max_pixels": min_pixels + rng.randint(20, 500) * cell}
    return model.with_tower("vision", video=video, **limits)


class Reference:
    """Transformers' processor of a family, with the model's limits."""

    def __init__(self, family: Family, model: ModelConfig, folder: Path) -> None:
        vision = model.images
        assert vision is not None and vision.video is not None
        patches = {"patch_size": family.patch, "temporal_patch_size": 2, "merge_size": 2}
        common: dict[str, Any] = {"image_mean": family.mean, "image_std": family.std, **patches}
        # Despite their names, the edges are numbers of pixels.
        sizes, video_sizes = (
            {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
            for limits in (vision, vision.video)
        )
        videos = getattr(transformers, family.video_processor)
        self._processor = getattr(transformers, family.processor)(
            image_processor=transformers.Qwen2VLImageProcessor(size=sizes, **common),
            tokenizer=PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
            ),
            video_processor=videos(size=video_sizes, cap_pixels_per_frame=False, **common),
            chat_template=TEMPLATE,
        )
        self._family = family

    def __call__(self, record: dict[str, Any], shown: list[Path | Clip]) -> dict[str, Any]:
        """Return token ids, grids and values in the order of tokens, and RoPE positions."""
        messages = [self._message(message) for message in record["messages"]]
        text = self._processor.apply_chat_template(messages, tokenize=False)
        clips = [item for item in shown if isinstance(item, Clip)]
        images = [_load_without_alpha(item) for item in shown if isinstance(item, Path)]
        media: dict[str, Any] = {}
        if images:
            media["images"] = images
        if clips:
            is_file = not clips[0].path.is_dir()
            media["videos"] = [np.stack(clip.frames) for clip in clips]
            media["videos_kwargs"] = {
                "do_sample_frames": is_file,
                **({"fps": 2} if is_file else {}),
                "return_metadata": True,
                "video_metadata": [_metadata(clip) for clip in clips],
            }
        inputs = self._processor(
            text=[text], return_tensors="pt", return_mm_token_type_ids=True, **media
        )
        config = {"spatial_merge_size": 2, **self._family.vision}
        # `get_rope_index` needs the model only for its configuration.
        model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(**config)))
        model.get_vision_position_ids = lambda *args, **more: (
            self._family.rope.get_vision_position_ids(model, *args, **more)
        )
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        positions, _ = self._family.rope.get_rope_index(
            model,
            inputs["input_ids"],
            inputs["mm_token_type_ids"],
            **{name: inputs[name] for name in names if name in inputs},
        )
        return self._in_order(inputs, shown) | {"positions": positions[:, 0]}

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        return message if isinstance(content, list) else {**message, "content": _parts(content)}

    def _in_order(self, inputs: Any, shown: list[Path | Clip]) -> dict[str, Any]:
        # The processor returns all images, then all videos.
        pairs = {}
        for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            grids = inputs.get(f"{kind}_grid_thw", torch.zeros((0, 3), dtype=torch.int64))
            values = inputs.get(name, torch.zeros(0)).split(grids.prod(1).tolist())
            pairs[kind] = iter(zip(grids.tolist(), values, strict=True))
        ordered = [next(pairs["image" if isinstance(item, Path) else "video"]) for item in shown]
        return {
            "ids": inputs["input_ids"][0],
            "grids": [tuple(grid) for grid, _ in ordered],
            "values": torch.cat([values for _, values in ordered]),
        }


def _load_without_alpha(path: Path) -> Image.Image:
    image = load_image(str(path))
    # Transformers drops alpha, but a palette's transparent colour becomes white without
    # torchvision.
    image.info.pop("transparency", None)
    return image


def _metadata(clip: Clip) -> VideoMetadata:
    total = len(clip.frames)
    indices = list(range(total)) if clip.path.is_dir() else None
    return VideoMetadata(total_num_frames=total, fps=clip.frames_per_second, frames_indices=indices)


def _parts(text: str) -> list[dict[str, str]]:
    """Return the parts of a text with marks."""
    pieces = text.replace("<image>", "\0image\0").replace("<video>", "\0video\0").split("\0")
    return [
        {"type": piece} if place % 2 else {"type": "text", "text": piece}
        for place, piece in enumerate(pieces)
        if piece
    ]


def micro_batches(
    reader: SampleReader, samples: int, rng: random.Random
) -> tuple[list[list[int]], PackDataset]:
    """Return packs of up to four samples, and the trainer's dataset of them for all units."""
    lengths = scan_lengths(
        reader.annotations, reader.model, reader.tokenizer, lambda _: None
    ).lengths
    order, lists = rng.sample(range(samples), samples), []
    while order:
        count = rng.randint(1, 4)
        lists.append([order.pop() for _ in range(min(count, len(order)))])
    rows = np.arange(len(lists))
    scheduled = ScheduledPacks.from_packs(Packs.from_lists(lists), lengths, rows)
    [stage] = stages_from_cuts(reader.model, ())
    return lists, PackDataset(reader, scheduled, lengths, rows, stage)


def differences(batch: MicroBatch, expected: list[dict[str, Any]], pads: list[int]) -> Counter[str]:
    """Count the tensors of a micro-batch that differ from the reference's samples, by name."""
    ids = torch.cat([sample["ids"] for sample in expected])
    values = torch.cat([sample["values"] for sample in expected])
    positions = torch.cat([sample["positions"] for sample in expected], 1)
    places = torch.isin(ids, torch.tensor(pads)).nonzero()[:, 0]
    assert batch.token_ids_S is not None and batch.patches_YX is not None
    assert batch.rope_positions_3S is not None and batch.image_positions_M is not None
    equal = {
        "token ids": torch.equal(batch.token_ids_S, ids),
        "grids": list(batch.image_grids) == [grid for s in expected for grid in s["grids"]],
        "values": torch.equal(batch.patches_YX, values),
        "positions": torch.equal(batch.rope_positions_3S, positions),
        "places": torch.equal(batch.image_positions_M, places),
        "counts": (batch.tokens, batch.image_tokens) == (len(ids), len(batch.image_positions_M)),
    }
    return Counter(name for name, is_equal in equal.items() if not is_equal)


def main() -> int:
    """Compare both families, and return 1 if anything differs."""
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
            different = compare(family, images, clips, folder, rng)
            wrong += different
            files = sum(not clip.path.is_dir() for clip in clips)
            print(
                f"{family.name}: {len(images)} images, {files} clips and {len(clips) - files} "
                f"folders of frames; different: {dict(different) or 'nothing'}"
            )
    return 1 if wrong else 0


def compare(
    family: Family, images: list[Path], clips: list[Clip], folder: Path, rng: random.Random
) -> Counter[str]:
    """Count differences over all images and clips in random conversations, by tensor."""
    model = limit_pixels(family, rng)
    reference = Reference(family, model, folder)
    samples = list(conversations(images, clips, rng))
    lines = "".join(json.dumps(record) + "\n" for record, _ in samples)
    (folder / f"{family.name}.jsonl").write_text(lines)
    tokenizer = open_tokenizer(folder)
    reader = SampleReader(Annotations.open(folder / f"{family.name}.jsonl"), tokenizer, model)
    pads = [tokenizer.require_id(f"<|{kind}_pad|>") for kind in ("image", "video")]
    lists, dataset = micro_batches(reader, len(samples), rng)
    wrong = Counter[str]()
    for row, pack in enumerate(lists):
        batch = dataset[row]
        different = differences(batch, [reference(*samples[index]) for index in pack], pads)
        if different:
            print(f"{family.name}, pack {pack}: {dict(different)}", file=sys.stderr)
        wrong += different
    return wrong


if __name__ == "__main__":
    sys.exit(main())

"""Tokens of images and videos at native resolution, against Transformers' own processors."""

import ast
import math
import random
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omnibal.data.image_headers import image_size, webp_size
from omnibal.data.native_resolution import (
    SeenVideo,
    image_segments,
    seen_frames,
    segments_of,
    video_grid,
)
from omnibal.data.stored_files import BadFile, ImageFile
from omnibal.model.encoders import ImagesEncoder, ImageText, VideoConfig

SIZES = 2_000


def load_function(module: str, name: str) -> Any:
    """Return a function of a Transformers processor without importing torchvision."""
    path = Path(find_spec("transformers").origin).parent / "models" / f"{module}.py"
    parts = ast.parse(path.read_text()).body
    found = [each for each in parts if isinstance(each, ast.FunctionDef) and each.name == name]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(found, []), str(path), "exec"), names)
    return names[name]


smart_resize = load_function("qwen2_vl/image_processing_qwen2_vl", "smart_resize")
video_resize = load_function("qwen3_vl/video_processing_qwen3_vl", "smart_resize")
glm_resize = load_function("glm4v/image_processing_glm4v", "smart_resize")
navit_resize = load_function("kimi_k25/image_processing_kimi_k25", "navit_resize")


def tower(**changes: object) -> ImagesEncoder:
    """Return a small encoder with Qwen2-VL's resize rule."""
    sizes = {"layers": 1, "hidden_size": 8, "heads": 1, "ffn_hidden_size": 8, "patch_size": 14}
    kinds = {"normalization": "LayerNorm", "qkv_bias": True, "qk_norm": False}
    return ImagesEncoder.model_validate(sizes | kinds | changes)


def sides(rng: random.Random) -> tuple[int, int]:
    """Return a random width and height, some long and narrow."""
    return int(10 ** rng.uniform(0, 4)), int(10 ** rng.uniform(0, 4))


QWEN2 = tower(), lambda h, w: smart_resize(h, w, 28, 56 * 56, 28 * 28 * 1280)
QWEN3 = (
    tower(patch_size=16, min_pixels=65_536, max_pixels=16_777_216),
    lambda h, w: smart_resize(h, w, 32, 65_536, 16_777_216),
)
GLM = (
    tower(frames_per_patch=2, resize="repeated", min_pixels=112 * 112, max_pixels=28 * 28 * 15_000),
    lambda h, w: glm_resize(2, h, w, 2, 28, 112 * 112, 28 * 28 * 15_000),
)
KIMI = (
    tower(resize="padded", max_pixels=16_384 * 14**2, min_pixels=1, max_side_pixels=512 * 14),
    lambda h, w: navit_resize(h, w, 14, 2, 16_384, 512)[1],
)


@pytest.mark.parametrize(("rule", "theirs"), [QWEN2, QWEN3, GLM, KIMI])
def test_images_become_as_many_tokens_as_their_processor_makes(
    rule: ImagesEncoder, theirs: Callable[[int, int], tuple[int, int]]
) -> None:
    """Prevents image lengths that differ from the processor's, which no check would see."""
    rng, refused = random.Random(0), 0
    for _ in range(SIZES):
        width, height = sides(rng)
        try:
            their_height, their_width = theirs(height, width)
        except ValueError:
            refused += 1
            with pytest.raises(BadFile, match="times as long"):
                image_segments(width, height, rule)
            continue
        cells = their_height // rule.cell_pixels * (their_width // rule.cell_pixels)
        assert image_segments(width, height, rule).all_tokens == cells, (width, height)
    assert refused < SIZES / 2 and (refused or rule.resize == "padded")


def test_a_fixed_square_has_the_same_tokens_for_every_image() -> None:
    """Prevents native sizes for Gemma 3, which resizes every image to 896 x 896 pixels."""
    gemma = tower(resize="fixed", max_pixels=896**2, merge_size=4)
    assert {image_segments(*size, gemma).all_tokens for size in ((9, 900), (2_000, 30))} == {256}


@pytest.mark.parametrize("counts_frames", [False, True])
def test_videos_become_as_many_tokens_as_their_processor_makes(counts_frames: bool) -> None:
    """Prevents video frames as large as a single image may be."""
    video = VideoConfig(max_pixels=768 * 32 * 32, min_pixels=4_096, counts_frames=counts_frames)
    rule = tower(patch_size=16, frames_per_patch=2, video=video)
    rng = random.Random(1)
    for _ in range(SIZES):
        (width, height), frames = sides(rng), rng.randint(2, 99)
        limits = video.min_pixels, video.max_pixels
        try:
            their_height, their_width = (
                video_resize(frames, height, width, 2, 32, *limits)
                if counts_frames
                else smart_resize(height, width, 32, *limits)
            )
        except ValueError:
            continue
        found = segments_of(video_grid(frames, width, height, rule), rule)
        assert found.number == -(-frames // 2)
        assert found.tokens == their_height // 32 * (their_width // 32), (frames, width, height)


def test_text_of_a_video_tells_the_time_of_every_patch() -> None:
    """Prevents video text that differs from Qwen3-VL's and GLM's processors."""

    def text_of(frames: int, rule: ImagesEncoder) -> str:
        rate = 1.0 if rule.video is None else rule.video.frames_per_second
        return SeenVideo(tuple(range(frames)), frames, rate).text(rule)

    qwen3 = tower(frames_per_patch=2, video=VideoConfig(times="before", max_frames=3))
    pads = "<|vision_start|><|video_pad|><|vision_end|>"
    # The last patch repeats one frame.
    assert text_of(3, qwen3) == f"<0.2 seconds>{pads}<1.0 seconds>{pads}"
    text = ImageText(before="<b>", each="<i>", after="</b>")
    glm = tower(frames_per_patch=2, video=VideoConfig(times="after", text=text, around=("(", ")")))
    assert text_of(6, glm) == "(<b><i></b>0<b><i></b>1<b><i></b>2)"
    assert text_of(6, tower(frames_per_patch=2, video=VideoConfig())) == pads
    assert seen_frames(9, qwen3.video) == [0, 4, 8] and seen_frames(2, qwen3.video) == [0, 1]
    assert text_of(2, tower()) == "<|vision_start|><|image_pad|><|vision_end|>" * 2


def test_sizes_of_webp_files_are_read_from_their_first_bytes(tmp_path: Path) -> None:
    """Prevents a scan that reads entire files, or accepts a truncated file."""
    rng, path = random.Random(2), tmp_path / "image.webp"
    for options in ({}, {"lossless": True}, {"exif": b"Exif\0\0MM\0*"}):
        for mode in ("RGB", "RGBA"):
            size = rng.randint(1, 300), rng.randint(1, 300)
            Image.new(mode, size, 7).save(path, **options)
            with path.open("rb") as file:
                assert webp_size(file) == image_size(ImageFile(path)) == size
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with path.open("rb") as file:
        assert webp_size(file) is None
    Image.new("RGB", (9, 9)).save(path, "PNG")
    assert image_size(ImageFile(path)) == (9, 9)

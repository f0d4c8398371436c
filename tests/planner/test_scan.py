"""Lengths from headers and text: equal to what is trained on, and strict about images."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from omnibal.config import load_model
from omnibal.data.annotations import Annotations
from omnibal.data.chat import encode_sample
from omnibal.data.scan import scan_lengths
from omnibal.data.tiling import tile_count
from omnibal.errors import UserError

MODEL = load_model("internvl-digits")


def scan_one(folder: Path, name: str, tokenizer):
    """Scan a dataset of one sample about the image of that name."""
    messages = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "7"}]
    (folder / "a.jsonl").write_text(json.dumps({"image": name, "conversations": messages}))
    (folder / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    return scan_lengths(Annotations.open(folder / "meta.json"), MODEL, tokenizer, lambda _: None)


def save_noise(path: Path, width: int = 64, height: int = 32, **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path.read_bytes()


def test_counts_equal_the_encoded_samples(digits, tokenizer):
    """Prevents packs that overflow their caps because the scan counted otherwise than training."""
    annotations = Annotations.open(digits / "train" / "meta.json")
    done = []
    lengths = scan_lengths(annotations, MODEL, tokenizer, done.append)
    assert sum(done) == len(lengths) == len(annotations)
    for index, sample in enumerate(annotations):
        tiles = [
            tile_count(*Image.open(path).size, MODEL.tiling, MODEL.vision.image_size)
            for path in sample.images
        ]
        encoded = encode_sample(sample, tiles, MODEL.tokens_per_tile, tokenizer)
        assert lengths.tiles[index] == sum(tiles)
        assert lengths.tokens[index] == len(encoded.token_ids)
        assert lengths.loss_tokens[index] == encoded.loss_mask.sum()
        assert lengths.source_names[lengths.source[index]] == sample.source


def test_origin_says_what_was_scanned(digits, tokenizer):
    """Prevents a plan from being trained with other data or another tokenizer unnoticed."""
    annotations = Annotations.open(digits / "heldout" / "meta.json")
    origin = scan_lengths(annotations, MODEL, tokenizer, lambda _: None).origin
    assert origin.data_sha256 == annotations.sha256
    assert origin.tokenizer_sha256 == tokenizer.sha256
    assert (origin.image_size, origin.tokens_per_tile) == (32, 16)
    assert origin.tiling == MODEL.tiling


def test_missing_image_is_named(tmp_path, tokenizer):
    """Prevents a run that fails hours in, on the first step that needs the image."""
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: image .*gone\.png does not exist"):
        scan_one(tmp_path, "gone.png", tokenizer)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n", b"no picture" * 20])
def test_unreadable_image_is_named(tmp_path, tokenizer, content):
    """Prevents a traceback from the image library."""
    (tmp_path / "x.png").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: image .*x\.png cannot be read"):
        scan_one(tmp_path, "x.png", tokenizer)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
@pytest.mark.parametrize("lost_bytes", [1, 12, 500])
def test_truncated_image_is_named(tmp_path, tokenizer, suffix, lost_bytes):
    """Prevents a half-downloaded image from passing, since its header alone is whole."""
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(save_noise(path)[:-lost_bytes])
    with pytest.raises(UserError, match=rf"a\.jsonl: line 1: image .*x\.{suffix} is truncated"):
        scan_one(tmp_path, path.name, tokenizer)


def test_truncated_image_with_a_whole_preview(tmp_path, tokenizer):
    """Prevents an embedded preview's end marker from hiding that the image itself is cut."""
    preview = save_noise(tmp_path / "preview.jpg", 16, 16)
    path = tmp_path / "x.jpg"
    path.write_bytes(save_noise(path, 256, 256, comment=preview)[:-2000])
    with pytest.raises(UserError, match="is truncated"):
        scan_one(tmp_path, "x.jpg", tokenizer)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_appended_bytes_are_no_truncation(tmp_path, tokenizer, suffix):
    """Prevents refusing a whole image to which a camera appended its own data."""
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(save_noise(path) + b"trailer " * 1000)
    assert scan_one(tmp_path, path.name, tokenizer).tiles.tolist() == [3]


def test_format_without_end_marker(tmp_path, tokenizer):
    """Prevents formats other than PNG and JPEG from being refused."""
    save_noise(tmp_path / "x.bmp")
    assert scan_one(tmp_path, "x.bmp", tokenizer).tiles.tolist() == [3]


def test_bad_samples_are_named_together(tmp_path, tokenizer):
    """Prevents a run of the scan for each bad image; a repeated sample is no second mistake."""
    messages = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "7"}]
    lines = [json.dumps({"image": f"gone{k}.png", "conversations": messages}) for k in range(9)]
    lines[1] = "{"
    meta = '{"a": {"root": "", "annotation": "a.jsonl", "repeat_time": 2}}'
    (tmp_path / "meta.json").write_text(meta)
    for count, beginning in ((3, "3 bad samples were found: "), (9, "the scan stopped at the fir")):
        (tmp_path / "a.jsonl").write_text("\n".join(lines[:count]))
        with pytest.raises(UserError) as error:
            scan_lengths(Annotations.open(tmp_path / "meta.json"), MODEL, tokenizer, lambda _: None)
        assert str(error.value).startswith(beginning)
        found = re.findall(r"\(\d\) \S+a\.jsonl: line (\d)", str(error.value))
        assert found == ["1", "2", "3", "4", "5"][:count]
        assert "gone2.png does not exist" in str(error.value)


def test_tokenizer_larger_than_the_vocabulary(digits, tokenizer):
    """Prevents token ids beyond the embedding table."""
    language = MODEL.language.model_copy(update={"vocab_size": tokenizer.vocab_size - 1})
    small = MODEL.model_copy(update={"language": language})
    with pytest.raises(UserError, match="but internvl-digits embeds"):
        scan_lengths(Annotations.open(digits / "train/meta.json"), small, tokenizer, lambda _: None)

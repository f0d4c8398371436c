"""Videos in files: what headers say, which frames are seen, and what cannot be read."""

import builtins
import io
import json
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.native_resolution import sampled_frames, video_grid
from omnibal.data.sample import Sample, Turn, Video
from omnibal.data.scan import scan_lengths
from omnibal.data.shown import seen_videos
from omnibal.data.stored_files import VideoFile
from omnibal.data.tokenizer import open_tokenizer
from omnibal.data.video_files import BadVideo, read_video_frames, read_video_header
from omnibal.families.named import named_model

MODELS = {name: named_model(name) for name in ("qwen2.5-vl-3b", "qwen3-vl-2b")}
CODECS = {"mp4": "mpeg4", "avi": "mpeg4", "webm": "libvpx", "mkv": "mpeg4"}
SIZE = (96, 64)


def write_clip(path: Path, frames: int, rate: int = 24) -> list[np.ndarray]:
    """A clip of smooth pictures that differ, and its frames as they are decoded."""
    av: Any = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix[1:]], rate=rate)
        (stream.width, stream.height), stream.pix_fmt = SIZE, "yuv420p"
        for number in range(frames):
            coarse = np.random.default_rng(number).integers(0, 256, (3, 3, 3), np.uint8)
            image = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def write_sound(path: Path) -> None:
    """A file of sound alone."""
    av: Any = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate, frame.time_base = 16_000, Fraction(1, 16_000)
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.parametrize("suffix", sorted(CODECS))
def test_headers_count_the_frames_that_are_decoded(tmp_path, suffix):
    """Prevents: a video whose tokens are not those that were counted, in containers that say how
    many frames they have and in those that do not."""
    for frames in (1, 7, 60):
        path = tmp_path / f"{frames}.{suffix}"
        decoded = write_clip(path, frames, rate=12)
        header = read_video_header(VideoFile(path))
        assert (header.frames, header.frames_per_second) == (len(decoded), 12) == (frames, 12)
        assert (header.width, header.height) == SIZE
        wanted = sorted({0, frames // 2, frames - 1})
        found = read_video_frames(VideoFile(path), wanted)
        assert np.array_equal(found, np.stack([decoded[number] for number in wanted]))


def members_of_a_shard(folder: Path, clip: bytes, record: dict[str, Any]) -> Path:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, content in (("0.json", json.dumps(record).encode()), ("0.mp4", clip)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    (folder / "meta.json").write_text('{"a": {"shards": "a.tar"}}')
    return folder / "meta.json"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_lengths_count_videos_in_every_form(tmp_path, name):
    """Prevents: a form of data whose videos are not counted, or otherwise than in the others."""
    write_clip(tmp_path / "v.mp4", 50)
    model = MODELS[name]
    turns = [
        {"from": "human", "value": "<video>\nWhat?"},
        {"from": "gpt", "value": "a"},
    ]
    messages = [
        {"role": "user", "content": "<video>\nWhat?"},
        {"role": "assistant", "content": "a"},
    ]
    text = {"type": "text", "text": "\nWhat?"}
    url = {"type": "video_url", "video_url": {"url": f"file://{tmp_path}/v.mp4"}}
    in_parts, by_url = (
        [{"role": "user", "content": [part, text]}, messages[1]]
        for part in ({"type": "video", "video": "v.mp4"}, url)
    )
    records = [
        {"video": "v.mp4", "conversations": turns},
        {"videos": ["v.mp4"], "conversations": turns},
        {"video": ["v.mp4"], "messages": messages},
        {"videos": [{"path": "v.mp4"}], "messages": messages},
        {"messages": in_parts},
        {"messages": by_url},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    meta = members_of_a_shard(tmp_path, (tmp_path / "v.mp4").read_bytes(), {"messages": messages})
    tokenizer = tokenizer_of(tmp_path)
    seen = sampled_frames(50, 24, model.images.video, model.images)
    grid = video_grid(len(seen), *SIZE, model.images)
    assert len(seen) == 4 and grid.times == 2
    counts = set()
    for path in (tmp_path / "a.jsonl", meta):
        annotations = Annotations.open(path)
        lengths = scan_lengths(annotations, model, tokenizer, lambda done: None).lengths
        assert set(lengths.column("image_tokens").tolist()) == {grid.patches // 4}
        counts |= set(zip(lengths.tokens.tolist(), lengths.loss_tokens.tolist(), strict=True))
    assert len(counts) == 1


def tokenizer_of(folder: Path):
    """Bytes, and pieces of their own for images and videos."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    bpe.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
    (folder / "t").mkdir()
    bpe.save(str(folder / "t/tokenizer.json"))
    (folder / "t/tokenizer_config.json").write_text("{}")
    (folder / "t/chat_template.jinja").write_text(
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
        "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
        "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
        "{%- elif part.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
        "{%- else -%}{{- part.text -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )
    return open_tokenizer(folder / "t")


def test_bad_videos_are_named_in_one_line(tmp_path):
    """Prevents: a traceback, or a scan that ends, for one file among many."""
    write_clip(tmp_path / "short.mp4", 1)
    whole = write_clip(tmp_path / "whole.mp4", 30)
    write_sound(tmp_path / "sound.mp4")
    content = (tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.mp4").write_text("no video" * 99)
    (tmp_path / "folder.mp4").mkdir()
    write_clip(tmp_path / "half.avi", 30)
    content = (tmp_path / "half.avi").read_bytes()
    (tmp_path / "half.avi").write_bytes(content[: len(content) // 2])
    (tmp_path / "one").mkdir()
    Image.new("RGB", SIZE).save(tmp_path / "one" / "0.png")
    names = ("short.mp4", "sound.mp4", "cut.mp4", "text.mp4", "folder.mp4", "gone.mp4")
    names = (*names, "half.avi", "one", "whole.mp4")
    reasons = {
        "short.mp4": "has 1 frame(s), and 2 share a patch; name it as an image",
        "sound.mp4": "has no video stream; replace the file",
        "cut.mp4": "cannot be read (",
        "text.mp4": "cannot be read (",
        "folder.mp4": "is a folder; name a file",
        "gone.mp4": "does not exist; correct the path",
        "half.avi": "is cut off; replace the file",
        "one/0.png": "has 1 frame(s), and 2 share a patch; name it as an image",
    }
    messages = [{"role": "user", "content": "<video>"}, {"role": "assistant", "content": "a"}]
    lines = [json.dumps({"messages": messages, "videos": [name]}) for name in names]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    annotations, tokenizer = Annotations.open(tmp_path / "a.jsonl"), tokenizer_of(tmp_path)
    for model in MODELS.values():
        scan = scan_lengths(annotations, model, tokenizer, lambda done: None, on_error="skip")
        assert scan.lengths.sample.tolist() == [len(names) - 1] and len(whole) == 30
        for bad, (name, reason) in zip(scan.skipped, reasons.items(), strict=True):
            assert bad.reason.startswith(f"video {tmp_path / name} {reason}")
            assert "\n" not in bad.message and bad.message.startswith(bad.where)


def test_a_file_that_ends_early_is_found_where_it_is_decoded(tmp_path):
    """Prevents: a run that stops unexplained, as a header promises frames that are not there."""
    frames = write_clip(tmp_path / "a.mp4", 20)
    with pytest.raises(BadVideo, match="ends before frame 20, which its header counts"):
        read_video_frames(VideoFile(tmp_path / "a.mp4"), [0, len(frames)])


def test_without_pyav_a_line_says_what_to_install(tmp_path, monkeypatch):
    """Prevents: a traceback where the extra is not installed."""
    imported = builtins.__import__

    def refusing(name, *args, **kwargs):
        if name == "av":
            raise ImportError("no av")
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)
    sample = Sample(
        identity="x", source="x", where="x: line 1", images=(),
        videos=(Video(file=VideoFile(tmp_path / "a.mp4")),), turns=(Turn("<video>", "a", None),),
    )  # fmt: skip
    with pytest.raises(UserError, match=r'not installed; install it: pip install "omnibal\[video'):
        seen_videos(sample, MODELS["qwen3-vl-2b"].images)


def test_frames_are_those_that_the_processors_choose():
    """Prevents: videos of which other frames are seen than in Transformers: counts by hand, and
    frames of both rules spelled out."""
    older, newer = (model.images for model in MODELS.values())

    def of(rule, frames, rate):
        return sampled_frames(frames, rate, rule.video, rule)

    assert of(older, 100, 25) == [0, 12, 25, 37, 50, 62, 75, 87]
    assert of(newer, 100, 25) == [0, 14, 28, 42, 57, 71, 85, 99]
    # Never fewer than four, if there are as many; of Qwen2.5-VL an even number.
    assert of(older, 30, 30) == [0, 7, 15, 22] and of(older, 3, 30) == [0, 1]
    assert of(newer, 30, 30) == [0, 10, 19, 29] and of(newer, 3, 30) == [0, 1, 2]
    assert len(of(older, 100_000, 10)) == len(of(newer, 100_000, 10)) == 768
    assert of(older, 7, 1) == [0, 1, 2, 3, 4, 5]

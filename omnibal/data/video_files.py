"""Video headers and frames, read with PyAV (extra `video`).

Shapes: F frames, H rows and W columns of pixels, C channels.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any

import numpy as np

from omnibal.base.errors import UserError
from omnibal.data.stored_files import REPLACE_REMEDY, BadFile, VideoFile, bad_file_errors

_HEAD_BYTES = 128  # enough for the size fields of all formats
_UNKNOWN_SIZE = 0xFFFFFFFF  # size of an AVI in a non-seekable output
_EBML = b"\x1a\x45\xdf\xa3"  # first id of Matroska; the next element's has 4 bytes too
# Parts of an MP4 or MOV.
_BOX_NAMES = frozenset(
    b"ftyp styp moov moof mdat mfra sidx free skip wide uuid meta udta pnot".split()
)
_MAX_BOXES = 100_000
_CACHED_HEADERS = 4_096  # enough for a pack's samples, which are read twice


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """Header of the first video stream."""

    frames: int
    frames_per_second: float
    width: int  # decoded size in pixels, like `height`
    height: int


@lru_cache(maxsize=_CACHED_HEADERS)
def read_video_header(video: VideoFile) -> VideoHeader:
    """Return frame (or packet) count, rate and size without decoding; raises BadFile."""
    with _open_video(video) as (container, stream):
        frames = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        rate = stream.average_rate or stream.guessed_rate
        fields = {"frames": frames, "rate": rate, "size": stream.width * stream.height}
        missing = [name for name, value in fields.items() if not value]
        if missing:
            raise BadFile(f"has no {' and no '.join(missing)}; {REPLACE_REMEDY}")
        return VideoHeader(frames, float(rate), stream.width, stream.height)


def read_video_frames(video: VideoFile, wanted: Sequence[int]) -> np.ndarray:
    """Return frames at ascending indices `wanted`, RGB, uint8 [F, H, W, C]; raises BadFile."""
    frames: list[np.ndarray] = []
    left = list(wanted)
    with _open_video(video) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            while left and left[0] == number:
                frames.append(frame.to_ndarray(format="rgb24"))
                left.pop(0)
            if not left:
                break
    if left:
        raise BadFile(f"ends before frame {left[0]}, which its header counts; {REPLACE_REMEDY}")
    if len({frame.shape for frame in frames}) > 1:
        raise BadFile(f"has frames of different sizes; {REPLACE_REMEDY}")
    return np.stack(frames)


def _read_stated_end(file: IO[bytes]) -> int:
    """Return the bytes that an AVI's, Matroska's or MP4's headers state, 0 if unknown."""
    head, end = _read_head(file, 0), 0
    if head.startswith(b"RIFF"):
        size = int.from_bytes(head[4:8], "little")
        return 0 if size == _UNKNOWN_SIZE else size + 8
    if head.startswith(_EBML):
        start, size = _read_matroska_size(head, len(_EBML))
        start, size = _read_matroska_size(head, start + size + len(_EBML))
        return start + size if size else 0
    for _ in range(_MAX_BOXES):
        box = _read_head(file, end)
        size = int.from_bytes(box[:4]) if box[:4] != b"\0\0\0\1" else int.from_bytes(box[8:16])
        if box[4:8] not in _BOX_NAMES or size < 8:  # 0: the last, to the end
            break
        end += size
    return end


def _read_head(file: IO[bytes], place: int) -> bytes:
    file.seek(place)
    return file.read(_HEAD_BYTES)


def _read_matroska_size(head: bytes, place: int) -> tuple[int, int]:
    """Return the place after a variable-width size field, and the size, 0 if unknown."""
    width = 9 - int.from_bytes(head[place : place + 1]).bit_length()
    unknown = (1 << 7 * width) - 1  # all ones
    size = int.from_bytes(head[place : place + width]) & unknown
    return place + width, 0 if size == unknown else size


@contextmanager
def _open_video(video: VideoFile) -> Iterator[tuple[Any, Any]]:
    """Yield a complete video's PyAV container and first stream; raises BadFile."""
    try:
        import av
    except ImportError as error:
        raise UserError(
            f'{video}: is read with PyAV: pip install "omnibal[video]", or name a folder of frames'
        ) from error
    try:
        with bad_file_errors(), video.open() as file:
            stated = _read_stated_end(file)
            if file.seek(0, os.SEEK_END) < stated:
                raise BadFile(f"is cut off; {REPLACE_REMEDY}")
            file.seek(0)
            with av.open(file) as container:
                streams = container.streams.video
                if not streams:
                    raise BadFile(f"has no video stream; {REPLACE_REMEDY}")
                yield container, streams[0]
    except av.FFmpegError as error:
        raise BadFile(f"cannot be read ({error.strerror}); {REPLACE_REMEDY}") from error

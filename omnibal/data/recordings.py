"""Recordings: duration from the header, clips, and their log-mel features.

A recording is cut into equal clips at 16 kHz, the last padded with silence. Each clip is decoded
and resampled on its own. Features are Whisper's (Radford et al. 2022, arXiv 2212.04356, 2.2): 25 ms
windows every 10 ms, floored 8 decades below the clip's maximum, then scaled to about -1 to 1.

Shapes: C clips, S samples of a clip, F frames, W samples of a window, Q frequencies, B mel bins.
"""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import BinaryIO

import numpy as np
import soundfile

from omnibal.data.stored_files import REPLACE_REMEDY, AudioFile, BadFile, bad_file_errors

_TRUNCATED = "is truncated; fetch the file again or remove the sample"
_ENCODE_REMEDY = "encode it again, as with `ffmpeg -i IN a.flac`"
RATE_HZ = 16_000  # Whisper's sample rate
SAMPLES_PER_FRAME = 160  # samples between log-mel frames: 10 ms

_SOUND_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC")
_MIN_HZ, _MAX_HZ, _MAX_CHANNELS = 1_000, 384_000, 64  # accepted range
# WAV data sizes of piped files or above 4 GiB: data extends to the end of the file.
_UNKNOWN_SIZES = (2**32 - 1, 2**31 - 1, 2**31 - 4096)
_UNKNOWN_SAMPLES = 2**63 - 1  # libsndfile's length of a FLAC without a stated length
_FILTER_REACH = 10  # half-width of scipy's filter, in samples at the lower rate
_WINDOW_SAMPLES = 400  # 25 ms, as in Whisper
_MIN_POWER = 1e-10  # Whisper's floor
_DECADES = 8.0  # Whisper's dynamic range
# Slaney's scale: linear up to 1 kHz, then 27 steps per factor of 6.4.
_HZ_PER_MEL, _LINEAR_HZ, _MELS_PER_NATURAL = 200 / 3, 1_000.0, 27 / np.log(6.4)


@dataclass(frozen=True, slots=True)
class Duration:
    samples: int  # samples per channel, at least 1
    rate_hz: int

    def clips(self, frames: int) -> int:
        """Count the clips of `frames` frames, at least 1.

        Example:
            >>> Duration(samples=44_100 * 61, rate_hz=44_100).clips(3_000)
            3
        """
        resampled = -(-self.samples * RATE_HZ // self.rate_hz)
        return -(-resampled // (frames * SAMPLES_PER_FRAME))


def read_duration(recording: AudioFile) -> Duration:
    """Return the header's duration. BadFile if truncated: the last sample is decoded too."""
    with _open_sound(recording) as (sound, is_cut):
        try:
            sound.seek(sound.frames - 1)
            has_end = len(sound.read(1)) > 0
        except soundfile.LibsndfileError as error:
            raise BadFile(_TRUNCATED) from error
        if is_cut or not has_end:
            raise BadFile(_TRUNCATED)
        return Duration(sound.frames, sound.samplerate)


def read_clips(recording: AudioFile, wanted: range, frames: int) -> np.ndarray:
    """Decode clips of these indices, 16 kHz mono, float32 [C, S = 160 * frames], padded with 0."""
    # Imported here: slow to import, and scans read only headers.
    from scipy.signal import resample_poly

    waves_CS = np.zeros((len(wanted), frames * SAMPLES_PER_FRAME), np.float32)
    with _open_sound(recording) as (sound, _):
        common = gcd(RATE_HZ, sound.samplerate)
        up, down = RATE_HZ // common, sound.samplerate // common
        reach = -(-_FILTER_REACH * max(up, down) // up) + 1
        for wave_S, number in zip(waves_CS, wanted, strict=True):
            # Decode with margins for the filter, from an input sample that is also an output one.
            start, samples = number * len(wave_S), len(wave_S)
            first = max(0, start * down // up - reach) // down * down
            stop = min(sound.frames, -(-(start + samples) * down // up) + reach)
            sound.seek(first)
            decoded = sound.read(stop - first, dtype="float32", always_2d=True)
            if len(decoded) < stop - first:
                raise BadFile(_TRUNCATED)
            if not np.isfinite(decoded).all():
                raise BadFile(f"has samples that are not finite; {REPLACE_REMEDY}")
            offset = start - first // down * up
            part = resample_poly(decoded.mean(axis=1), up, down)[offset : offset + samples]
            wave_S[: len(part)] = part
    return waves_CS


@contextmanager
def _open_sound(recording: AudioFile) -> Iterator[tuple[soundfile.SoundFile, bool]]:
    """Yield a supported recording, and whether it is a WAV that ends before its data does."""
    try:
        with bad_file_errors(), recording.open() as file:
            is_cut, unfinished = _check_wav_data(file)
            file.seek(0)
            given: BinaryIO = file
            if unfinished is not None:
                content = bytearray(file.read())
                content[unfinished : unfinished + 4] = b"\xff" * 4  # unknown size: decode all data
                given = io.BytesIO(content)
            with soundfile.SoundFile(given) as sound:
                _check_sound(sound)
                yield sound, is_cut
    except soundfile.LibsndfileError as error:
        # `str(error)` would begin with the address of the file object.
        raise BadFile(f"cannot be read ({error.error_string}); {REPLACE_REMEDY}") from error


def _check_sound(sound: soundfile.SoundFile) -> None:
    if sound.format not in _SOUND_FORMATS:
        raise BadFile(f"is {sound.format}, and must be WAV or FLAC; {_ENCODE_REMEDY}")
    if sound.frames == _UNKNOWN_SAMPLES:
        raise BadFile(f"does not state its length; {_ENCODE_REMEDY}")
    if sound.frames < 1:
        raise BadFile(f"has no samples; {REPLACE_REMEDY}")
    if not _MIN_HZ <= sound.samplerate <= _MAX_HZ or sound.channels > _MAX_CHANNELS:
        raise BadFile(
            f"has {sound.samplerate} samples per second in {sound.channels} channel(s), and must "
            f"have {_MIN_HZ} to {_MAX_HZ} in at most {_MAX_CHANNELS}; {REPLACE_REMEDY}"
        )


def _check_wav_data(file: BinaryIO) -> tuple[bool, int | None]:
    """Return whether a WAV ends before its data does, which libsndfile does not report, and the
    place of the data's size if that is 0 although data follow.
    """
    size = file.seek(0, 2)
    file.seek(0)
    head = file.read(8)
    form = {b"RIFF": "<4sI", b"RIFX": ">4sI"}.get(head[:4])
    if form is None or len(head) < 8:
        return False, None
    is_behind = 8 + struct.unpack(form, head)[1] < size  # whether data may follow the stated end
    file.seek(12)
    while len(head := file.read(8)) == 8:
        name, length = struct.unpack(form, head)
        if name == b"data":
            start = file.tell()
            is_cut = length not in _UNKNOWN_SIZES and start + length > size
            return is_cut, start - 4 if is_behind and not length and start < size else None
        file.seek(length + length % 2, 1)  # chunks are 2-byte aligned
    return False, None


def log_mel(wave_S: np.ndarray, mel_bins: int) -> np.ndarray:
    """Return log-mel features of a 16 kHz clip, float32 [B, F = S / 160]. S is 160 n, n >= 2."""
    mirrored = np.pad(wave_S.astype(np.float64), _WINDOW_SAMPLES // 2, mode="reflect")
    windows_FW = np.lib.stride_tricks.sliding_window_view(mirrored, _WINDOW_SAMPLES)[
        ::SAMPLES_PER_FRAME
    ]
    hann_W = np.sin(np.pi * np.arange(_WINDOW_SAMPLES) / _WINDOW_SAMPLES) ** 2  # periodic
    # Whisper drops the last frame, centred on the end of the clip.
    spectrum_FQ = np.fft.rfft(windows_FW[:-1] * hann_W)
    power_FQ = spectrum_FQ.real**2 + spectrum_FQ.imag**2
    power_BF = mel_filters(mel_bins) @ power_FQ.T
    decades_BF = np.log10(np.maximum(power_BF, _MIN_POWER))
    raised_BF = np.maximum(decades_BF, decades_BF.max() - _DECADES)
    return ((raised_BF + 4) / 4).astype(np.float32)


@lru_cache
def mel_filters(mel_bins: int) -> np.ndarray:
    """Return triangular filters of equal area from 0 to 8 kHz, float64 [B, Q]."""
    frequencies_Q = np.fft.rfftfreq(_WINDOW_SAMPLES, 1 / RATE_HZ)
    max_mels = _LINEAR_HZ / _HZ_PER_MEL + np.log(RATE_HZ / 2 / _LINEAR_HZ) * _MELS_PER_NATURAL
    mels, linear = np.linspace(0, max_mels, mel_bins + 2), _LINEAR_HZ / _HZ_PER_MEL
    above = np.exp(np.maximum(mels - linear, 0) / _MELS_PER_NATURAL)
    corners = np.minimum(mels, linear) * _HZ_PER_MEL * above
    low, middle, high = (corners[k : mel_bins + k, None] for k in range(3))
    rising_BQ = (frequencies_Q - low) / (middle - low)
    falling_BQ = (high - frequencies_Q) / (high - middle)
    return np.maximum(0, np.minimum(rising_BQ, falling_BQ)) * 2 / (high - low)

"""Whisper's log-mel features of a clip (Radford et al. 2022, arXiv 2212.04356, 2.2).

25 ms windows every 10 ms. Values are floored 8 decades below the clip's maximum, then scaled to
about -1 to 1. Shapes: S samples, F frames, W samples of a window, Q frequencies, B mel bins.
"""

from functools import lru_cache

import numpy as np

from omnibal.data.recordings import RATE_HZ, SAMPLES_PER_FRAME

_WINDOW = 400  # samples, 25 ms, as Whisper has them
_LEAST_POWER = 1e-10  # Whisper's floor
_DECADES = 8.0  # Whisper's dynamic range
# Slaney's scale: linear up to 1 kHz, then 27 steps per factor of 6.4.
_HZ_PER_MEL, _LINEAR_HZ, _MELS_PER_NATURAL = 200 / 3, 1_000.0, 27 / np.log(6.4)


def log_mel(wave_S: np.ndarray, mel_bins: int) -> np.ndarray:
    """Features of a 16 kHz clip, float32 [B, F]; S is a multiple of 160, at least 320."""
    mirrored = np.pad(wave_S.astype(np.float64), _WINDOW // 2, mode="reflect")
    windows_FW = np.lib.stride_tricks.sliding_window_view(mirrored, _WINDOW)[::SAMPLES_PER_FRAME]
    # The last frame, centred on the end of the clip, is dropped.
    hann_W = np.sin(np.pi * np.arange(_WINDOW) / _WINDOW) ** 2  # periodic
    spectrum_FQ = np.fft.rfft(windows_FW[:-1] * hann_W)
    power_FQ = spectrum_FQ.real**2 + spectrum_FQ.imag**2
    power_BF = mel_filters(mel_bins) @ power_FQ.T
    decades_BF = np.log10(np.maximum(power_BF, _LEAST_POWER))
    raised_BF = np.maximum(decades_BF, decades_BF.max() - _DECADES)
    return ((raised_BF + 4) / 4).astype(np.float32)


@lru_cache
def mel_filters(mel_bins: int) -> np.ndarray:
    """Equal-area triangular filters from 0 to 8 kHz, float64 [B, Q]."""
    frequencies_Q = np.fft.rfftfreq(_WINDOW, 1 / RATE_HZ)
    most_mels = _LINEAR_HZ / _HZ_PER_MEL + np.log(RATE_HZ / 2 / _LINEAR_HZ) * _MELS_PER_NATURAL
    mels, linear = np.linspace(0, most_mels, mel_bins + 2), _LINEAR_HZ / _HZ_PER_MEL
    above = np.exp(np.maximum(mels - linear, 0) / _MELS_PER_NATURAL)
    corners = np.minimum(mels, linear) * _HZ_PER_MEL * above
    low, middle, high = (corners[k : mel_bins + k, None] for k in range(3))
    rising_BQ = (frequencies_Q - low) / (middle - low)
    falling_BQ = (high - frequencies_Q) / (high - middle)
    return np.maximum(0, np.minimum(rising_BQ, falling_BQ)) * 2 / (high - low)

"""Embeddings of encoders: tiles (InternVL), clips (Whisper) and patches (Qwen) to positions.

Shapes: V positions of an item, H hidden size of the encoder. Tiles: T tiles, C channels, P pixels
per side. Clips: C clips, B mel bins, F frames, twice the positions. Images and videos at native
resolution are one sequence of P positions (patches) of X values.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange

from megatron.vlm.model.image_places import ImagePlaces
from omnibal.model.encoders import ClipsEncoder, ImagesEncoder, TilesEncoder

IMAGE_CHANNELS = 3
_LONGEST_PERIOD = 10_000  # of Whisper's sinusoids, in units of 2 pi


class VisionEmbedding(torch.nn.Module):
    """InternVL's patch embedding of tiles, with a class token and learned positions."""

    def __init__(self, vision: TilesEncoder, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch_size = vision.patch_size
        patch_values = IMAGE_CHANNELS * vision.patch_size**2
        self.patch_projection = torch.nn.Linear(patch_values, vision.hidden_size, dtype=dtype)
        self.class_token = torch.nn.Parameter(torch.zeros(vision.hidden_size, dtype=dtype))
        self.positions = torch.nn.Parameter(
            torch.zeros(vision.positions_per_item, vision.hidden_size, dtype=dtype)
        )

    def forward(self, pixels_TCPP: torch.Tensor) -> torch.Tensor:
        """Embed tiles: [T, C, P, P] to [V, T, H]."""
        patches = rearrange(
            pixels_TCPP.to(self.positions.dtype),
            "t c (row p1) (column p2) -> (row column) t (c p1 p2)",
            p1=self.patch_size,
            p2=self.patch_size,
        )
        embedded = self.patch_projection(patches)  # [V - 1, T, H]
        class_tokens = self.class_token.expand(1, embedded.shape[1], -1)
        return torch.cat([class_tokens, embedded]) + self.positions.unsqueeze(1)


class AudioEmbedding(torch.nn.Module):
    """Whisper's two convolutions with GELU, plus fixed sinusoids."""

    def __init__(self, audio: ClipsEncoder, dtype: torch.dtype) -> None:
        super().__init__()
        width = audio.hidden_size
        self.conv1 = torch.nn.Conv1d(audio.mel_bins, width, 3, padding=1, dtype=dtype)
        self.conv2 = torch.nn.Conv1d(width, width, 3, stride=2, padding=1, dtype=dtype)
        positions_VH = sinusoids(audio.positions_per_item, width).to(dtype)
        self.register_buffer("positions", positions_VH, persistent=False)

    def forward(self, frames_CBF: torch.Tensor) -> torch.Tensor:
        """Embed clips: [C, B, F] to [V, C, H]."""
        # One expression, so that no name keeps intermediate tensors alive.
        hidden_CHV = F.gelu(self.conv2(F.gelu(self.conv1(frames_CBF.to(self.conv1.weight.dtype)))))
        # Contiguous before the positions are added, as the sum would keep the strides.
        return rearrange(hidden_CHV, "c h v -> v c h").contiguous() + self.positions.unsqueeze(1)


class ImageEmbedding(torch.nn.Module):
    """Qwen's patch embedding, with learned positions, if any, interpolated over each image."""

    def __init__(self, tower: ImagesEncoder, dtype: torch.dtype) -> None:
        super().__init__()
        width = tower.hidden_size
        self.patch_projection = torch.nn.Linear(
            tower.values_per_patch, width, bias=tower.patch_bias, dtype=dtype
        )
        self.positions = None
        if tower.learned_positions:
            positions_NH = torch.zeros(tower.learned_positions, width, dtype=dtype)
            self.positions = torch.nn.Parameter(positions_NH)

    def forward(self, patches_PX: torch.Tensor, places: ImagePlaces) -> torch.Tensor:
        """Embed patches: [P, X] to [P, 1, H], in layer order."""
        dtype = self.patch_projection.weight.dtype
        patches_P1X = places.sort_patches(patches_PX.to(dtype)).unsqueeze(1)
        embedded_P1H = self.patch_projection(patches_P1X)
        if self.positions is not None:
            neighbours_P4, weights_P4 = places.neighbours()
            # Summed in float32: 16-bit weights would not add up to 1.
            positions_PH = F.embedding_bag(
                neighbours_P4, self.positions.float(), per_sample_weights=weights_P4, mode="sum"
            ).to(dtype)
            embedded_P1H = embedded_P1H + positions_PH.unsqueeze(1)
        return embedded_P1H


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Return Whisper's positions, float32 [positions, width].

    Sines, then cosines, with periods from 2 pi to 20,000 pi; not interleaved as in section 3.5 of
    Vaswani et al. 2017 (arXiv 1706.03762).
    """
    rates = torch.arange(width // 2) * (-math.log(_LONGEST_PERIOD) / (width // 2 - 1))
    angles = torch.arange(positions).unsqueeze(1) * rates.exp()
    return torch.cat([angles.sin(), angles.cos()], 1)

"""Whisper's encoder around its layers: log-mel frames to positions, positions to audio features.

Shapes: C clips, B mel bins, F frames of a clip, V positions of a clip (half its frames), H audio
hidden size, K audio tokens over all clips, E language hidden size.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.model.fused.activations import bias_gelu
from megatron.vlm.model.layers import Norm, projector_linears
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import ClipsEncoder

_LONGEST_PERIOD = 10_000  # of Whisper's sinusoids


class AudioEmbedding(torch.nn.Module):
    """Two convolutions with GELU, plus fixed sinusoids."""

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
        # Contiguous in layer layout before the positions are added.
        return rearrange(hidden_CHV, "c h v -> v c h").contiguous() + self.positions.unsqueeze(1)


class AudioProjector(MegatronModule):
    """Final norm, stacked neighbouring positions, and an MLP: Linear, GELU, Linear."""

    def __init__(
        self, model: ModelConfig, config: TransformerConfig, tp_group: dist.ProcessGroup
    ) -> None:
        super().__init__(config)
        self.tp_group = tp_group
        audio, width = model.audio, model.language.hidden_size
        self.positions_per_token = audio.positions_per_token
        self.norm = Norm(config, audio.hidden_size, audio.norm_eps)
        wide = audio.projector_input_size
        self.linear_fc1, self.linear_fc2 = projector_linears(config, tp_group, wide, width, width)

    def forward(self, hidden_VCH: torch.Tensor) -> torch.Tensor:
        """Project [V, C, H] to [K, E]; clips stay in order."""
        stacked = rearrange(
            self.norm(hidden_VCH), "(k n) c h -> (c k) (n h)", n=self.positions_per_token
        )
        return self.linear_fc2(bias_gelu(*self.linear_fc1(stacked)))[0]


def sinusoids(positions: int, width: int) -> torch.Tensor:
    """Return Whisper's positions: sines, then cosines, with periods from 2 pi to 20,000 pi.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.5, not interleaved. float32 [positions, width]
    """
    rates = torch.arange(width // 2) * (-math.log(_LONGEST_PERIOD) / (width // 2 - 1))
    angles = torch.arange(positions).unsqueeze(1) * rates.exp()
    return torch.cat([angles.sin(), angles.cos()], 1)

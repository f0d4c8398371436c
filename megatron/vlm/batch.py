"""One micro-batch as tensors; each pipeline stage holds only the fields its units need.

Shapes: T tiles, C channels, P pixels per side, S packed tokens, M image tokens, L loss positions,
A answers.
"""

from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """A pack of samples. The counts are known on every stage, the tensors where they are used."""

    tiles: int
    tokens: int
    segment_tokens: tuple[int, ...]
    """Tokens of each sample, in pack order; they add up to `tokens`."""
    pixels_TCPP: torch.Tensor | None = None
    """Where the vision embed is."""
    token_ids_S: torch.Tensor | None = None
    """Where the language embed is."""
    image_positions_M: torch.Tensor | None = None
    """Positions in the pack that image features replace; where the language embed is."""
    labels_L: torch.Tensor | None = None
    """Next token at each loss position; where the head is, in training."""
    loss_positions_L: torch.Tensor | None = None
    """Positions in the pack whose next token carries loss; where the head is, in training."""
    loss_weights_L: torch.Tensor | None = None
    """float32 weight of each loss position; where the head is, in training."""
    drop_path_keys_T: torch.Tensor | None = None
    """int64, on the host: a random number of each tile, from which every vision layer draws whether
    the tile skips its branches; where vision layers are, in training with drop path."""
    replaced_samples: int = 0
    """Samples of the pack whose images cannot be read: blank pixels, and no loss."""
    answer_positions_A: torch.Tensor | None = None
    """Positions whose next token is wanted; where the head is, when answering."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same micro-batch with its tensors on `device`."""
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        moved = {name: value.to(device) for name, value in tensors.items()}
        return replace(self, **moved)

    def packed_seq_params(self, device: torch.device) -> PackedSeqParams:
        """Borders of the samples, for block-diagonal attention and for RoPE to restart.

        The borders are there twice: for attention kernels on the device, and as `*_padded` on the
        host, where core's RoPE reads them as Python numbers, four times a layer.
        """
        borders = torch.tensor([0, *self.segment_tokens]).cumsum(0).to(torch.int32)
        cu_seqlens = borders.to(device)
        longest = max(self.segment_tokens)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=borders,
            cu_seqlens_kv_padded=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

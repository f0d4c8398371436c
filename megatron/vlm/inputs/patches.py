"""Native-resolution images and videos as patches, equal to Qwen's own processors.

Pixels are resized by torch's antialiased bicubic filter on 8-bit values, as Transformers does with
torchvision.

Shapes: F frames, C channels, H rows and W columns of pixels; Y patches of X values.
"""

import numpy as np
import torch
from einops import rearrange

from omnibal.data.native_resolution import Grid
from omnibal.model.encoders import ImagesEncoder


def patches_of(frames_FHWC: np.ndarray, grid: Grid, encoder: ImagesEncoder) -> torch.Tensor:
    """Return patch values of an image (one frame) or video, float32 [Y, X], from RGB uint8.

    Patches are by cell, then row by row; their values by channel, frame, row and column. The last
    frame is repeated to fill patches.
    """
    frames = torch.from_numpy(np.ascontiguousarray(frames_FHWC)).permute(0, 3, 1, 2).contiguous()
    # 8-bit pixels are normalized in one step, as Transformers rounds.
    whole = 1 / encoder.pixel_scale
    mean_C, std_C = (torch.tensor(each) * whole for each in (encoder.pixel_mean, encoder.pixel_std))
    values = _resized(frames, grid, encoder.patch_size).to(torch.float32)
    values = values.sub_(mean_C[:, None, None]).div_(std_C[:, None, None])
    missing = grid.times * encoder.frames_per_patch - len(values)
    values = torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])
    return rearrange(
        values,
        "(t f) c (r m p) (q n w) -> (t r q m n) (c f p w)",
        t=grid.times,
        m=encoder.merge_size,
        n=encoder.merge_size,
        p=encoder.patch_size,
        w=encoder.patch_size,
    ).contiguous()


def _resized(frames_FCHW: torch.Tensor, grid: Grid, patch: int) -> torch.Tensor:
    size = grid.rows * patch, grid.columns * patch
    if frames_FCHW.shape[-2:] == size:
        return frames_FCHW
    return torch.nn.functional.interpolate(frames_FCHW, size, mode="bicubic", antialias=True)

"""Images and videos at their native resolution as patches, as Qwen's own processors make them.

Pixels are resized by torch's antialiased bicubic filter on 8-bit values, which is what
Transformers' processors use where torchvision is installed, so that values are equal to theirs.

Shapes: F frames, C channels, H rows and W columns of pixels; Y patches of X values.
"""

import numpy as np
import torch
from einops import rearrange

from omnibal.data.native_resolution import Grid
from omnibal.model.encoders import ImagesEncoder


def patches_of(frames_FHWC: np.ndarray, grid: Grid, encoder: ImagesEncoder) -> torch.Tensor:
    """Values of the patches of an image, one frame, or of a video, float32 [Y, X].

    Patches are in the order of cells, row by row, and within a cell row by row; values of a patch
    by channel, frame, row and column. The last frame is repeated to whole patches. Frames are RGB,
    uint8.
    """
    frames = torch.from_numpy(np.ascontiguousarray(frames_FHWC)).permute(0, 3, 1, 2).contiguous()
    values = normalized_colours(_resized(frames, grid, encoder.patch_size), encoder)
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


def normalized_colours(frames_FCHW: torch.Tensor, encoder: ImagesEncoder) -> torch.Tensor:
    """8-bit pixels as the encoder takes them, float32; in one step, as Transformers rounds it."""
    whole = 1 / encoder.pixel_scale
    mean_C, std_C = (torch.tensor(each) * whole for each in (encoder.pixel_mean, encoder.pixel_std))
    values = frames_FCHW.to(torch.float32)
    return values.sub_(mean_C[:, None, None]).div_(std_C[:, None, None])

"""Pillow's images as tensors."""

import numpy as np
import torch


def pil_to_tensor(image):
    """Pixels of an image, uint8 [C, H, W]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)

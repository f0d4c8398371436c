"""Functions on tensors, as torchvision 0.28 computes them on a CPU with AVX2."""

import torch

from torchvision.transforms import InterpolationMode


def resize(image, size, interpolation, antialias=True):
    """Resize by torch's filter on 8-bit values, which torchvision calls for bicubic ones."""
    assert interpolation is InterpolationMode.BICUBIC and image.dtype == torch.uint8
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    planes = image.reshape(-1, *image.shape[-3:])
    resized = torch.nn.functional.interpolate(
        planes, list(size), mode="bicubic", align_corners=False, antialias=antialias
    )
    return resized.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std, inplace=False):
    """Subtract means of channels and divide by their standard deviations."""
    mean, std = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)


def grayscale_to_rgb(image):
    """Repeat the only channel; colours stay as they are."""
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:]) if image.shape[-3] == 1 else image

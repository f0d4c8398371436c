"""What Transformers' image and video processors need of torchvision, on tensors alone."""

__version__ = "0.28.0"

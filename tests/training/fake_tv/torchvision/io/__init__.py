"""Nothing of torchvision's readers is used."""

"""Triton kernels; imported on a CUDA device only, and by tests in Triton's interpreter."""

"""CUDA devices without memory or computation, to try stages at their real size."""

"""CUDA devices that hold no memory and run nothing, for trying stages at their real size."""

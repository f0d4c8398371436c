"""Element-wise operations of a layer, with backwards of their own, compiled on a CUDA device."""

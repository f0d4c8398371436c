"""Element-wise operations of a layer with custom backwards, compiled on a CUDA device."""

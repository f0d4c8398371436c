"""Recomputation, and names that Megatron-core asks for."""

from torch.utils.checkpoint import checkpoint as torch_checkpoint

CudaRNGStatesTracker = object
activation_recompute_forward = None


def checkpoint(
    function, *inputs, distribute_saved_activations=False, get_rng_state_tracker=None, tp_group=None
):
    assert not distribute_saved_activations and callable(get_rng_state_tracker) and tp_group
    return torch_checkpoint(function, *inputs, use_reentrant=True)

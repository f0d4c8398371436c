"""Steps of a split pipeline."""

from megatron.vlm.model.initialize import global_parameter_name

# Packs of different shapes; one has no image, one is a single sample, one only images' worth.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)]],
    [[(0, 20)], [(1, 6), (4, 10)], [(2, 8)]],
]


def named_parameters(trainer):
    """The parameters of all chunks of a stage, by global name."""
    return {
        global_parameter_name(stage, name): parameter
        for stage in trainer.chunks
        for name, parameter in stage.named_parameters()
    }

"""Plans of the toy model with any cuts, and steps of packs."""

from toy import stages_of, toy_model, toy_plan

from megatron.vlm.model.initialize import global_parameter_name

MODEL = toy_model()
TIED = MODEL.with_tower("language", tied_head=True)

# Packs of different shapes, some without images or with a single sample.
STEPS = [
    [[(2, 9), (1, 14)], [(0, 12), (0, 7)], [(3, 5)], [(1, 8), (0, 6), (2, 11)]],
    [[(0, 20)], [(1, 6), (4, 10)], [(2, 8)]],
]


def pipeline_plan(*cuts, model=MODEL, vision=(), language=(), frozen=(), **sizes):
    """Return a plan with recomputed layers by tower.

    Units of the toy model: 0 vision embed, 1-4 vision layers, 5 projector, 6 language embed, 7-9
    language layers, 10 head. A cut is the position of the first unit after it.
    """
    stages = stages_of(model, *cuts, vision=vision, language=language)
    return toy_plan(model, stages, **sizes).model_copy(update={"frozen": frozen})


def named_parameters(trainer):
    """Return the parameters of all chunks of a stage, by global name."""
    return {
        global_parameter_name(stage, name): parameter
        for stage in trainer.chunks
        for name, parameter in stage.named_parameters()
    }

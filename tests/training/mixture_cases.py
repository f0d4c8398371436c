"""A toy model with eight experts per language layer, and its plans."""

from toy import stages_of, toy_model, toy_plan

from omnibal.model.layer_kinds import ExpertsConfig, LayerRun


def model_of(**changes):
    """Return two vision layers, and three language layers of eight experts each."""
    sizes = {"experts": 8, "experts_per_token": 2, "ffn_hidden_size": 10, "auxiliary_loss": 0.5}
    run_of_layers = LayerRun(layers=1, experts=ExpertsConfig(**{**sizes, **changes}))
    model = toy_model(layers=2, heads=3, hidden_size=24)
    language = model.language.model_copy(update={"runs": (run_of_layers,)})
    return model.model_copy(update={"language": language})


MODEL = model_of()


def plan_of(*cuts, model=MODEL, recompute=(), **sizes):
    return toy_plan(model, stages_of(model, *cuts, language=recompute), **sizes)

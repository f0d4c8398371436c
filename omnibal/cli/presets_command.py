"""`omnibal presets`: list models and clusters."""

import omnibal.cli.command_tables as tables
from omnibal.cli.console import print_result
from omnibal.cli.options import JsonOption
from omnibal.families.named import hub_ids
from omnibal.model.config import load_cluster, load_model, preset_names


def presets(as_json: JsonOption = False) -> None:
    """List model and cluster presets, with parameters and hub ids."""
    from omnibal.cost.analytic import model_parameters

    models = [load_model(name) for name in preset_names("models")]
    counted = [(model, model_parameters(model)) for model in models]
    ids = hub_ids()
    clusters = [load_cluster(name) for name in preset_names("clusters")]
    result = {
        "models": [
            model.model_dump(mode="json")
            | {"parameters": parameters.stored, "active_parameters": parameters.active}
            | {"hub_ids": ids.get(model.name, [])}
            for model, parameters in counted
        ],
        "clusters": clusters,
    }
    print_result(
        as_json,
        result,
        tables.models_table(counted),
        tables.hub_ids_table(ids),
        tables.clusters_table(clusters),
    )

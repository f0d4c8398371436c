"""`omnibal presets`: list models and clusters."""

from omnibal import tables
from omnibal.cli.console import print_result
from omnibal.cli.options import JsonOption
from omnibal.config import load_cluster, load_model, preset_names


def presets(as_json: JsonOption = False) -> None:
    """List the models and clusters that can be named."""
    models = [load_model(name) for name in preset_names("models")]
    clusters = [load_cluster(name) for name in preset_names("clusters")]
    result = {
        "models": [model.model_dump(mode="json") for model in models],
        "clusters": [cluster.model_dump(mode="json") for cluster in clusters],
    }
    print_result(as_json, result, tables.models_table(models), tables.clusters_table(clusters))

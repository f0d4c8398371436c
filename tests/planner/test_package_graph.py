"""The packages import each other in one direction, as the table of docs/design.md says."""

import ast
import functools
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
UNRANKED = {
    "omnibal/__init__.py",
    "omnibal/__main__.py",
    "omnibal/presets/__init__.py",
    "megatron/vlm/__init__.py",
}
"""Version, entry point, a folder of TOML files, and warning filters."""

Graph = dict[str, set[str]]


class Layer(NamedTuple):
    """A row of the table."""

    places: tuple[str, ...]
    """Files, and folders that end in a slash."""
    may_import: frozenset[str]
    """Names of layers."""

    def holds(self, module: str) -> bool:
        folders = tuple(place for place in self.places if place.endswith("/"))
        return module.startswith(folders) or module in self.places


def layers_of(text: str) -> dict[str, Layer]:
    """Return the rows of the table of layers by name."""
    _, _, after = text.partition("| layer | places | hold | may import |\n")
    rows = after.partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    layers = {}
    for name, places, _, may in cells:
        allowed = frozenset(filter(None, may.split(", ")))
        layers[name] = Layer(tuple(re.findall("`([^`]+)`", places)), allowed)
    return layers


LAYERS = layers_of((ROOT / "docs/design.md").read_text())


@functools.cache
def import_graph() -> Graph:
    """Return imports of all modules by path, including imports in functions and for types."""
    paths = [*(ROOT / "omnibal").rglob("*.py"), *(ROOT / "megatron").rglob("*.py")]
    modules = {path.relative_to(ROOT).as_posix() for path in paths}
    return {module: set(imports_of(module, modules)) - {module} for module in modules}


def imports_of(module: str, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        for name in names:
            path = name.replace(".", "/")
            yield from {f"{path}.py", f"{path}/__init__.py"} & modules


def layer_of(module: str) -> str:
    names = [name for name, layer in LAYERS.items() if layer.holds(module)]
    assert len(names) == 1, f"{module} is in {len(names)} rows of docs/design.md's table"
    return names[0]


def wrong_arrows(graph: Graph) -> list[str]:
    """Return imports that the table does not allow."""
    return [
        f"{module} imports {imported}"
        for module, all_imported in sorted(graph.items())
        for imported in sorted(all_imported - UNRANKED)
        if module not in UNRANKED
        and layer_of(imported) != layer_of(module)
        and layer_of(imported) not in LAYERS[layer_of(module)].may_import
    ]


def cycle(graph: Graph) -> list[str]:
    """Return modules that import each other in a cycle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_the_graph_is_that_of_the_code():
    """Prevents the tests below from passing on a graph without its imports."""
    graph = import_graph()
    assert len(graph) > 100 and sum(map(len, graph.values())) > 400
    assert "omnibal/model/limits.py" in graph["omnibal/packing/steps.py"]
    assert "omnibal/job/check.py" in graph["omnibal/cli/plan_command.py"]  # inside a function
    assert "omnibal/model/config.py" in graph["megatron/vlm/conversion/tensor_map.py"]


def test_every_module_is_in_one_row_of_the_table():
    """Prevents a module without a row, or a row without modules."""
    modules = set(import_graph()) - UNRANKED
    assert {layer_of(module) for module in modules} == set(LAYERS)
    for place in (place for layer in LAYERS.values() for place in layer.places):
        assert any(Layer((place,), frozenset()).holds(module) for module in modules), place


def test_layers_are_in_order():
    """Prevents a table that allows two layers to import each other."""
    names = list(LAYERS)
    for row, layer in enumerate(LAYERS.values()):
        assert layer.may_import <= set(names[:row])
    trainer = {name for name in names if "megatron/" in " ".join(LAYERS[name].places)}
    assert len(trainer) > 5
    for name, layer in LAYERS.items():
        forbidden = {"search", "report", "command"} if name in trainer else trainer
        assert not layer.may_import & forbidden


def test_imports_go_down_only():
    """Prevents packing that imports the planner, and import cycles."""
    assert wrong_arrows(import_graph()) == []
    assert cycle(import_graph()) == []


def test_the_table_allows_only_what_is_imported():
    """Prevents rows that allow more than there is, and rooms that all import each other."""
    used: dict[str, set[str]] = {name: set() for name in LAYERS}
    for module in import_graph().keys() - UNRANKED:
        used[layer_of(module)] |= set(map(layer_of, import_graph()[module] - UNRANKED))
    allowed = {name: layer.may_import for name, layer in LAYERS.items()}
    assert allowed == {name: names - {name} for name, names in used.items()}
    planner = [name for name, layer in LAYERS.items() if layer.places[0].startswith("omnibal/")]
    assert sum(len(allowed[name]) for name in planner) <= 60


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("omnibal/packing/pack_bound.py", "omnibal/job/plan.py"),
        ("omnibal/cost/analytic.py", "omnibal/pipeline/unit_runs.py"),
        ("omnibal/job/planner.py", "megatron/vlm/step/train.py"),
        ("megatron/vlm/measure/stage_replay.py", "omnibal/report/page.py"),
        ("omnibal/job/check.py", "omnibal/search/feasible.py"),
        ("megatron/vlm/inputs/batch.py", "megatron/vlm/model/stage.py"),
        ("megatron/vlm/checkpoint/save_load.py", "megatron/vlm/step/train.py"),
    ],
)
def test_an_arrow_that_goes_up_is_found(module, imported):
    """Prevents tests that pass despite forbidden imports."""
    graph = import_graph()
    graph = graph | {module: graph[module] | {imported}}
    assert wrong_arrows(graph) == [f"{module} imports {imported}"]


def test_a_ring_within_a_layer_is_found():
    """Prevents missing an import cycle within a layer."""
    graph = import_graph()
    model, analytic = "omnibal/cost/model.py", "omnibal/cost/analytic.py"
    assert model in graph[analytic]
    graph = graph | {model: graph[model] | {analytic}}
    assert wrong_arrows(graph) == []
    # Possibly through other modules, as there are several paths.
    assert {model, analytic} <= set(cycle(graph))

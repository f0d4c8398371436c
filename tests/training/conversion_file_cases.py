"""Content of exported checkpoints' files, and edits of it."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from conversion_cases import OURS
from released import imported, write_tensors
from safetensors.torch import load_file

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.exporting import plan_export_as, plan_export_like, write_export
from megatron.vlm.conversion.importing import open_released
from megatron.vlm.conversion.own_weights import StoredWeights
from megatron.vlm.conversion.tensor_map import TensorLayout, parameters
from omnibal.data.tokenizer import open_tokenizer

SHARD_BYTES = 20_000
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDEX = "model.safetensors.index.json"


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def export_to_match(run: Path, like: Path, target: Path, dtype=None) -> Path:
    planned = plan_export_like(open_newest(run), open_released(like), dtype)
    write_export(planned, target, lambda size: None)
    return target


def check_round_trip(source: Path, folder: Path) -> Path:
    """Import a checkpoint and assert that its export is bit-identical; return the run."""
    run = imported(source, folder / "run")
    assert content(export_to_match(run, source, folder / "back")) == content(source)
    return run


def export_run(run: Path, layout: TensorLayout, target: Path, dtype=None, size=SHARD_BYTES) -> Path:
    tokenizer = open_tokenizer(run / "tokenizer") if (run / "tokenizer").is_dir() else None
    planned = plan_export_as(open_newest(run), layout, dtype, tokenizer, size)
    write_export(planned, target, lambda size: None)
    return target


def export_to_layout(run: Path, layout: str, target: Path, dtype=None, size=SHARD_BYTES) -> Path:
    return export_run(run, OURS[layout], target, dtype, size)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        own = load_file(path)
        assert not own.keys() & found.keys()
        found |= own
    return found


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def assert_same_parameters(run: Path, other: Path, dtype: str | None = None) -> None:
    """Assert equal parameters of two runs, after a cast if `dtype` is set."""
    identity, there = open_newest(run), open_newest(other)
    assert identity.model.language == there.model.language
    every = list(parameters(identity.model))
    values = [StoredWeights(one.path).read_parameters(every) for one in (identity, there)]
    for parameter, tensor, expected in zip(every, *values, strict=True):
        expected = expected if dtype is None else expected.to(TYPES[dtype])
        assert tensor.dtype == expected.dtype, parameter.name
        assert torch.equal(tensor, expected), parameter.name


# User errors. Each edit changes a copy of a good checkpoint.


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_config(**changes: object) -> Callable[[Path], None]:
    """Return an edit of config.json; `table__key` sets a key in a table."""

    def apply(config: dict) -> None:
        for key, value in changes.items():
            table, _, own = key.rpartition("__")
            (config[table] if table else config)[own] = value

    return lambda folder: edit_json(folder / "config.json", apply)


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = tensors_of(folder)
        change(tensors)
        for path in [*folder.glob("*.safetensors"), folder / INDEX]:
            path.unlink()
        write_tensors(folder, tensors, SHARD_BYTES)

    return apply


def edit_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]):
    return edit_tensors(lambda tensors: tensors.update({name: change(tensors[name])}))

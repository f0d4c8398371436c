"""Exports for XTuner against a copy of its checks and sampling order. From InternLM/xtuner:
xtuner/v1/datasets/preset_pack.py at 5081ed2 (`_validate_arrays`, `__getitem__`) and
preset_sampler.py at 147cb2e. XTuner is not on a package index."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from export_cases import export_case, places_of

from omnibal.base.errors import UserError
from omnibal.model.targets import TARGETS, TargetName
from omnibal.trainers.export.directory import export_input
from omnibal.trainers.export.exported import ExportInput
from omnibal.trainers.export.xtuner import export

pytestmark = pytest.mark.quick

XTUNER = TargetName.XTUNER


class PresetPacks:
    """Copy of XTuner's reader: its arrays and checks."""

    def __init__(self, datasets, pack_config_path, pack_max_length, short_pack_strategy="error"):
        folder = Path(pack_config_path)
        self.datasets = datasets
        self._boundaries = np.load(folder / "boundaries.npy", mmap_mode="r")
        self._samples = np.load(folder / "samples.npy", mmap_mode="r")
        self._paths = json.loads((folder / "paths.json").read_text())
        self._path_to_ds_idx = {dataset.path: index for index, dataset in enumerate(datasets)}
        bounds, rows = self._boundaries, self._samples
        assert bounds.dtype == rows.dtype == np.int64
        assert bounds[-1] == len(rows) and rows.ndim == 2 and rows.shape[1] == 6
        path, line, begin, end, first, stop = rows.T
        assert ((path >= 0) & (path < len(self._paths))).all()
        assert (first >= 0).all() and (stop > first).all()
        assert ((begin == -1) & (end == -1)).all()
        for number, name in enumerate(self._paths):
            lines = line[path == number]
            assert ((lines >= 0) & (lines < len(datasets[self._path_to_ds_idx[name]]))).all()
        totals = np.add.reduceat(stop - first, bounds[:-1])
        if short_pack_strategy == "error" and (totals < pack_max_length).any():
            raise ValueError("total tokens < pack_max_length")
        if (totals > pack_max_length).any():
            raise ValueError("total tokens > pack_max_length")

    def __len__(self):
        return len(self._boundaries) - 1


class Lines:
    """XTuner dataset: an annotation file with a sample per line."""

    def __init__(self, path: Path, tokens: np.ndarray) -> None:
        self.path, self.tokens = str(path), tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, line: int) -> dict:
        count = int(self.tokens[line])
        return {"input_ids": [line] * count, "num_tokens": count, "pixel_values": f"image {line}"}


def rank_packs(order: np.ndarray, batch: int, rank: int, ranks: int) -> list[int]:
    """Return a rank's packs: complete steps, assigned round-robin."""
    total = len(order) // batch * batch // ranks * ranks
    return order[:total][rank:total:ranks].tolist()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data") / "data.jsonl"


@pytest.fixture
def load_patched(tmp_path, monkeypatch):
    """Return a loader of the exported script's class, which patches the copied reader."""
    names = ("xtuner", "xtuner.v1", "xtuner.v1.datasets", "xtuner.v1.datasets.config")
    modules = {name: ModuleType(name) for name in (*names, "xtuner.v1.datasets.preset_pack")}
    for module in modules.values():
        module.PresetPackDataset = PresetPacks
    modules["xtuner.v1.datasets"].config = modules["xtuner.v1.datasets.config"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def load(folder: Path) -> type:
        exec((folder / "xtuner_packs.py").read_text(), {"__name__": "xtuner_packs"})
        return modules["xtuner.v1.datasets.config"].PresetPackDataset

    return load


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_xtuner_reads_the_plans_packs_and_steps(tmp_path, data, seed, ranks):
    """Prevents packs per step and rank that differ from the predicted ones."""
    case = export_case(XTUNER, seed=seed, ranks=ranks)
    folder = tmp_path / "export"
    made = case.export(data, folder)
    length, batch = int(case.packs.tokens.max()), made.expected.packs_per_step
    assert f"pack_max_length={length}," in made.exported.settings
    assert f"global_batch_size={batch}," in made.exported.settings
    tokens = case.lengths.tokens
    packs = PresetPacks([Lines(data.absolute(), tokens)], folder, length, "padding")
    order = np.load(folder / "sampler_order.npy")
    assert order.ndim == 1 and np.issubdtype(order.dtype, np.integer)
    found, starts = {}, packs._boundaries
    assert (np.diff(starts) > 0).all()
    assert (packs._samples[:, 5] == tokens[packs._samples[:, 1]]).all()
    for rank in range(ranks):
        for place, pack in enumerate(rank_packs(order, batch, rank, ranks)):
            lines = packs._samples[starts[pack] : starts[pack + 1], 1]
            found[place // 4, rank, place % 4] = sorted(lines.tolist())
    steps = made.expected.steps
    expected = {place: sorted(pack) for place, pack in places_of(case.packs).items()}
    whole = {place: pack for place, pack in expected.items() if place[0] < steps}
    assert found == whole and sum(map(len, found.values())) == made.expected.samples


def test_the_script_keeps_images_and_takes_short_packs(tmp_path, data, load_patched):
    """Prevents a run that ends at the first short pack, or loses its images."""
    case = export_case(XTUNER, seed=0, ranks=1)
    folder = tmp_path / "export"
    case.export(data, folder)
    lines = Lines(data.absolute(), case.lengths.tokens)
    arguments = ([lines], str(folder), int(case.packs.tokens.max()))
    with pytest.raises(ValueError, match="< pack_max_length"):
        PresetPacks(*arguments)
    packs = load_patched(folder)(*arguments)
    samples = [item["input_ids"][0] for item in packs[3]]
    order = np.lexsort((case.packs.slot, case.packs.step))
    assert samples == case.packs.packs[order[3]].tolist()
    assert [item["pixel_values"] for item in packs[3]] == [f"image {line}" for line in samples]
    lines.tokens = lines.tokens + 1
    with pytest.raises(ValueError, match=f"line {samples[0] + 1} of .* plan with XTuner"):
        packs[3]


def test_without_data_sources_stand_for_files(tmp_path):
    """Prevents an export that needs the samples to locate them in packs."""
    case = export_case(XTUNER, seed=1, ranks=2, samples=300)
    made = case.export(None, tmp_path / "export")
    rows = np.load(tmp_path / "export/samples.npy")
    assert json.loads((tmp_path / "export/paths.json").read_text()) == ["docs"]
    order = np.lexsort((case.packs.dp_rank, case.packs.slot, case.packs.step))
    samples = np.concatenate([case.packs.packs[pack] for pack in order])
    assert rows[:, 1].tolist() == samples.tolist()
    assert rows[:, 5].tolist() == case.lengths.tokens[samples].tolist()
    assert "paths.json has the names" in " ".join(made.exported.notes)


def test_several_sources_are_several_files(tmp_path):
    """Prevents reading samples from another file, and record numbers taken for sample numbers."""
    case = export_case(XTUNER, seed=0, ranks=1, samples=300)
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    record = {"messages": asked}
    for name, lines in (("a", 100), ("b", 50)):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(record)}\n" * lines)
    meta = {"a": {"annotation": "a.jsonl", "repeat_time": 2}, "b": {"annotation": "b.jsonl"}}
    meta["c"] = {"annotation": "b.jsonl"}

    def given_of(name: str, content: object) -> ExportInput:
        (tmp_path / name).write_text(json.dumps(content))
        return export_input(case.files, TARGETS[XTUNER], tmp_path / name, tmp_path / "export")

    given = given_of("meta.json", meta)
    made = export(given)
    for name in ("boundaries", "samples"):
        made.files[f"{name}.npy"](tmp_path / f"{name}.npy")
    made.files["paths.json"](tmp_path / "paths.json")
    paths = json.loads((tmp_path / "paths.json").read_text())
    rows = np.load(tmp_path / "samples.npy")
    for row, sample in zip(rows.tolist(), given.order.packs.samples.tolist(), strict=True):
        name, line = ("a", sample % 100) if sample < 200 else ("b", sample % 50)
        assert (paths[row[0]], row[1]) == (str(tmp_path / f"{name}.jsonl"), line)
    assert made.settings.count("DatasetConfig(anno_path") == 2  # each file once
    meta["c"]["root"] = "elsewhere"
    with pytest.raises(UserError, match="one folder per file"):
        export(given_of("meta.json", meta))
    with pytest.raises(UserError, match="is a JSON array, and XTuner reads JSONL"):
        export(given_of("list.json", [record] * 300))

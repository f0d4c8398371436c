"""From `omnibal plan --for` to `omnibal export`, as typed."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli_cases import printed
from plan_cases import example_lengths

from omnibal.data.lengths import write_lengths
from omnibal.job.plan import read_plan
from omnibal.job.plan_files import data_of_plan
from omnibal.model.targets import TARGETS, TargetName
from omnibal.steps.next_fit import next_fit_packs


def run(capsys, *arguments: object) -> dict:
    return json.loads(printed(capsys, *arguments))


@pytest.mark.parametrize("target", list(TargetName))
def test_a_plan_for_a_trainer_is_exported_for_it(capsys, tmp_path: Path, target):
    """Prevents: `--for` plans that cannot be exported, or come out with other packs or steps."""
    write_lengths(example_lengths(), tmp_path / "lengths.parquet")
    sizes = ["--dp", 2] if TARGETS[target].most_pipeline == 1 else ["--pp", 2, "--dp", 2]
    tiles = [] if TARGETS[target].packs.tokens_alone else ["--max-tiles", 8]
    run(
        capsys, "plan", "--model", "internvl-digits", "--cluster", "laptop-cpu", *sizes,
        "--max-tokens", 512, *tiles, "--micro-batches", 3, "--epochs", 2, "--no-compare",
        "--lengths", tmp_path / "lengths.parquet", "--for", target, "--json",
        "-o", tmp_path / "plan",
    )  # fmt: skip
    folder = tmp_path / "export"
    result = run(capsys, "export", tmp_path / "plan", "--to", folder, "--json")
    plan = read_plan(tmp_path / "plan")
    packs, lengths = data_of_plan(plan, tmp_path / "plan")
    order = pq.read_table(folder / "order.parquet")
    pack, sample = (order[name].to_numpy() for name in ("pack", "sample"))
    assert (np.bincount(sample) == 2).all() and len(np.unique(pack)) == len(packs)
    full = np.bincount(packs.step) == 6
    assert full[:-1].all() and result["expected"]["steps"] == full.sum()
    bounds = np.flatnonzero(np.diff(pack, prepend=-1))
    planned = np.lexsort((packs.dp_rank, packs.slot, packs.step))
    found = np.split(sample, bounds[1:])
    for row, members in zip(planned, found, strict=True):
        assert sorted(members) == sorted(packs.packs[row])
    if TARGETS[target].packs.next_fit:
        length = int(re.search(r"--packing_length (\d+)", result["command"]).group(1))
        made = next_fit_packs(lengths.tokens[sample], length)
        assert made.tolist() == [*bounds, len(sample)]

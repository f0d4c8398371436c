"""Planner: plan directories that are complete, repeatable, and fit their data and memory."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from cost_cases import analytic_cost
from plan_cases import MODEL, example_lengths, job_spec, origin_of, request

from omnibal.base.errors import UserError
from omnibal.job.check import check_plan, training_obstacles
from omnibal.job.plan import read_plan
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import make_plan
from omnibal.model.config import ModelConfig
from omnibal.model.encoders import TilingConfig
from omnibal.model.parallel import Parallel
from omnibal.packing.balance_metrics import rank_sums
from omnibal.packing.features import pack_features
from omnibal.search.strategy import FreeSizes, StrategyRequest

pytestmark = pytest.mark.quick


def saved_bytes(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_same_request_gives_the_same_bytes(tmp_path):
    """Prevents equal requests with different plans, and a seed without effect."""
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        save_plan(make_plan(request(seed=seed)), tmp_path / name)
    first, again, other = (saved_bytes(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    assert first["packs.parquet"] != other["packs.parquet"]
    assert first["plan.json"] != other["plan.json"]


def test_tied_head_is_planned_and_checked(tmp_path):
    """Prevents a tied head that is planned, and then refused by the check or the training."""
    model = MODEL.with_tower("language", tied_head=True)
    for name, parallel in (("split", Parallel(pipeline=3)), ("whole", Parallel(pipeline=1))):
        tied = make_plan(request(model=model, parallel=parallel, lengths=None))
        plain = make_plan(request(parallel=parallel, lengths=None))
        save_plan(tied, tmp_path / name)
        assert check_plan(tmp_path / name)
        assert training_obstacles(tied.plan) == training_obstacles(plain.plan)
        if name == "whole":
            [before], [after] = (each.plan.prediction.stages for each in (plain, tied))
            matrix_gib = 4 * model.language.vocab_size * model.language.hidden_size / 1024**3
            saved_gib = before.memory.weights_gib - after.memory.weights_gib
            assert saved_gib == pytest.approx(matrix_gib, rel=1e-9)


def test_tiling_is_that_of_the_scan():
    """Prevents training with other image tiles than were packed."""
    tiling = TilingConfig(max_dynamic_patch=3)
    lengths = example_lengths(origin_of(MODEL, tiling=tiling))
    assert make_plan(request(lengths=lengths)).plan.model.vision.tiling == tiling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_tile": MODEL.vision.tokens_per_item + 1}, "omnibal lengths"),
        ({"system_message": "Read."}, r"scanned with system_message.*omnibal lengths"),
    ],
)
def test_lengths_of_another_model_are_refused(change, message):
    """Prevents packs counted with another model's tokens per tile or prompt text."""
    with pytest.raises(UserError, match=message):
        make_plan(request(lengths=example_lengths(origin_of(MODEL, **change))))


def with_rope_limit(most: int) -> ModelConfig:
    """Return the model with RoPE scaled for samples of more than `most` tokens."""
    return MODEL.with_tower("language", max_positions=most, rope_factor=2.0)


def test_samples_beyond_the_models_rope_are_refused():
    """Prevents training without the RoPE scaling that the released model has for long samples."""
    lengths = example_lengths()
    longest = int(lengths.tokens.argmax())
    most = int(lengths.tokens[longest])
    packs, _ = make_plan(request(model=with_rope_limit(most))).data
    assert packs.tokens.max() > most
    source = lengths.source_names[lengths.source[longest]]
    message = f"sample {longest} of {source} has {most} tokens, above .*max_positions {most - 1}"
    with pytest.raises(UserError, match=message):
        make_plan(request(model=with_rope_limit(most - 1)))
    with pytest.raises(UserError, match=message):
        job, free = job_spec(model=with_rope_limit(most - 1)), FreeSizes(gpus=2)
        StrategyRequest(job=job, sizes=free, lengths=lengths, samples_per_step=50, samples=300)
    # Mock samples at the caps have no trained length.
    make_plan(request(model=with_rope_limit(16), lengths=None))


def test_ranks_are_balanced_in_predicted_time():
    """Prevents ranks with equal tiles and tokens but unequal time."""
    lengths = example_lengths(count=3000)
    lengths = replace(lengths, tokens=np.full(3000, 170, np.int32))  # independent of time
    asked = request(lengths=lengths, epochs=1)
    packs, _ = make_plan(asked).data
    cost = analytic_cost(MODEL, asked.job.cluster, asked.job.parallel, "fp32")
    repeats = {"vision_layer": MODEL.vision.layers, "language_layer": MODEL.language.layers}
    features = pack_features(packs.packs, lengths, cost.features)
    pack_ms = sum(
        features @ (cost.forward_ms + cost.backward_ms) * repeats.get(unit, 1)
        for unit, cost in cost.units.items()
    )
    rank_ms = rank_sums(packs, pack_ms, dp=2)[:-1]
    assert (rank_ms.max(axis=1) / rank_ms.mean(axis=1)).mean() < 1.01


def test_saving_again_replaces_only_plans(tmp_path):
    """Prevents a mistyped -o from deleting a checkpoint or a home directory."""
    result, directory = make_plan(request()), tmp_path / "plan"
    save_plan(make_plan(request(seed=1)), directory)
    save_plan(result, directory)
    assert read_plan(directory) == result.plan
    (directory / "run.jsonl").write_text("precious")
    before = saved_bytes(directory)
    with pytest.raises(UserError, match=r"run\.jsonl"):
        save_plan(result, directory)
    (tmp_path / "home").mkdir()
    (tmp_path / "home/packs.parquet").write_text("mine")
    with pytest.raises(UserError, match=r"packs\.parquet"):
        save_plan(result, tmp_path / "home")
    assert saved_bytes(directory) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "plan"]


@pytest.mark.parametrize("place", ["new", "plan.json"])
def test_failed_save_leaves_the_old_plan(tmp_path, monkeypatch, place):
    """Prevents half a plan, or none, after a full disk or a failed rename."""
    directory = tmp_path / "plan"
    save_plan(make_plan(request(seed=1)), directory)
    before, rename = saved_bytes(directory), Path.rename
    full_disk = Mock(side_effect=OSError("disk full"))

    def refuse_the_new(path, target):
        return (full_disk if path.name == "new" else rename)(path, target)

    if place == "new":
        monkeypatch.setattr(Path, "rename", refuse_the_new)
    else:
        monkeypatch.setattr("omnibal.job.plan_files.write_plan", full_disk)
    with pytest.raises(OSError, match="disk full"):
        save_plan(make_plan(request()), directory)
    assert saved_bytes(directory) == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


@pytest.mark.parametrize("place", [".", "..", "inner/..", "/"])
def test_current_directory_is_not_replaced(tmp_path, monkeypatch, place):
    """Prevents a plan that deletes the user's current directory."""
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="contains the current directory"):
        save_plan(make_plan(request()), Path(place))
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


@pytest.mark.parametrize("packs_per_step", [0, 6, 9])
def test_steps_that_ranks_cannot_share_evenly_are_refused(packs_per_step):
    """Prevents silently planning steps of another size than requested."""
    with pytest.raises(UserError, match=r"multiple of the 4 data-parallel ranks.*: give [48]$"):
        request(parallel=Parallel(pipeline=1, data=4), packs_per_step=packs_per_step)

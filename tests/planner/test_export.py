"""Common behaviour of all exports: refusals, order, RUN.md, atomic writes."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from cli_cases import failure, result, run
from encoder_cases import choice_of
from export_cases import (
    drawn_lengths,
    export_case,
    files_for,
    first_obstacle,
    places_of,
    shuffle,
    write_data,
)
from plan_cases import example_lengths, origin_of, request

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.job.job import JobSpec
from omnibal.job.plan import PlannedLevel, Shapes
from omnibal.job.plan_files import save_plan
from omnibal.job.planner import PlanResult, make_plan
from omnibal.model.limits import Caps
from omnibal.model.targets import TARGETS, TargetName
from omnibal.pipeline.schedules import PipelineSchedule
from omnibal.pipeline.stage_units import Stage
from omnibal.trainers.export.directory import export_input, make_export
from omnibal.trainers.export.exported import Exported, ExportInput
from omnibal.trainers.export.expressible import obstacles
from omnibal.trainers.export.layout import all_or_none, one_number
from omnibal.trainers.export.reading_order import reading_order, write_order

SWIFT, XTUNER, MEGATRON = TargetName.MS_SWIFT, TargetName.XTUNER, TargetName.MEGATRON_LM
VISION = ("vision embed", "vision 0..3", "projector")
FIRST = Stage.parse(*VISION, "language embed", "language 0..1")
LAST = Stage.parse("language 2..3", "head")
ALONE = Stage.parse(*VISION, "language embed", "language 0..3", "head")
UNITS = [*map(str, ALONE.units)]


def small_case(target: TargetName = SWIFT, ranks: int = 1):
    return export_case(target, seed=0, ranks=ranks, samples=300)


def stages_with(*layers: tuple[str, ...]) -> tuple[Stage, ...]:
    pairs = zip((FIRST, LAST), layers, strict=True)
    return tuple(Stage.parse(*map(str, stage.units), recompute=again) for stage, again in pairs)


CHUNKS = (
    Stage.parse(*map(str, FIRST.units[:-1]), "language 0"),
    *(Stage.parse("language 1"), Stage.parse("language 2"), Stage.parse("language 3", "head")),
)


def in_chunks(name: str, micro_batches: int, stages=CHUNKS) -> dict:
    """Return changes to two stages of two chunks in a plan of shapes."""
    caps, schedule = Caps.of(tiles=1, tokens=64), PipelineSchedule(name=name, chunks=2)
    shapes = Shapes(caps=caps, micro_batches_per_step=micro_batches)
    return {"stages": stages, "pipeline": 2, "schedule": schedule, "data": None, "shapes": shapes}


@pytest.mark.parametrize(
    ("target", "changes", "told"),
    [
        (XTUNER, {"stages": (FIRST, LAST)}, "pipeline size 2, and XTuner v1 takes at most 1"),
        (SWIFT, {"stages": (Stage.parse(*VISION[:2]), Stage.parse(*UNITS[2:]))},
         "stage 1 holds projector, and ms-swift"),
        (SWIFT, {"stages": (Stage.parse(*VISION), Stage.parse(*UNITS[3:]))},
         "first stage does not hold the language embed"),
        (SWIFT, {"stages": stages_with(("language 0..1",), ("language 2",))},
         "stages recompute 2, 1 layers of language, and"),
        (SWIFT, {"stages": stages_with(("language 1",), ("language 2",))},
         "of each stage, with one n"),
        (SWIFT, {"stages": stages_with(("vision 0..1",), ())},
         "2 layers of vision are recomputed: "),
        (XTUNER, {"stages": (Stage.parse(*UNITS, recompute=("language 0",)),)},
         "1 layers of language are recomputed"),
        (MEGATRON, in_chunks("interleaved", 4), None),
        (MEGATRON, in_chunks("interleaved", 3),
         "3 micro-batches a rank, and Megatron-LM interleaves"),
        (MEGATRON, in_chunks("zb-v", 4),
         "schedule is zb-v, and Megatron-LM runs 1f1b and interleaved"),
        (SWIFT, in_chunks("interleaved", 4,
                          (Stage.parse(*VISION[:2]), Stage.parse(*UNITS[2:5]), *CHUNKS[2:])),
         "chunk 0 of stage 1 holds projector"),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_be_told_is_named(target, changes, told):
    """Prevents exporting flags that mean another plan, or dropping its chunks."""
    plan, changes = small_case(target).files.plan, changes.copy()
    sizes = {"pipeline": changes.pop("pipeline", len(changes["stages"]))}
    changes["parallel"] = plan.parallel.model_copy(update=sizes)
    obstacle = first_obstacle(plan.model_copy(update=changes), None, TARGETS[target])
    assert obstacle is None if told is None else told in obstacle


def test_what_no_trainer_can_be_told_is_named():
    """Prevents levels, shared packs or data-parallel encoders dropped silently."""
    plan = small_case().files.plan
    caps = [Caps.of(tiles=1, tokens=tokens) for tokens in (100, 5_000)]
    levels = [PlannedLevel(caps=cap, recompute=((),)) for cap in caps]
    shared = levels[1].model_copy(update={"context": 2})
    dp_encoders = choice_of(1, 1, {"vision": 1})
    for changes, told in (
        ({"levels": levels}, "the plan has 2 levels"),
        ({"levels": (levels[0], shared)}, "several context-parallel sizes"),
        ({"data_parallel_encoders": dp_encoders}, "encoders are data-parallel"),
    ):
        for target in TARGETS.values():
            found = obstacles(plan.model_copy(update=changes), None, target)
            assert any(told in each for each in found)


def test_sharding_counts_where_ranks_divide_something():
    """Prevents ZeRO-1 memory printed for an FSDP run, and refusing a one-rank plan."""
    for ranks, refused in ((1, False), (2, True)):
        plan = small_case(XTUNER, ranks).files.plan
        assert first_obstacle(plan, None, TARGETS[XTUNER]) is None
        whole = plan.parallel.model_copy(update={"sharded": 1})
        unlimited = plan.model_copy(update={"made_for": None, "parallel": whole})
        assert (first_obstacle(unlimited, None, TARGETS[XTUNER]) is not None) == refused


def test_steps_that_a_trainer_would_read_on_from_are_refused():
    """Prevents packs after an incomplete step trained a step early, by another rank."""
    lengths, target = drawn_lengths(0, 24), TARGETS[MEGATRON]
    packs = shuffle([[sample] for sample in range(24)], lengths, 2, 0)
    files = files_for(MEGATRON, packs, lengths, 2)
    moved = replace(packs, dp_rank=np.where(packs.step == 1, 0, packs.dp_rank))
    for given, told in (
        (packs, None),
        (packs.take(np.arange(23)), None),
        (packs.take(np.delete(np.arange(24), 10)), "step 1 has 7 packs on 2 data-parallel ranks"),
        (moved, "step 1 has unequal"),
    ):
        obstacle = first_obstacle(files.plan, (given, lengths), target)
        assert obstacle is None if told is None else told in obstacle
    data = files.plan.data.model_copy(update={"window": 8})
    windows = files.plan.model_copy(update={"data": data})
    assert "a step is a window of 8 samples" in first_obstacle(windows, files.data, target)


def test_numbers_of_recomputed_layers_are_those_that_mean_the_same():
    """Prevents a layer count that recomputes other layers than the plan; tries all sets."""
    towers = {tower: [f"{tower} {layer}" for layer in range(4)] for tower in ("vision", "language")}
    for mask in range(2**8):
        numbered = enumerate([*towers["vision"], *towers["language"]])
        again = [name for number, name in numbered if mask >> number & 1]
        stages = stages_with(*([n for n in again if holds(s, n)] for s in (FIRST, LAST)))
        for tower, every in towers.items():
            mine = {name for name in again if name in every}
            fitting = [n for n in range(5) if first_layers(stages, tower, n) == mine]
            assert (one_number(stages, tower) in fitting) == bool(fitting)
            assert (one_number(stages, tower) is None) == (not fitting)
            assert all_or_none(stages, tower) == {0: False, 4: True}.get(len(mine))


def holds(stage: Stage, name: str) -> bool:
    tower, number = name.split()
    return int(number) in stage.layers(tower)


def first_layers(stages: tuple[Stage, ...], tower: str, number: int) -> set[str]:
    """Return the layers that a trainer recomputes for this number per stage."""
    return {f"{tower} {layer}" for stage in stages for layer in stage.layers(tower)[:number]}


def test_order_says_where_every_sample_is_trained(tmp_path):
    """Prevents rows in another order than the plan's, and row numbers taken for sample numbers."""
    case = export_case(SWIFT, seed=1, ranks=2, samples=300)
    skipped = 7 + 2 * np.arange(300, dtype=np.int64)
    sources = (np.arange(300) % 3).astype(np.int32)
    lengths = replace(case.lengths, sample=skipped, source=sources, source_names=("x", "y", "z"))
    order = reading_order(case.packs)
    write_order(order, lengths, None, tmp_path / "order.parquet")
    rows = pq.read_table(tmp_path / "order.parquet").to_pylist()
    place = {
        sample: (step, slot, rank)
        for (step, rank, slot), samples in places_of(case.packs).items()
        for sample in samples
    }
    assert [row["pack"] for row in rows] == sorted(row["pack"] for row in rows)
    assert len(rows) == len(place) == 300
    for row in rows:
        sample = (row["sample"] - 7) // 2
        assert (row["step"], row["slot"], row["rank"]) == place[sample]
        assert row["pack"] % 2 == row["rank"] and row["tokens"] == lengths.tokens[sample]
        assert row["source"] == "xyz"[sample % 3] and "record" not in row
    write_order(order, replace(lengths, sample=None), None, tmp_path / "all.parquet")
    for row in pq.read_table(tmp_path / "all.parquet").to_pylist():
        assert (row["source"], row["record"]) == ("xyz"[row["sample"] % 3], row["sample"] // 3)
    steps = [(row["step"], row["slot"], row["rank"]) for row in rows]
    assert steps == sorted(steps)


def fail_midway(path: Path) -> None:
    path.write_text("begun")
    raise UserError("no")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_export_is_written_whole_or_not_at_all(tmp_path, place):
    """Prevents a partial export that looks complete."""
    given = export_input(small_case().files, TARGETS[SWIFT], None, tmp_path / "deep/export", 0)
    names = ["a/one", "b", "c"]
    writers = {name: lambda path: path.write_text("x") and None for name in names}
    writers[names[place]] = fail_midway
    made = make_export(given, lambda given: Exported(files=writers, command="train"))
    with pytest.raises(UserError, match="no"):
        made.write()
    assert list(tmp_path.rglob("*")) in ([], [tmp_path / "deep"])


@pytest.fixture
def plan(tmp_path) -> Path:
    files = small_case().files
    save_plan(PlanResult(plan=files.plan, data=files.data, search=None), tmp_path / "plan")
    write_data(300, tmp_path / "data.jsonl")
    return tmp_path / "plan"


def test_the_command_prints_what_run_md_says(capsys, tmp_path, plan):
    """Prevents figures in RUN.md that differ from the plan's, and output scripts cannot parse."""
    folder = tmp_path / "export"
    given = (plan, "--to", folder, "--data", tmp_path / "data.jsonl")
    told = result(capsys, "export", *given)
    page = (folder / "RUN.md").read_text()
    expected, case = told["expected"], small_case()
    full = int((np.bincount(case.packs.step) == 4).sum())
    assert expected["steps"] == full and expected["packs"] == 4 * full
    assert expected["samples"] + expected["dropped_samples"] == 300
    assert expected["dropped_packs"] == len(case.packs) - 4 * full
    assert expected["samples_per_second"] == expected["samples_per_second_per_gpu"]  # one GPU
    step_ms = f"{expected['step_ms']:,.1f} ms"
    shown = (f"| steps | {full} |", step_ms, told["command"], "counted (analytic:laptop-cpu")
    assert all(each in page for each in (*shown, "4 GiB"))
    assert sorted(told["files"]) == sorted(path.name for path in folder.iterdir())
    assert {"target", "settings", "given_up", "notes", "folder"} <= set(told)
    run("export", plan, "--to", tmp_path / "other", "--for", "xtuner")
    said = capsys.readouterr()
    assert "what to run:" in said.out and "IMAGES ARE LOST" in said.err


@pytest.mark.parametrize("target", TargetName)
@pytest.mark.parametrize("nodes", [1, 2])
def test_run_md_starts_when_it_is_pasted(tmp_path, target, nodes):
    """Prevents a command that depends on its folder, or breaks on spaces, quotes or Unicode."""
    case, name = small_case(target, ranks=2), 'Qwen\'s "8B" $HOME \u6a21\u578b'
    model = case.files.plan.model.model_copy(update={"name": name})
    cluster = case.files.plan.cluster.model_copy(update={"gpus_per_node": 2 // nodes})
    plan = case.files.plan.model_copy(update={"model": model, "cluster": cluster})
    folder, record = tmp_path / "an export's", tmp_path / "words"
    replace(case, files=replace(case.files, plan=plan)).export(tmp_path / "data.jsonl", folder)
    [block] = re.findall("^```bash\n(.*?)^```", (folder / "RUN.md").read_text(), re.M | re.S)
    for program in ("torchrun", "megatron", "swift"):
        stub = tmp_path / "bin" / program
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/sh\nprintf '%s\\0' {program} \"$@\" > '{record}'\n")
        stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}:/usr/bin:/bin"}
    if nodes > 1:
        stopped = subprocess.run(["bash", "-euc", block], env=environment, capture_output=True)
        assert b"number of this node" in stopped.stderr and not record.exists()
        environment |= {"SLURM_NODEID": "1", "MASTER_ADDR": "first"}
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["bash", "-euc", block], cwd=tmp_path / "elsewhere", env=environment, check=True)
    program, *words = record.read_text().replace("\\'", "'").split("\0")[:-1]
    assert program == {"ms-swift": "megatron", "ms-swift-deepspeed": "swift"}.get(
        target, "torchrun"
    )
    assert all((folder / word).exists() for word in words if word.endswith((".jsonl", ".yaml")))
    yours = f"{folder}/config.py" if target is XTUNER else f"{folder}/output"
    assert any(yours in word for word in words) and not any(
        "$" in w.replace(name, "") for w in words
    )
    assert target is XTUNER or any(
        word.partition("='")[2][:-1] == name or word == name for word in words
    )


def test_mistakes_are_told_and_leave_nothing(capsys, tmp_path, plan):
    """Prevents an export over existing files, of other samples, or for an incompatible trainer."""
    data, folder = tmp_path / "data.jsonl", tmp_path / "export"
    write_data(299, tmp_path / "fewer.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text(data.read_text().replace("assistant", "nobody", 1))
    (tmp_path / "counted").mkdir()
    (tmp_path / "counted/state.json").write_text('{"_data_files": []}')
    unlimited = tmp_path / "unlimited"
    made = make_plan(request(lengths=example_lengths(origin_of(small_case().files.plan.model))))
    save_plan(made, unlimited)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments, told in (
        ((plan, "--to", unlimited), "exists already"),
        ((plan, "--to", data), "exists already"),
        ((plan, "--to", data / "export"), "is not a directory"),
        ((plan, "--to", folder, "--data", tmp_path / "fewer.jsonl"), "has 299 samples, and the"),
        ((plan, "--to", folder, "--data", folder), "is or holds"),
        ((plan, "--to", plan / "export"), f"is inside {plan}"),
        ((plan, "--to", folder, "--data", plan / "packs.parquet"), "or Parquet of lengths"),
        ((plan, "--to", folder, "--data", tmp_path / "counted"), "JSONL it was made from"),
        ((plan, "--to", folder, "--data", plan), "is a folder"),
        ((plan, "--to", folder, "--data", broken), "must be one of system, human"),
        ((unlimited, "--to", folder), "name it by --for"),
        ((unlimited, "--to", folder, "--for", "xtuner"), "`omnibal plan --for xtuner`"),
        ((tmp_path, "--to", folder), "plan.json: no such file"),
    ):
        error = failure(capsys, "export", *arguments)
        assert told in error and error.count("\n") == 1, arguments
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before


def test_data_is_checked_by_what_the_lengths_were_scanned_from(tmp_path):
    """Prevents exporting another dataset of equal size in the plan's order."""
    files = small_case().files
    write_data(300, tmp_path / "data.jsonl")
    sha256 = Annotations.open(tmp_path / "data.jsonl").sha256

    def given(sha256: str) -> ExportInput:
        origin = origin_of(files.plan.model, data_sha256=sha256)
        data = files.plan.data.model_copy(update={"origin": origin})
        changed = replace(files, plan=files.plan.model_copy(update={"data": data}))
        return export_input(changed, TARGETS[SWIFT], tmp_path / "data.jsonl", tmp_path / "export")

    assert given(sha256).annotations.sha256 == sha256
    with pytest.raises(UserError, match="the plan was made for other data: --data has sha256"):
        given("0" * 64)


def test_what_a_prediction_leaves_out_is_told(tmp_path):
    """Prevents this project's speed printed for a trainer that computes more."""
    told = {}
    for made_for in (None, TargetName.MEGATRON_LM, SWIFT):
        files = small_case().files
        sizes = files.plan.parallel.model_copy(update={"tensor": 2, "sequence_parallel": True})
        changes = {"made_for": made_for, "parallel": sizes, "prediction": None}
        plan = files.plan.model_copy(update=changes)
        files = replace(files, plan=plan, job=JobSpec.of_plan(plan))
        given = export_input(files, TARGETS[SWIFT], None, tmp_path / "export", 0)
        exported = make_export(given, lambda given: Exported(files={}, command="")).exported
        told[made_for] = [each for each in exported.deviations if "does not predict" in each]
    assert ["encoders" in each for each in told[None]] == [True, False]
    assert ["encoders" in each for each in told[TargetName.MEGATRON_LM]] == [True]
    assert told[SWIFT] == []


@pytest.mark.parametrize("target", list(TargetName))
def test_a_plan_of_shapes_has_flags_alone(capsys, tmp_path, target):
    """Prevents a plan of shapes that cannot be exported, or promises steps and samples."""
    planned = make_plan(request(lengths=None, frozen=(), epochs=1)).plan
    parallel = planned.parallel.model_copy(update={"pipeline": 1, "data": 1})
    changes = {"stages": (ALONE,), "parallel": parallel, "made_for": target, "prediction": None}
    planned = planned.model_copy(update=changes)
    save_plan(PlanResult(plan=planned, data=None, search=None), tmp_path / "plan")
    told = result(capsys, "export", tmp_path / "plan", "--to", tmp_path / "export")
    assert "train.jsonl" not in told["command"]
    expected = told["expected"]
    assert expected["steps"] is None and expected["samples"] is None and expected["step_ms"] > 0
    assert (tmp_path / "export/RUN.md").is_file()
    assert not (tmp_path / "export/order.parquet").exists()

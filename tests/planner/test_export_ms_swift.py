"""Exports for ms-swift beside a restatement of how it packs and deals, and as rows that it reads.

Restated from ms-swift 4.6.0: swift/dataset/packing.py `calculate_matched_group` ("sequential"),
swift/megatron/trainers/batch_sampler.py and swift/dataloader/shard.py without shuffling.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from export_cases import ExportCase, drawn_lengths, export_case, plan_files, scheduled
from packing_cases import sequential_packs

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.export.directory import export_input, make_export
from omnibal.export.expressible import first_obstacle
from omnibal.export.ms_swift import export
from omnibal.export.ms_swift_records import row_of, write_rows
from omnibal.export.scripts.check_packs import counted_lengths, difference, verdict
from omnibal.model.adapters import AdapterConfig
from omnibal.model.targets import TARGETS, TargetName
from omnibal.pipeline.stage import Stage

SWIFT = TargetName.MS_SWIFT


def flags_of(command: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+) (\S+)", command))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data") / "data.jsonl"


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ms_swift_makes_the_plans_packs_and_steps(tmp_path, data, seed, ranks):
    """Prevents: packs, or packs of a step and rank, that are not those that were predicted."""
    case = export_case(SWIFT, seed=seed, ranks=ranks)
    made = case.export(data, tmp_path / "export")
    flags = flags_of(made.exported.command)
    order = pq.read_table(tmp_path / "export/order.parquet").to_pydict()
    lines = (tmp_path / "export/train.jsonl").read_text().splitlines()
    assert len(lines) == len(case.lengths) == 10_000
    answers = [int(json.loads(line)["messages"][-1]["content"]) for line in lines]
    assert answers == order["sample"] == order["record"]

    tokens = case.lengths.tokens[answers].tolist()
    packs = sequential_packs(tokens, int(flags["packing_length"]))
    trained = int(flags["train_iters"]) * int(flags["global_batch_size"])
    found = {
        (k // ranks // 4, k % ranks, k // ranks % 4): sorted(answers[row] for row in pack)
        for k, pack in enumerate(packs[:trained])
    }
    planned = case.packs
    expected = {
        (step, rank, slot): sorted(planned.packs[row].tolist())
        for row, (step, rank, slot) in enumerate(
            zip(
                planned.step.tolist(),
                planned.dp_rank.tolist(),
                planned.slot.tolist(),
                strict=True,
            )
        )
        if step < int(flags["train_iters"])
    }
    assert found == expected and len(expected) == trained
    assert made.expected.samples == sum(map(len, expected.values()))
    assert made.expected.dropped_samples == 10_000 - made.expected.samples


def test_deepspeed_takes_as_many_packs_a_step(tmp_path):
    """Prevents: a global batch of one rank's packs, or of all ranks' squared."""
    case = export_case(TargetName.MS_SWIFT_DEEPSPEED, seed=0, ranks=8)
    flags = flags_of(case.export(None, tmp_path / "export").exported.command)
    assert flags["gradient_accumulation_steps"] == "4" and flags["deepspeed"] == "zero3"
    assert flags["per_device_train_batch_size"] == "1"
    assert int(flags["max_steps"]) == len(case.packs) // 32


def test_packs_that_would_merge_are_refused():
    """Prevents: a plan exported that ms-swift trains with other packs, and the wrong one named."""
    lengths = drawn_lengths(0, 40)
    lengths = replace(lengths, tokens=np.full(40, 100, np.int32))
    sizes = [4, 4, 2, 4, 4, 4, 4, 4, 4, 4, 2]
    bounds = np.cumsum([0, *sizes])
    lists = [list(range(a, b)) for a, b in pairwise(bounds)]
    packs = scheduled(lists, lengths, 1, 0)
    files = plan_files(SWIFT, packs, lengths, 1)
    told = first_obstacle(files.plan, files.data, TARGETS[SWIFT])
    order = [np.diff(packs.packs.offsets)[row] for row in np.lexsort((packs.slot, packs.step))]
    assert order.count(2) == 2 and order.index(2) < len(order) - 1
    assert f"pack {order.index(2) + 1} (step {(order.index(2) + 1) // 4}) into pack " in told
    with pytest.raises(UserError, match="omnibal plan --for ms-swift"):
        export_input(files, TARGETS[SWIFT], None, Path("export"), 0)


RECORDS = [
    {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A"}],
     "image": "a.jpg", "id": 3},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hm?"},
                  {"role": "assistant", "content": "é"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "See "},
                                               {"type": "image", "image": "b/c.png"}]},
                  {"role": "assistant", "content": "B", "loss": False}]},
    {"messages": [{"role": "user", "content": "<image><image>"},
                  {"role": "assistant", "content": "C"}], "images": ["/x/d.jpg", "/x/e.jpg"]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"},
                  {"role": "tool_call", "content": '{"name": "f", "arguments": {"a": 1}}'},
                  {"role": "tool", "content": "7"}, {"role": "assistant", "content": "s"}],
     "tools": [{"name": "f"}]},
    {"conversations": [{"from": "human", "value": "<video>\nGo"}, {"from": "gpt", "value": "D"}],
     "video": ["f/1.jpg", "f/2.jpg"]},
    {"messages": [{"role": "user", "content": "<audio>Hear"},
                  {"role": "assistant", "content": "E"}], "audios": ["g.wav"]},
]  # fmt: skip


def test_rows_say_what_the_records_say(tmp_path):
    """Prevents: an image, a turn or a call that is lost or moved on the way to ms-swift's form."""
    source, rows = tmp_path / "in/data.jsonl", tmp_path / "rows.jsonl"
    source.parent.mkdir()
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    source.write_text("\n".join(lines) + "\n")
    annotations = Annotations.open(source)
    order = np.array([5, 3, 0, 6, 1, 4, 2, 0])
    write_rows(annotations, order, rows)
    written = Annotations.open(rows)
    for place, sample in enumerate(order.tolist()):
        given, found = annotations[sample], written[place]
        for name in ("images", "recordings", "turns", "system", "tools", "videos"):
            assert getattr(found, name) == getattr(given, name), (sample, name)
    text = rows.read_text().splitlines()
    assert text[1] == lines[3] and text[4] == lines[1]  # as they were
    assert json.loads(text[2])["images"] == [str(tmp_path / "in/a.jpg")]
    assert {key for row in map(json.loads, text) for key in row} == {
        *("messages", "images", "videos", "audios", "tools")
    }


def test_images_of_internvl_have_one_line_break_behind_them(tmp_path):
    """Prevents: a token more for every image than was counted, as its template writes a break."""
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    annotations = Annotations.open(source)
    for of_tiles, question in ((False, "<image>\nWhat?"), (True, "<image>What?")):
        row = row_of(annotations[0], of_tiles=of_tiles)
        assert row["messages"][0]["content"] == question
    with pytest.raises(UserError, match="is about a video given as frames"):
        row_of(annotations[5], of_tiles=True)


def test_what_ms_swift_cannot_be_given_is_refused(tmp_path):
    """Prevents: a sample trained otherwise than it was counted, and columns of unknown type."""
    texts = [{"messages": [{"role": "user", "content": "x" * 60_000},
                           {"role": "assistant", "content": "y"}]}] * 180  # fmt: skip
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(record) + "\n" for record in [*texts, RECORDS[0]]))
    late = np.arange(181)
    with pytest.raises(UserError, match='first row with "images" begins 10'):
        write_rows(Annotations.open(source), late, tmp_path / "late.jsonl")
    write_rows(Annotations.open(source), late[::-1], tmp_path / "early.jsonl")
    greeting = {
        "messages": [{"role": "assistant", "content": "Hello"}, *RECORDS[1]["messages"][1:]]
    }
    source.write_text(json.dumps(greeting))
    with pytest.raises(UserError, match="begins with what the assistant says"):
        row_of(Annotations.open(source)[0])


def test_flags_say_how_the_plan_is_divided():
    """Prevents: encoders frozen that the plan trains, layers split or recomputed otherwise."""
    case = export_case(SWIFT, seed=0, ranks=1)
    plan = case.files.plan
    stages = (
        Stage.of("vision embed", "vision 0..3", "projector", "language embed", "language 0",
                 recompute=("vision 0..3", "language 0")),
        Stage.of("language 1..3", "head", recompute=("language 1..2",)),
    )  # fmt: skip
    parallel = plan.parallel.model_copy(update={"pipeline": 2})
    changes = {"stages": stages, "parallel": parallel, "frozen": ("vision",)}
    plan = plan.model_copy(update=changes)
    assert first_obstacle(plan, case.files.data, TARGETS[SWIFT]) is None
    files = replace(case.files, plan=plan)
    given = export_input(files, TARGETS[SWIFT], None, Path("/export"), 0)
    flags = flags_of(export(given).command)
    expected = {
        "pipeline_model_parallel_size": "2", "decoder_first_pipeline_num_layers": "1",
        "decoder_last_pipeline_num_layers": "3", "recompute_granularity": "full",
        "recompute_method": "block", "recompute_num_layers": "2",
        "vit_gradient_checkpointing": "true", "freeze_vit": "true", "freeze_aligner": "false",
        "freeze_llm": "false", "micro_batch_size": "1", "packing_strategy": "sequential",
        "packing_num_proc": "1", "dataset_shuffle": "false", "train_dataloader_shuffle": "false",
        "split_dataset_ratio": "0", "strict": "true",
    }  # fmt: skip
    assert {name: flags[name] for name in expected} == expected


def test_flags_say_the_plans_adapters():
    """Prevents: whole weights trained for a plan of adapters, modules of an encoder that has none
    in the plan, and adapters that another trainer is not told."""
    case = export_case(SWIFT, seed=0, ranks=1)
    adapters = AdapterConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    frozen = ("vision", "projector")
    plan = case.files.plan.model_copy(update={"adapters": adapters, "frozen": frozen})
    files = replace(case.files, plan=plan)
    given = export_input(files, TARGETS[SWIFT], None, Path("/export"), 0)
    command = export(given).command
    flags = flags_of(command)
    expected = {
        "tuner_type": "lora", "lora_rank": "16", "lora_alpha": "32", "freeze_llm": "false",
        "freeze_vit": "true", "freeze_aligner": "true",
    }  # fmt: skip
    assert {name: flags[name] for name in expected} == expected
    [pattern] = re.findall(r"--target_regex '(.*?)'", command)
    assert re.fullmatch(pattern, "model.language_model.layers.3.self_attn.v_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layer.3.attention.v_proj")
    assert first_obstacle(plan, case.files.data, TARGETS[SWIFT]) is None
    assert "adapters" in first_obstacle(plan, None, TARGETS[TargetName.MEGATRON_LM])
    whole = plan.model_copy(update={"frozen": ("vision",)})
    assert "all else frozen" in first_obstacle(whole, None, TARGETS[SWIFT])


def cached(folder: Path, lengths: list) -> None:
    """A cached dataset, in two files, as Hugging Face's datasets writes one."""
    folder.mkdir()
    half = len(lengths) // 2
    for name, part in (("a.arrow", lengths[:half]), ("b.arrow", lengths[half:])):
        table = pa.table({"lengths": pa.array(part)})
        with (
            pa.OSFile(str(folder / name), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as w,
        ):
            w.write_table(table)
    files = [{"filename": "a.arrow"}, {"filename": "b.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))


def test_the_check_of_packs_tells_what_differs(tmp_path):
    """Prevents: a run on other packs than planned that was checked and found as planned."""
    case = export_case(SWIFT, seed=0, ranks=1, samples=300)
    case.export(None, tmp_path / "export")
    order = pq.read_table(tmp_path / "export/order.parquet")
    tokens = order["tokens"].to_pylist()

    packs = order["pack"].to_pylist()
    cached(tmp_path / "same", [[length] for length in tokens])
    cached(tmp_path / "longer", [tokens[0] + 4_000, *tokens[1:]])
    script = tmp_path / "export/check_packs.py"
    command = [sys.executable, script, tmp_path / "longer"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stdout.startswith("pack 0 is another: 1 of 300 lengths differ (row 0 has")
    command[-1] = tmp_path / "nowhere"
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    assert difference(counted_lengths(tmp_path / "same"), tokens, packs) is None
    assert verdict(tokens, tokens, packs)[0].startswith("as planned: ")
    row = packs.index(packs[-1]) + 1  # not its pack's first, and the pack has room
    other = [*tokens[:row], tokens[row] - 1, *tokens[row + 1 :]]
    told, status = verdict(other, tokens, packs)
    assert status == 0 and f"1 of 300 lengths differ (row {row} has {other[row]} for" in told
    assert difference(tokens[:-1], tokens, packs).startswith("299 rows were counted, and the plan")
    rows = list(range(300))
    swapped = [rows[packs.index(1)], *rows[1 : packs.index(1)], 0, *rows[packs.index(1) + 1 :]]
    told = difference([tokens[row] for row in swapped], tokens, packs)
    assert told is not None and "2 of 300 lengths differ (row 0 has" in told


def test_an_export_without_data_says_how_to_use_the_order(tmp_path):
    """Prevents: a command that trains rows which are not there, without a word."""
    made = ExportCase.export(export_case(SWIFT, seed=0, ranks=2), None, tmp_path / "export")
    assert made.files == ["RUN.md", "check_packs.py", "order.parquet"]
    assert any("order.parquet" in note for note in made.exported.notes)
    assert make_export(made.given, export).files == made.files

"""Exports for ms-swift against a copy of its packing and sampling, and as rows it reads. From
ms-swift 4.6.0: swift/dataset/packing.py `calculate_matched_group` ("sequential"),
swift/megatron/trainers/batch_sampler.py and swift/dataloader/shard.py without shuffling."""

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
from cli_cases import run
from export_cases import drawn_lengths, export_case, files_for, first_obstacle, places_of, shuffle
from packing_cases import sequential_packs

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.job.plan import Plan
from omnibal.model.adapter_settings import AdapterConfig
from omnibal.model.targets import TARGETS, TargetName
from omnibal.pipeline.stage_units import Stage
from omnibal.trainers.export.directory import export_input
from omnibal.trainers.export.ms_swift import export
from omnibal.trainers.export.ms_swift_records import row_of, write_rows
from omnibal.trainers.export.scripts.check_packs import counted_lengths, verdict

SWIFT = TargetName.MS_SWIFT


def flags_of(command: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+) (\S+)", command))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data") / "data.jsonl"


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ms_swift_makes_the_plans_packs_and_steps(tmp_path, data, seed, ranks):
    """Prevents packs per step and rank that differ from the predicted ones."""
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
    expected = {
        place: sorted(pack)
        for place, pack in places_of(case.packs).items()
        if place[0] < int(flags["train_iters"])
    }
    assert found == expected and len(expected) == trained
    assert made.expected.samples == sum(map(len, expected.values()))
    assert made.expected.dropped_samples == 10_000 - made.expected.samples


def test_deepspeed_takes_as_many_packs_a_step(tmp_path):
    """Prevents another global batch, and a command that names rows not exported."""
    case = export_case(TargetName.MS_SWIFT_DEEPSPEED, seed=0, ranks=8)
    made = case.export(None, tmp_path / "export")
    flags = flags_of(made.exported.command)
    assert flags["gradient_accumulation_steps"] == "4" and flags["deepspeed"] == "zero3"
    assert flags["per_device_train_batch_size"] == "1"
    assert int(flags["max_steps"]) == len(case.packs) // 32
    assert made.files == ["RUN.md", "check_packs.py", "order.parquet"]
    assert any("order.parquet" in note for note in made.exported.notes)


def test_packs_that_would_merge_are_refused():
    """Prevents exporting a plan that ms-swift packs differently, and naming the wrong pack."""
    lengths = drawn_lengths(0, 40)
    lengths = replace(lengths, tokens=np.full(40, 100, np.int32))
    bounds = np.cumsum([0, 4, 4, 2, 4, 4, 4, 4, 4, 4, 4, 2])
    packs = shuffle([list(range(a, b)) for a, b in pairwise(bounds)], lengths, 1, 0)
    files = files_for(SWIFT, packs, lengths, 1)
    told = first_obstacle(files.plan, files.data, TARGETS[SWIFT])
    order = np.diff(packs.packs.offsets)[np.lexsort((packs.slot, packs.step))].tolist()
    short = order.index(2)
    assert order.count(2) == 2 and short < len(order) - 1
    assert f"pack {short + 1} (step {(short + 1) // 4}) into pack " in told
    with pytest.raises(UserError, match="omnibal plan --for ms-swift"):
        export_input(files, TARGETS[SWIFT], None, Path("export"), 0)


def chat(*turns: tuple[str, object], **more: object) -> dict:
    """Return a record of roles and messages."""
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def sharegpt(asked: str, answer: str, **more: object) -> dict:
    """Return a record in ShareGPT form."""
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, **more}


PARTS = [{"type": "text", "text": "See "}, {"type": "image", "image": "b/c.png"}]
CALL = '{"name": "f", "arguments": {"a": 1}}'
RECORDS = [
    sharegpt("<image>\nWhat?", "A", image="a.jpg", id=3),
    chat(("system", "Be brief."), ("user", "Hm?"), ("assistant", "é")),
    {"messages": [{"role": "user", "content": PARTS},
                  {"role": "assistant", "content": "B", "loss": False}]},
    chat(("user", "<image><image>"), ("assistant", "C"), images=["/x/d.jpg", "/x/e.jpg"]),
    chat(("user", "q"), ("assistant", "r"), ("tool_call", CALL), ("tool", "7"), ("assistant", "s"),
         tools=[{"name": "f"}]),
    sharegpt("<video>\nGo", "D", video=["f/1.jpg", "f/2.jpg"]),
    chat(("user", "<audio>Hear"), ("assistant", "E"), audios=["g.wav"]),
]  # fmt: skip


def annotations_of(path: Path, records: list[dict]) -> Annotations:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines))
    return Annotations.open(path)


def test_rows_say_what_the_records_say(tmp_path):
    """Prevents an image, a turn or a call lost or moved by conversion to ms-swift's form."""
    (tmp_path / "in").mkdir()
    source, rows = tmp_path / "in/data.jsonl", tmp_path / "rows.jsonl"
    annotations = annotations_of(source, RECORDS)
    lines = source.read_text().splitlines()
    order = np.array([5, 3, 0, 6, 1, 4, 2, 0])
    write_rows(annotations, order, rows)
    written = Annotations.open(rows)
    for place, sample in enumerate(order.tolist()):
        given, found = annotations[sample], written[place]
        for name in ("images", "recordings", "turns", "system", "tools", "videos"):
            assert getattr(found, name) == getattr(given, name), (sample, name)
    text = rows.read_text().splitlines()
    assert text[1] == lines[3] and text[4] == lines[1]  # unchanged
    assert json.loads(text[2])["images"] == [str(tmp_path / "in/a.jpg")]
    assert {key for row in map(json.loads, text) for key in row} == {
        *("messages", "images", "videos", "audios", "tools")
    }


def test_images_of_internvl_have_one_line_break_behind_them(tmp_path):
    """Prevents samples trained with other tokens than counted, and columns of unknown type."""
    annotations = annotations_of(tmp_path / "data.jsonl", RECORDS)
    for of_tiles, question in ((False, "<image>\nWhat?"), (True, "<image>What?")):
        row = row_of(annotations[0], of_tiles=of_tiles)
        assert row["messages"][0]["content"] == question
    plain = chat(("user", "<image>\nWhat?"), ("assistant", "A"), images=["/x/d.jpg"])
    source = annotations_of(tmp_path / "plain.jsonl", [plain])
    write_rows(source, np.zeros(1, int), tmp_path / "rows.jsonl", of_tiles=True)
    assert '"<image>What?"' in (tmp_path / "rows.jsonl").read_text()
    with pytest.raises(UserError, match="has a video of frames"):
        row_of(annotations[5], of_tiles=True)
    source, late = tmp_path / "data.jsonl", np.arange(181)
    annotations = annotations_of(
        source, [chat(("user", "x" * 60_000), ("assistant", "y"))] * 180 + [RECORDS[0]]
    )
    with pytest.raises(UserError, match='first row with "images" begins 10'):
        write_rows(annotations, late, tmp_path / "late.jsonl")
    write_rows(annotations, late[::-1], tmp_path / "early.jsonl")
    greeting = chat(("assistant", "Hello"), ("user", "Hm?"), ("assistant", "é"))
    with pytest.raises(UserError, match="begins with the assistant"):
        row_of(annotations_of(source, [greeting])[0])


def command_of(**changes) -> tuple[Plan, str]:
    """Return a small plan with supported changes, and its export's command."""
    case = export_case(SWIFT, seed=0, ranks=1)
    plan = case.files.plan.model_copy(update=changes)
    assert first_obstacle(plan, case.files.data, TARGETS[SWIFT]) is None
    files = replace(case.files, plan=plan)
    return plan, export(export_input(files, TARGETS[SWIFT], None, Path("/export"), 0)).command


def test_flags_say_how_the_plan_is_divided():
    """Prevents freezing encoders that the plan trains, and other splits or recomputed layers."""
    stages = (
        Stage.parse("vision embed", "vision 0..3", "projector", "language embed", "language 0",
                 recompute=("vision 0..3", "language 0")),
        Stage.parse("language 1..3", "head", recompute=("language 1..2",)),
    )  # fmt: skip
    parallel = export_case(SWIFT, seed=0, ranks=1).files.plan.parallel
    sizes = parallel.model_copy(update={"pipeline": 2})
    flags = flags_of(command_of(stages=stages, parallel=sizes, frozen=("vision",))[1])
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


@pytest.mark.parametrize(
    ("frozen", "flag"),
    [("vision", "freeze"), ("projector", "trainable"), ("language", None)],
)
def test_deepstack_projectors_are_frozen_with_their_tower(tmp_path, frozen, flag):
    """Prevents frozen deepstack projectors from being trained with ms-swift's aligner."""
    job = "plan --model qwen3-vl-8b --cluster h100-80g --tp 2 --dp 4 --max-tokens 4096"
    run(f"{job} --for ms-swift --freeze {frozen}", "-o", tmp_path / "plan")
    run("export", tmp_path / "plan", "--to", tmp_path / "export")
    written = (tmp_path / "export" / "RUN.md").read_text()
    found = re.findall(r"--(\w+)_parameters_regex '?deepstack_merger", written)
    assert found == ([] if flag is None else [flag])


def test_flags_say_the_plans_adapters():
    """Prevents training all weights, or other modules, for a plan of adapters."""
    adapters = AdapterConfig(rank=16, alpha=32, targets=("q_proj", "v_proj"))
    plan, command = command_of(adapters=adapters, frozen=("vision", "projector"))
    flags = flags_of(command)
    expected = {
        "tuner_type": "lora", "lora_rank": "16", "lora_alpha": "32", "freeze_llm": "false",
        "freeze_vit": "true", "freeze_aligner": "true",
    }  # fmt: skip
    assert {name: flags[name] for name in expected} == expected
    [pattern] = re.findall(r"--target_regex '(.*?)'", command)
    assert re.fullmatch(pattern, "model.language_model.layers.3.self_attn.v_proj")
    assert not re.fullmatch(pattern, "model.vision_tower.encoder.layer.3.attention.v_proj")
    assert "adapters" in first_obstacle(plan, None, TARGETS[TargetName.MEGATRON_LM])
    whole = plan.model_copy(update={"frozen": ("vision",)})
    assert "all other parts frozen" in first_obstacle(whole, None, TARGETS[SWIFT])


def write_cache(folder: Path, lengths: list) -> None:
    """Write a cached dataset in two files, as Hugging Face's datasets does."""
    folder.mkdir()
    half = len(lengths) // 2
    for name, part in (("a.arrow", lengths[:half]), ("b.arrow", lengths[half:])):
        table = pa.table({"lengths": pa.array(part)})
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    files = [{"filename": "a.arrow"}, {"filename": "b.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))


def test_the_check_of_packs_tells_what_differs(tmp_path):
    """Prevents the check from accepting packs that differ from the plan's."""
    case = export_case(SWIFT, seed=0, ranks=1, samples=300)
    case.export(None, tmp_path / "export")
    order = pq.read_table(tmp_path / "export/order.parquet")
    tokens, packs = order["tokens"].to_pylist(), order["pack"].to_pylist()
    write_cache(tmp_path / "same", [[length] for length in tokens])
    write_cache(tmp_path / "longer", [tokens[0] + 4_000, *tokens[1:]])

    def run_check(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, tmp_path / "export/check_packs.py", tmp_path / name]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ended = run_check("longer")
    assert ended.returncode == 1
    assert ended.stdout.startswith("pack 0 differs: 1 of 300 lengths differ (row 0 has")
    ended = run_check("nowhere")
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1
    told = verdict(counted_lengths(tmp_path / "same"), tokens, packs)[0]
    assert told.startswith("as planned: ")
    row = packs.index(packs[-1]) + 1  # not its pack's first row, in a pack with free space
    other = [*tokens[:row], tokens[row] - 1, *tokens[row + 1 :]]
    told, status = verdict(other, tokens, packs)
    assert status == 0 and f"1 of 300 lengths differ (row {row} has {other[row]} for" in told
    assert verdict(tokens[:-1], tokens, packs)[0].startswith("299 rows were counted, not the plan")
    swapped, other = tokens.copy(), packs.index(1)
    swapped[0], swapped[other] = tokens[other], tokens[0]
    told, _ = verdict(swapped, tokens, packs)
    assert told is not None and "2 of 300 lengths differ (row 0 has" in told

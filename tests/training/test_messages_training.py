"""InternVL3.5's structure trained by four processes on its own form of data and on messages."""

import json
from pathlib import Path

import numpy as np
from megatron.core import parallel_state
from pipeline_cases import pipeline_plan
from ranks import run_ranks
from toy import OPTIONS

from megatron.vlm.inputs.batch import MicroBatchStream
from megatron.vlm.inputs.data import PackDataset
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.step.train import build_trainer, train_step
from omnibal.data.annotations import Annotations
from omnibal.data.scan import scan_lengths
from omnibal.model.config import load_model
from omnibal.packing.packs import Packs, ScheduledPacks

# InternVL3.5's vision encoder, and Qwen3's norms of q and k with heads of a size of their own.
MODEL = load_model("internvl-digits").with_tower("language", qk_norm=True, head_size=32)
PACKS = [[0, 5], [3], [1, 2], [4]]


def as_messages(record: dict, images: Path, number: int) -> dict:
    """A record of InternVL's form as messages: some with marks in the text, some with parts."""
    paths = [str(images / name) for name in record["image"]]
    left = iter(paths)
    messages = []
    for said in record["conversations"]:
        role = {"human": "user", "gpt": "assistant"}.get(said["from"], said["from"])
        content: object = said["value"]
        if number % 2 and "<image>" in content:
            first, *others = content.split("<image>")
            content = [{"type": "text", "text": first}]
            for text in others:
                content.append({"type": "image", "image": f"file://{next(left)}"})
                content.append({"type": "text", "text": text})
        messages.append({"role": role, "content": content})
    return {"messages": messages, **({} if number % 2 else {"images": paths})}


def two_forms(digits: Path, folder: Path) -> tuple[Path, Path]:
    """A meta of samples with several images and turns, and a bare file of the same as messages."""
    records, images = [], digits / "train"
    for source in json.loads((images / "meta.json").read_text()).values():
        for line in (images / source["annotation"]).read_text().splitlines()[:3]:
            record, root = json.loads(line), images / (source.get("root") or "")
            files = record.get("image") or []
            files = [files] if isinstance(files, str) else files
            record["image"] = [str(root / name) for name in files]
            if files and any("<image>" in said["value"] for said in record["conversations"]):
                records.append(record)
    records = sorted(records, key=lambda record: -len(record["image"]))[:6]
    messages = [as_messages(record, images, k) for k, record in enumerate(records)]
    for name, lines in (("own.jsonl", records), ("messages.jsonl", messages)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "meta.json").write_text('{"own": {"annotation": "own.jsonl"}}')
    return folder / "meta.json", folder / "messages.jsonl"


def trained(links, plan, readers, lengths):
    """Losses and gradient norms of a step on each reader's samples, from the same weights."""
    results, rows = [], np.arange(len(PACKS))
    packs = Packs.from_lists(PACKS)
    scheduled = ScheduledPacks.of(packs, lengths, 0 * rows, rows % 2, rows // 2)
    own, stage = rows[parallel_state.get_data_parallel_rank() :: 2], plan.stages[links.rank]
    for reader in readers:
        trainer = build_trainer(plan, links, OPTIONS, steps=10, seed=3)
        dataset = PackDataset(reader, scheduled, lengths, own, stage)
        found = train_step(trainer, MicroBatchStream.of([dataset[k] for k in range(len(own))]))
        results.append((found.loss, found.grad_norm, found.loss_tokens))
    return results


def test_messages_train_as_internvls_form_does(digits, tokenizer, tmp_path):
    """Prevents: messages that are read as other tokens, images or losses than the same samples."""
    readers, lengths = [], []
    for path in two_forms(digits, tmp_path):
        readers.append(SampleReader(Annotations.open(path), tokenizer, MODEL))
        scan = scan_lengths(readers[-1].annotations, MODEL, tokenizer, lambda done: None)
        lengths.append(scan.lengths)
    own, messages = lengths
    for name in ("tokens", "loss_tokens", "tiles"):
        assert own.column(name).tolist() == messages.column(name).tolist()
    assert own.column("tiles").min() > 0
    plan = pipeline_plan(7, model=MODEL, data=2)
    for (loss, *others), again in run_ranks(plan.parallel, trained, plan, readers, own):
        assert loss > 1
        assert again == (loss, *others)

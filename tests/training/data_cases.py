"""A dataset, its lengths and packs."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from toy import stages_of

from megatron.vlm.inputs.data import MicroBatchOptions, OnBadSample, PackDataset
from megatron.vlm.inputs.pack_share import Sharing
from megatron.vlm.inputs.reader import SampleReader
from omnibal.data.annotations import Annotations
from omnibal.data.scan import scan_lengths
from omnibal.model.config import ModelConfig, load_model
from omnibal.model.levels import Level
from omnibal.packing.packs import Packs, ScheduledPacks

MODEL = load_model("internvl-digits")
CPU = torch.device("cpu")
[WHOLE] = stages_of(MODEL)
FIRST, MIDDLE, TEXT, LAST = stages_of(
    MODEL, 2, MODEL.vision.layers + 1, MODEL.vision.layers + MODEL.language.layers + 2
)
SKIP = MicroBatchOptions(on_bad_sample=OnBadSample.SKIP)


class Data:
    """A dataset, its lengths and packs."""

    def __init__(self, meta: Path, tokenizer, model: ModelConfig = MODEL) -> None:
        self.reader = SampleReader(Annotations.open(meta), tokenizer, model)
        scan = scan_lengths(self.reader.annotations, model, tokenizer, lambda done: None)
        self.lengths = scan.lengths
        [self.whole] = stages_of(model)

    def load(self, pack, stage=None, options=MicroBatchOptions()):  # noqa: B008
        """Return a pack as loaded for a stage, by default the full model."""
        return self.dataset([pack], stage, options)[0]

    def dataset(self, packs, stage=None, options=MicroBatchOptions(), epoch=0) -> PackDataset:  # noqa: B008
        """Return lists of samples as one rank's micro-batches."""
        rows = np.arange(len(packs))
        packs = ScheduledPacks.from_packs(Packs.from_lists(packs), self.lengths, rows, epoch=epoch)
        return PackDataset(self.reader, packs, self.lengths, rows, stage or self.whole, options)


def noisy_pictures(folder: Path, tokenizer) -> Data:
    """Return noisy photographs in several formats, from an augmented and a plain source."""
    rng = np.random.default_rng(0)
    lines = []
    for number, (width, height, kind) in enumerate(
        [(70, 40, "jpg"), (64, 64, "png"), (33, 90, "jpg"), (64, 200, "png"), (64, 64, "jpg")]
    ):
        coarse = Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{number}.{kind}")
        lines.append(_line([f"{number}.{kind}"], "x" * (3 * number + 1)))
    lines.append(_line(["0.jpg", "1.png"], "both"))
    lines.append(_line([], "none"))
    (folder / "a.jsonl").write_text("".join(lines))
    source = {"root": "", "annotation": "a.jsonl"}
    meta = {"augmented": {**source, "data_augment": True}, "plain": source}
    (folder / "meta.json").write_text(json.dumps(meta))
    return Data(folder / "meta.json", tokenizer)


def make_turns(*texts: str) -> list[dict[str, str]]:
    """Messages of a record: questions and answers in turn."""
    return [{"from": ("human", "gpt")[k % 2], "value": text} for k, text in enumerate(texts)]


def _line(images: list[str], answer: str) -> str:
    turns = make_turns("<image>" * len(images) + "What?", answer, "And?", answer[:2])
    return json.dumps({"image": images, "conversations": turns}) + "\n"


def shares(dataset: PackDataset, level: Level) -> Iterator:
    """Yield the dataset's pack as loaded by each rank of its context-parallel group."""
    for rank in range(level.context):
        yield PackDataset(
            dataset.reader, dataset.scheduled, dataset.lengths, dataset.rows, dataset.stage,
            dataset.options, Sharing(dp_rank=rank, levels=[level]),
        )[0]  # fmt: skip


def assert_same(got, expected):
    """Assert that all fields of two micro-batches are equal."""
    for name, value in vars(expected).items():
        if name == "share" and value is not None:
            assert got.share.part == value.part
        elif torch.is_tensor(value):
            assert torch.equal(getattr(got, name), value), name
        else:
            assert getattr(got, name) == value, name

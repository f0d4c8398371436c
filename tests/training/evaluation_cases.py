"""Answers of a pipeline, and of a full model in one process."""

from pathlib import Path

from toy import OPTIONS

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.inputs.reader import SampleReader
from megatron.vlm.run.generate import generate, load_whole_model
from megatron.vlm.step.evaluate import evaluate_answers
from megatron.vlm.step.train import build_trainer
from omnibal.data.annotations import Annotations
from omnibal.data.sample import Sample
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import load_model
from omnibal.model.limits import Caps

MAX_NEW_TOKENS = 4
SAMPLES = 6
CAPS = Caps.of(tiles=8, tokens=400)


def reader_of(folder: Path) -> SampleReader:
    tokenizer = open_tokenizer(folder / "tokenizer.model")
    annotations = Annotations.open(folder / "heldout" / "meta.json")
    return SampleReader(annotations, tokenizer, load_model("internvl-digits"))


def pipeline_answers(links, plan, folder):
    trainer = build_trainer(plan, links, OPTIONS, steps=1, seed=1)
    return evaluate_answers(
        trainer, CAPS, reader_of(folder), 0, lambda done, total: None,
        samples=SAMPLES, max_new_tokens=MAX_NEW_TOKENS,
    )  # fmt: skip


def reader_of_run(run: Path, sample: Sample) -> SampleReader:
    return SampleReader([sample], open_tokenizer(run / "tokenizer"), open_newest(run).model)


def answers(links, run: Path, samples: list[Sample], new_tokens: int) -> list[list[int]]:
    stage = load_whole_model(open_newest(run), "fp32")
    return [list(generate(stage, reader_of_run(run, one), one, new_tokens)) for one in samples]

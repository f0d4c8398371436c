"""The sample dataset of images of many sizes, and its tokenizer with Qwen's chat template."""

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoTokenizer

from omnibal.data.annotations import Annotations
from omnibal.data.chat import check_tokenizer
from omnibal.data.scan import scan_lengths
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import load_model
from tools.make_digits_dataset import SHARES
from tools.make_native_digits import PIECES, WORDS, main

MODEL = load_model("qwen3-vl-digits")
ARGUMENTS = ["--samples", "200", "--heldout-samples", "60", "--seed", "3"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "dataset"
    assert main(["--output", str(folder), *ARGUMENTS]) == 0
    return folder


def test_the_same_arguments_give_the_same_tokenizer_and_text(dataset, tmp_path):
    """Prevents: a quickstart that learns another task, or speaks other tokens, every time."""
    assert main(["--output", str(tmp_path / "again"), *ARGUMENTS]) == 0
    for path in [*dataset.glob("tokenizer/*"), *dataset.glob("**/*.jsonl")]:
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(dataset)).read_bytes()


def test_sizes_and_tokens_vary(dataset):
    """Prevents: images that are all of one size, on which balancing has nothing to do."""
    sides = {Image.open(path).size for path in dataset.glob("train/images/*single*")}
    assert {min(side) for side in sides} >= set(range(26, 37))
    tokenizer = open_tokenizer(dataset / "tokenizer")
    check_tokenizer(MODEL, tokenizer)
    annotations = Annotations.open(dataset / "train" / "meta.json")
    lengths = scan_lengths(annotations, MODEL, tokenizer, lambda _: None).lengths
    tokens = lengths.column("image_tokens")
    assert (tokens.min(), len(set(tokens.tolist())) > 12) == (0, True)
    assert tokens.max() > 80 and lengths.source_names == tuple(SHARES)


def test_the_other_task_has_other_answers(dataset):
    """Prevents: adapters that have nothing to learn, as the model answers so already."""
    seen = Annotations.open(dataset / "next" / "train" / "meta.json")
    answers = [seen[number].turns[0].answer for number in range(len(seen))]
    assert len(answers) == 200 // 4 and set(answers) == set("0123456789")


def test_tokenizer_is_the_one_that_transformers_opens(dataset):
    """Prevents: ids, pieces or a template that differ from those of an exported folder."""
    theirs, ours = (
        AutoTokenizer.from_pretrained(dataset / "tokenizer"),
        open_tokenizer(dataset / "tokenizer"),
    )
    assert ours.vocab_size == len(theirs) <= WORDS == MODEL.language.vocab_size
    for text in ("Which digit is 40?", "<|im_start|>user\nÄ <|image_pad|>", "漢 字\n\n"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert theirs.decode(theirs.encode(text)) == text
    assert len(ours.encode("4096")) == 4
    assert [ours.id_of(piece) for piece in PIECES] == list(range(len(PIECES)))
    record = json.loads((dataset / "train" / "digits_single.jsonl").read_text().split("\n")[0])
    asked = record["conversations"][0]["value"].removeprefix("<image>\n")
    content = [{"type": "image"}, {"type": "text", "text": asked}]
    text = theirs.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        f"{asked}<|im_end|>\n<|im_start|>assistant\n"
    )

"""The chat template: its words, its mask, its prompts; and what a tokenizer must have."""

import io

import numpy as np
import pytest
from sentencepiece import SentencePieceTrainer, SetMinLogLevel

from omnibal.data.annotations import Annotations, Sample, Turn
from omnibal.data.chat import encode_prompt, encode_sample
from omnibal.data.tokenizer import Tokenizer
from omnibal.errors import UserError


def sample_of(*turns: tuple[str, str], images: int = 0) -> Sample:
    return Sample(
        identity="x",
        source="x",
        where="x.jsonl: line 1",
        images=tuple(f"{k}.png" for k in range(images)),
        turns=tuple(Turn(question, answer, None) for question, answer in turns),
    )


def runs(ids: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Token ids of each unbroken stretch of the mask."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [ids[start:end].tolist() for start, end in borders.reshape(-1, 2)]


def test_template_spelled_out(tokenizer):
    """Prevents any token of the template from being moved, dropped or doubled."""
    sample = sample_of(
        ("<image>\nWhich digit is <image> this?", "7"), ("Read the line.", "3 1"), images=2
    )
    encoded = encode_sample(sample, [1, 2], 3, tokenizer)

    def text(words):
        return tokenizer.encode(words)

    start, end = tokenizer.turn_start, tokenizer.turn_end

    def image(count):
        return [tokenizer.image_start, *[tokenizer.image_context] * count, tokenizer.image_end]

    expected = [
        *[tokenizer.bos, start, *text("user\n"), *image(3), *text("\nWhich digit is "), *image(6)],
        *[*text(" this?"), end, *text("\n"), start, *text("assistant\n"), *text("7"), end],
        *[*text("\n"), start, *text("user\n"), *text("Read the line."), end, *text("\n")],
        *[start, *text("assistant\n"), *text("3 1"), end, *text("\n")],
    ]
    assert encoded.token_ids.tolist() == expected
    assert encoded.token_ids.dtype == np.int64


def test_mask_holds_answers_and_their_ends(digits, tokenizer):
    """Prevents loss on questions or images, and answers without their end."""
    annotations = Annotations.open(digits / "train" / "meta.json")
    for sample in annotations:
        encoded = encode_sample(sample, [2] * len(sample.images), 4, tokenizer)
        learned = runs(encoded.token_ids, encoded.loss_mask)
        assert [run[-1] for run in learned] == [tokenizer.turn_end] * len(sample.turns)
        answers = [tokenizer.decode(run[:-1]) for run in learned]
        assert answers == [turn.answer for turn in sample.turns]


def test_prompt_is_what_precedes_the_answer(digits, tokenizer):
    """Prevents evaluation from asking in other words than training did."""
    annotations = Annotations.open(digits / "train" / "meta.json")
    for sample in annotations:
        tiles = [2] * len(sample.images)
        encoded = encode_sample(sample, tiles, 4, tokenizer)
        previous = np.concatenate([[False], encoded.loss_mask[:-1]])
        answer_starts = np.flatnonzero(encoded.loss_mask & ~previous)
        for turn, start in enumerate(answer_starts):
            prompt = encode_prompt(sample, turn, tiles, 4, tokenizer)
            np.testing.assert_array_equal(prompt, encoded.token_ids[:start])


def test_whole_conversation_reads_back(tokenizer):
    """Prevents line ends or spaces from being lost between the pieces encoded apart."""
    sample = sample_of(("Which digit is  first?\nsecond?", "1"), ("What is 1 + 1?", " 2 "))
    ids = encode_sample(sample, [], 4, tokenizer).token_ids
    start, end = "<|im_start|>", "<|im_end|>"
    assert tokenizer.decode(ids[1:].tolist()) == (
        f"{start}user\nWhich digit is  first?\nsecond?{end}\n{start}assistant\n1{end}\n"
        f"{start}user\nWhat is 1 + 1?{end}\n{start}assistant\n 2 {end}\n"
    )


def test_tile_counts_must_match_the_images(tokenizer):
    """Prevents images from silently taking each other's tiles."""
    with pytest.raises(ValueError, match="2 image"):
        encode_sample(sample_of(("<image>", "1"), images=1), [1, 1], 4, tokenizer)


def test_missing_pieces_are_named(tmp_path):
    """Prevents image tokens from becoming unknown tokens with another model's tokenizer."""
    SetMinLogLevel(2)
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words"]),
        model_writer=model,
        model_type="char",
        vocab_size=20,
        hard_vocab_limit=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "<img>"],
    )
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(UserError, match=r"lacks the piece\(s\) <IMG_CONTEXT> </img>;"):
        Tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"not a model" * 50])
def test_other_file_is_refused_quietly(tmp_path, capfd, content):
    """Prevents a crash, or the library's own log beside the one error message."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a SentencePiece model"):
        Tokenizer(path)
    assert capfd.readouterr().err == ""


def test_missing_file_is_named(tmp_path):
    """Prevents a traceback for a wrong path."""
    with pytest.raises(UserError, match="no such tokenizer"):
        Tokenizer(tmp_path / "tokenizer.model")

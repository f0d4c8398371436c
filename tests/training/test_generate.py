"""Answers of a complete model in one process, compared with Transformers' generation."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from commands import launcher
from conversion_file_cases import edit_config
from evaluation_cases import answers, reader_of_run
from PIL import Image
from ranks import run_ranks
from released import KINDS, PIECES, imported, save_toy, transformers_model, word_tokenizer

from megatron.vlm.checkpoint.identity import open_newest
from omnibal.data.chat import encode_prompt
from omnibal.data.sample import Sample, Turn
from omnibal.data.stored_files import ImageFile
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.parallel import Parallel

NEW_TOKENS, CHATS = 6, "c c c"


@pytest.fixture(
    scope="module", params=[("300m-qwen2", "qwen2"), ("6b-qwen2-tied", "transformers")], ids=str
)
def model_and_run(request, tmp_path_factory):
    """Return a random Transformers model and the run it was imported to. In InternVL's layout it
    has a system message for chats, and RoPE scaled beyond a limit."""
    folder = tmp_path_factory.mktemp("released")
    name, layout = request.param
    save_toy(name, folder / "model", layout)
    if layout == "qwen2":
        edit_config(system_message=CHATS)(folder / "model")
    write_tokenizer(folder / "model")
    return transformers_model(KINDS[name]), imported(folder / "model", folder / "run")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of words and the chat template's pieces."""
    words = word_tokenizer(PIECES)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(PIECES[:6])
    words.save(str(folder / "tokenizer.json"))


def sample_of(folder: Path, images: int) -> Sample:
    paths = []
    for number in range(images):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 45, 3), np.uint8)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    question = "<image>\n" * images + "a b"
    return Sample(
        identity="s", source="s", where="s", images=tuple(map(ImageFile, paths)),
        turns=(Turn(question, "", None),),
    )  # fmt: skip


def test_answers_are_those_of_transformers(tmp_path, model_and_run):
    """Prevents misplaced or swapped image features, a prompt that differs from the template, and
    tokens after the answer's end."""
    model, run = model_and_run
    samples = [sample_of(tmp_path, images) for images in (0, 1, 2)]
    [ours] = run_ranks(Parallel(pipeline=1), answers, run, samples, NEW_TOKENS)
    for sample, answer in zip(samples, ours, strict=True):
        reader = reader_of_run(run, sample)
        tiles = reader.tiles_per_image(sample)
        given = sample, 0, tiles, reader.model, reader.tokenizer
        prompt = encode_prompt(*given, chatting=True)
        chats = reader.model.chat_system_message
        assert np.array_equal(prompt, encode_prompt(*given)) == (chats is None)
        images = {"pixel_values": reader.pixels(sample)} if tiles else {}
        expected = model.generate(
            input_ids=torch.from_numpy(prompt).unsqueeze(0),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=reader.answer_end, pad_token_id=reader.answer_end, **images,
        )[0, len(prompt) :].tolist()  # fmt: skip
        if reader.answer_end in expected:
            expected = expected[: expected.index(reader.answer_end)]
        assert answer == expected


def test_chat_prints_the_answer(tmp_path, model_and_run):
    """Prevents a chat command that ignores the image or answers differently from `answers`."""
    _, run = model_and_run
    sample = sample_of(tmp_path, 1)
    [[answer]] = run_ranks(Parallel(pipeline=1), answers, run, [sample], NEW_TOKENS)
    words = ("--image", sample.images[0].path, "--prompt", "a b", "--max-new-tokens", NEW_TOKENS)
    asked = launcher().run("tools/chat.py", "--load", run, "--precision", "fp32", *words)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout == open_tokenizer(run / "tokenizer").decode(answer) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--image", "nowhere.png", "--prompt", "a"), "nowhere.png: is not a file"),
        (("--prompt", "a <image>"), "has 1 <image> for 0 --image"),
        (("--load", "nowhere", "--prompt", "a"), "nowhere: holds no checkpoint"),
        (("--tokenizer-model", "nowhere", "--prompt", "a"), "nowhere: no such tokenizer"),
        (("--prompt", "a <|im_end|>"), "--prompt: has '<|im_end|>' in its text"),
        (("--prompt", "a", "--max-new-tokens", 32_768), "max_positions"),
    ],
)
def test_mistakes_are_one_line(model_and_run, arguments, message):
    """Prevents a traceback, and minutes of loading before a mistake is reported."""
    _, run = model_and_run
    most = open_newest(run).model.language.max_positions
    if message == "max_positions" and most is None:
        pytest.skip("its RoPE is never scaled")
    asked = launcher().run("tools/chat.py", "--load", run, *arguments)
    [line] = asked.stderr.splitlines()
    assert asked.returncode == 2 and line.startswith("error: ") and message in line

"""Data of models without encoders: chat templates as released, and scans without tiles."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from chat_cases import FOLDER, sample_of
from hypothesis import given
from hypothesis import strategies as st
from jsonl_cases import DIGITS, open_jsonl, record_of, scan
from tokenizer_cases import WORDS, byte_level_bpe
from transformers import PreTrainedTokenizerFast

from omnibal.base.errors import UserError
from omnibal.data.chat import check_tokenizer, encode_prompt, encode_sample
from omnibal.data.lengths import read_lengths, write_lengths
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.job.plan_data import model_of_lengths
from omnibal.model.config import ModelConfig, load_model
from omnibal.model.encoders import TilingConfig

pytestmark = pytest.mark.quick

PIECES = {
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen2.5": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
}
# From meta-llama/Llama-3.1-8B-Instruct and Qwen/Qwen2.5-32B-Instruct, without tool use;
# `generation` marks learned text.
RELEASED = {name: (FOLDER / f"released/{name}.jinja").read_text() for name in PIECES}
MODELS = {"llama3": load_model("llama3.1-8b"), "qwen2.5": load_model("qwen2.5-32b")}


def tokenizer_file(folder: Path, template: str) -> Path:
    model = byte_level_bpe(WORDS)
    model.add_special_tokens(PIECES[template])
    model.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": PIECES[template][0], "add_bos_token": template == "llama3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


@pytest.fixture(scope="module", params=RELEASED)
def case(request, tmp_path_factory) -> tuple[ModelConfig, Tokenizer, PreTrainedTokenizerFast]:
    path, name = tokenizer_file(tmp_path_factory.mktemp("tokenizer"), request.param), request.param
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(path), bos_token=PIECES[name][0], chat_template=RELEASED[name]
    )
    return MODELS[name], open_tokenizer(path), reference


WORD = st.sampled_from([*WORDS, " ", "\n", "<box>", "<|end|>"]) | st.text(max_size=6)
QUESTION = st.lists(WORD).map(lambda words: "".join(words).replace("<image>", ""))
# A line end at an answer's start would merge with the header's token.
ANSWER = QUESTION.map(lambda text: text.lstrip("\n\r"))


@given(
    st.lists(st.tuples(QUESTION, ANSWER), min_size=1, max_size=3),
    st.none() | QUESTION,
    st.none() | ANSWER,
)
def test_any_sample_is_as_the_released_template_has_it(case, turns, system, greeting):
    """Prevents a prompt that differs from the release's, or loss outside answers and their ends."""
    model, tokenizer, reference = case
    sample = sample_of(*turns, system=system, greeting=greeting)
    check_tokenizer(model, tokenizer)
    pairs = [("system", system), ("assistant", greeting)]
    for question, answer in turns:
        pairs += [("user", question), ("assistant", answer)]
    said = [{"role": role, "content": text} for role, text in pairs if text is not None]
    expected = reference.apply_chat_template(
        said, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = encode_sample(sample, [], model, tokenizer)
    assert encoded.token_ids.tolist() == expected["input_ids"]
    assert encoded.loss_mask.tolist() == list(map(bool, expected["assistant_masks"]))
    asked = reference.apply_chat_template(said[:-1], add_generation_prompt=True)["input_ids"]
    for chatting in (False, True):
        prompt = encode_prompt(sample, len(turns) - 1, [], model, tokenizer, chatting)
        assert prompt.tolist() == asked


def test_template_keeps_its_own_pieces_to_itself(case):
    """Prevents text that ends a turn, and rejection of image pieces that are plain text here."""
    model, tokenizer, _ = case
    own = PIECES[model.chat_template][1:]
    for piece in own:
        with pytest.raises(UserError, match="only the chat template may write"):
            encode_sample(sample_of(("a", f"b {piece}")), [], model, tokenizer)
    plain = encode_sample(sample_of(("a", "<img>")), [], model, tokenizer)
    assert tokenizer.decode(plain.token_ids[plain.loss_mask]) == f"<img>{own[-1]}"


def test_lacking_pieces_are_named_and_images_are_not_asked_for(case, tmp_path):
    """Prevents a Llama scan that requires <IMG_CONTEXT>, or accepts another model's tokenizer."""
    model, _, _ = case
    other = next(name for name in PIECES if name != model.chat_template)
    tokenizer = open_tokenizer(tokenizer_file(tmp_path, other))
    with pytest.raises(UserError) as caught:
        check_tokenizer(model, tokenizer)
    message = str(caught.value)
    assert all(piece in message for piece in PIECES[model.chat_template][1:])
    assert "IMG" not in message


def test_a_scan_of_texts_counts_no_tiles(case, tmp_path):
    """Prevents a zero column that requires a tile cap, or lengths accepted for any model."""
    model, tokenizer, _ = case
    annotations = open_jsonl(tmp_path, record_of("Who?", "It is I."), record_of("And?", "7"))
    lengths = scan(annotations, tokenizer, model).lengths
    encoded = [encode_sample(sample, [], model, tokenizer) for sample in annotations]
    assert lengths.tokens.tolist() == [len(one.token_ids) for one in encoded]
    assert lengths.loss_tokens.tolist() == [int(one.loss_mask.sum()) for one in encoded]
    write_lengths(lengths, tmp_path / "lengths.parquet")
    columns = pq.read_schema(tmp_path / "lengths.parquet").names
    assert columns == ["tokens", "loss_tokens", "source"]
    again = read_lengths([tmp_path / "lengths.parquet"])
    assert again.origin == lengths.origin and again.sha256 == lengths.sha256
    assert not again.column("tiles").any()
    assert model_of_lengths(model, again) == model
    with pytest.raises(UserError, match="tiles of none, but internvl-digits has 32 pixels"):
        model_of_lengths(DIGITS, again)
    tiled = {"image_size": 448, "tokens_per_tile": 256, "tiling": TilingConfig()}
    other = replace(again, origin=again.origin.model_copy(update=tiled))
    with pytest.raises(UserError, match=r"tiles of 448 pixels and 256 tokens, but .* has none"):
        model_of_lengths(model, other)


@pytest.mark.parametrize(
    "shown",
    [{"image": "a.png"}, {"image": ["a.png", "b.png"]}, {"video": ["1.png", "2.png"]}],
    ids=["image", "images", "video"],
)
def test_a_sample_with_an_image_is_one_clear_error(case, tmp_path, shown):
    """Prevents a silently dropped image, or a traceback for the missing encoder."""
    model, tokenizer, _ = case
    places = "<video>\n" if "video" in shown else "<image>\n" * np.size(shown["image"])
    annotations = open_jsonl(tmp_path, record_of(), record_of(f"{places}What?", "b", **shown))
    with pytest.raises(UserError, match=r"line 2: has \d image\(s\), but the model has no"):
        scan(annotations, tokenizer, model)
    found = scan(annotations, tokenizer, model, on_error="skip")
    assert found.lengths.sample.tolist() == [0] and [bad.index for bad in found.skipped] == [1]

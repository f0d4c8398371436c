"""Tokenizers of both kinds against transformers' classes, and rejected files."""

import json
import pickle
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizer_cases import (
    CONTROLS,
    IMAGES,
    KINDS,
    SPACE,
    UNUSED,
    WORDS,
    ids_by,
    save_llama3,
    save_qwen2,
    sentencepiece_model,
    write_fast,
    write_kind,
    write_sentencepiece,
)
from tokenizers import Tokenizer as FastModel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from omnibal.base.errors import UserError
from omnibal.data.chat import check_tokenizer
from omnibal.data.tokenizer import Tokenizer, open_tokenizer
from omnibal.model.config import load_model

CONFIG = "tokenizer_config.json"
ODD = ["caf\u00e9 \N{GRINNING FACE}", "x = 12345;\n\treturn x", "<box>[[1, 2]]</box>"]
TEXTS = st.lists(
    st.sampled_from([*CONTROLS, *IMAGES, *UNUSED, *WORDS, "<s>", "<unk>", " ", "\n", SPACE, "7"])
    | st.text(max_size=5),
    max_size=8,
).map("".join)
Pair = tuple[Tokenizer, PreTrainedTokenizerBase]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory) -> Pair:
    """Return a tokenizer of each kind, and transformers' own."""
    path, theirs = write_kind(request.param, tmp_path_factory.mktemp("tokenizer"), strips=True)
    return open_tokenizer(path), theirs


def edit_config(folder: Path, **changes: object) -> dict:
    """Change tokenizer_config.json, and return it."""
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))
    return config


@given(TEXTS)
@example("What is  <quad> this?<|im_end|>  A")
@example("<s> a  <unk>  b")
@example(" <s>")
@example(f" a{SPACE} b<|user|>\n c<|user|>{SPACE} d")
def test_ids_are_those_of_transformers(pair, text):
    """Prevents ids that differ between added tokens or at stripped spaces."""
    tokenizer, theirs = pair
    assert tokenizer.encode(text) == ids_by(theirs)(text)


@pytest.mark.parametrize("save", [save_qwen2, save_llama3])
def test_ids_are_those_of_released_classes(tmp_path, save):
    """Prevents ignored splitting rules of a tokenizer class, or a doubled begin token."""
    ids, tokenizer = ids_by(save(tmp_path)), open_tokenizer(tmp_path)
    for text in [*WORDS, *ODD]:
        text = f"<|im_start|>user\n{text}<|im_end|><img>{text}\n"
        assert tokenizer.encode(text) == ids(text)


def test_pieces_and_size_are_those_of_transformers(pair):
    """Prevents image tokens outside the vocabulary, and worker processes that count otherwise."""
    tokenizer, theirs = pair
    for piece in [*CONTROLS, *IMAGES, "<s>"]:
        assert tokenizer.id_of(piece) == theirs.convert_tokens_to_ids(piece)
        assert tokenizer.decode([tokenizer.id_of(piece)]) == piece
    assert tokenizer.id_of("no piece") is None
    assert tokenizer.vocab_size == max(theirs.get_vocab().values()) + 1
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""
    copy = pickle.loads(pickle.dumps(tokenizer))
    for text in [*WORDS, "<|im_start|>user\n a  b<|im_end|>"]:
        assert copy.encode(text) == tokenizer.encode(text)
    assert copy.sha256 == tokenizer.sha256


def test_texts_are_neither_cut_nor_filled_up(tmp_path):
    """Prevents tokenizer.json's truncation and padding from changing the learned text."""
    path = write_fast(tmp_path)
    plain = open_tokenizer(path)
    model = FastModel.from_file(str(path))
    model.enable_truncation(4)
    model.enable_padding(length=64)
    model.save(str(path))
    for text in WORDS:
        assert open_tokenizer(path).encode(text) == plain.encode(text)


def test_bare_model_is_encoded_as_it_is(tmp_path):
    """Prevents changed ids of the quickstart's tokenizer."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(True, [*CONTROLS, *IMAGES]))
    tokenizer, model = open_tokenizer(path), SentencePieceProcessor(model_file=str(path))
    for text in [*WORDS, "<|im_start|>user\n a  b<|im_end|>\n<img></img>", "<s>"]:
        assert tokenizer.encode(text) == model.EncodeAsIds(text)
    assert (tokenizer.vocab_size, tokenizer.add_bos) == (model.GetPieceSize(), True)


def test_longest_added_token_wins(tmp_path):
    """Prevents an added token from being cut by a shorter added token."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(True, []))
    first = SentencePieceProcessor(model_file=str(path)).GetPieceSize()
    added = {"<box": first, "<box>": first + 1, "<box>>": first + 3}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = open_tokenizer(path)
    assert tokenizer.encode("<box<box><box>>") == [first, first + 1, first + 3]
    assert tokenizer.vocab_size == first + 4


def test_added_tokens_json_counts_where_the_config_names_none(tmp_path):
    """Prevents missed image tokens in checkpoints of the older layout."""
    path = write_sentencepiece(tmp_path)
    by_config, config = open_tokenizer(path), edit_config(tmp_path)
    decoder = config.pop("added_tokens_decoder")
    (tmp_path / CONFIG).write_text(json.dumps(config))
    added = {token["content"]: int(number) for number, token in decoder.items()}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    by_list = open_tokenizer(path)
    text = "<s><|im_start|>user\n<img></img>What is <box>this</box>?<|im_end|>"
    assert by_list.encode(text) == by_config.encode(text)
    assert by_list.vocab_size == by_config.vocab_size


def test_tokens_that_only_the_config_has_are_added(tmp_path):
    """Prevents the language model's tokenizer.json from hiding InternVL's added tokens."""
    path = write_fast(tmp_path)
    size = open_tokenizer(path).vocab_size
    added = {str(size): {"content": "<ref>", "special": True}}
    edit_config(tmp_path, added_tokens_decoder=added)
    assert open_tokenizer(path).encode("<ref>") == [size]
    added[str(size + 4)] = {"content": "</ref>", "special": True}
    edit_config(tmp_path, added_tokens_decoder=added)
    with pytest.raises(UserError, match="restore the files of one checkpoint"):
        open_tokenizer(path)


PIECES = [*CONTROLS, *IMAGES, *WORDS, "<s>", "<new>", "<more>", "zqz", "a", " ", "  ", "\n"]


def assert_as_transformers(folder: Path, pieces: list[str]) -> None:
    """Assert that both read the folder's tokenizer files alike."""
    ours, theirs = open_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    ids = ids_by(theirs)
    for before, piece, after in product(PIECES, pieces, PIECES):
        assert ours.encode(before + piece + after) == ids(before + piece + after)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1


FLAGS = ["lstrip", "rstrip", "normalized", "single_word"]


@pytest.mark.parametrize("flags", [{name: True} for name in FLAGS] + [dict.fromkeys(FLAGS, True)])
def test_flags_of_the_config_count(tmp_path, flags):
    """Prevents ignored strip flags around added tokens, or an added token within a word."""
    path = write_fast(tmp_path)
    plain = json.loads(path.read_text())["added_tokens"]
    decoder = {str(token.pop("id")): dict(token) for token in plain}
    for token in decoder.values():
        if token["content"] in ("<quad>", "<|im_end|>"):
            token |= flags
    decoder[str(open_tokenizer(path).vocab_size)] = {"content": "zqz", "special": False, **flags}
    (tmp_path / CONFIG).write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert_as_transformers(tmp_path, ["<quad>", "<|im_end|>", "zqz"])


@pytest.mark.parametrize(
    "config",
    [
        {"extra_special_tokens": ["<more>"], "additional_special_tokens": ["zqz"]},
        {"additional_special_tokens": ["<more>", "zqz", "a"]},
        {"extra_special_tokens": {"image_token": "<more>"}, "mask_token": "zqz", "eos_token": "a"},
        {"additional_special_tokens": ["", "zqz"], "bos_token": ""},
        {"pad_token": {"__type": "AddedToken", "content": "<new>", "lstrip": False}},
    ],
)
@pytest.mark.parametrize("added", [False, True])
def test_what_else_adds_tokens_to_a_fast_tokenizer(tmp_path, config, added):
    """Prevents tokens that a checkpoint was trained with from being read as text."""
    size = open_tokenizer(write_fast(tmp_path)).vocab_size
    (tmp_path / CONFIG).write_text(json.dumps(config))
    if added:
        listed = {"<new>": size, "<more>": size + 1}
        (tmp_path / "added_tokens.json").write_text(json.dumps(listed))
    assert_as_transformers(tmp_path, ["<more>", "zqz", "a", "<new>"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tokenizer_config\.json.*restore"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', r"tokenizer_config\.json.*restore"),
        (
            '{"added_tokens_decoder": {"400": {"content": "<more>", "single_word": true}}}',
            r"<more> as a single_word token.*tokenizer\.json",
        ),
    ],
)
def test_broken_config_is_named(tmp_path, content, message):
    """Prevents a traceback, or silently ignored added tokens or flags."""
    path = write_sentencepiece(tmp_path)
    (tmp_path / CONFIG).write_text(content)
    with pytest.raises(UserError, match=message):
        open_tokenizer(path)


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (write_sentencepiece, {}, True),
        (write_sentencepiece, {"add_bos_token": False}, False),
        (write_fast, {}, False),
        (write_fast, {"add_bos_token": True}, True),
    ],
)
def test_begin_token_is_as_the_config_says(tmp_path, kind, given, expected):
    """Prevents a begin token that InternVL2.5 was not trained with, or a missing one."""
    path = kind(tmp_path)
    config = edit_config(tmp_path)
    config.pop("add_bos_token", None)
    (tmp_path / CONFIG).write_text(json.dumps(config | given))
    assert open_tokenizer(path).add_bos is expected


def test_hash_covers_all_that_changes_ids(tmp_path):
    """Prevents training with added tokens that differ from the scan's."""
    path = write_sentencepiece(tmp_path)
    seen = {open_tokenizer(path).sha256}
    decoder = edit_config(tmp_path, chat_template="other")["added_tokens_decoder"]
    assert {open_tokenizer(path).sha256} == seen
    edit_config(tmp_path, added_tokens_decoder=dict(reversed(decoder.items())))
    assert {open_tokenizer(path).sha256} == seen
    edit_config(tmp_path, added_tokens_decoder=decoder | {"400": {"content": "<more>"}})
    seen.add(open_tokenizer(path).sha256)
    (tmp_path / CONFIG).unlink()
    seen.add(open_tokenizer(path).sha256)
    path.write_bytes(sentencepiece_model(False, UNUSED))
    seen.add(open_tokenizer(path).sha256)
    assert len(seen) == 4


def test_folder_of_a_checkpoint(tmp_path):
    """Prevents reading a file of the folder other than the documented one."""
    with pytest.raises(UserError, match="no such tokenizer"):
        open_tokenizer(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        open_tokenizer(tmp_path)
    slow = write_sentencepiece(tmp_path)
    assert open_tokenizer(tmp_path).path == slow
    assert open_tokenizer(tmp_path).sha256 == open_tokenizer(slow).sha256
    fast = write_fast(tmp_path)
    assert open_tokenizer(tmp_path).path == fast


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"not a model" * 50, b"\xff\xfe"])
def test_other_file_is_refused_quietly(tmp_path, capfd, name, content):
    """Prevents a crash, or the library's log next to the one error message."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"not a (SentencePiece model|tokenizer)"):
        open_tokenizer(path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("template", "missing"),
    [
        ("internlm2-chat", "<IMG_CONTEXT> </img>"),
        ("phi3-chat", "<IMG_CONTEXT> </img> <|system|> <|user|> <|assistant|> <|end|>"),
    ],
)
def test_missing_pieces_are_named(tmp_path, template, missing):
    """Prevents image tokens that become unknown tokens with another model's tokenizer."""
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(True, ["<|im_start|>", "<|im_end|>", "<img>"]))
    model = load_model("internvl2-2b").model_copy(update={"chat_template": template})
    with pytest.raises(UserError) as caught:
        check_tokenizer(model, open_tokenizer(path))
    assert f"lacks the piece(s) {missing} of" in str(caught.value)
    assert "tokenizer_config.json" in str(caught.value)

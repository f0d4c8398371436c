"""Small tokenizers of each kind, as in checkpoints, and transformers' classes for them."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, SetMinLogLevel
from transformers import (
    AddedToken,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

CONTROLS = "<|im_start|> <|im_end|> <|system|> <|user|> <|assistant|> <|end|>".split()
IMAGES = "<img> </img> <IMG_CONTEXT> <quad> <box> </box>".split()
WORDS = [
    *("system", "user", "assistant", "user\n", "assistant\n", "Frame-1: ", "<image>\n"),
    *("What is the sum of the two numbers?", "The sum is twelve.", "a  b", "\n\n"),
    "\u4f60\u597d\uff0c\u4e16\u754c",
    *("Read the line, please: 1, 2, 3.", " a tree and a house ", "user asks, assistant answers"),
]
UNUSED = ["[UNUSED_0]", "[UNUSED_1]"]
SPACE = "\u2581"
SPECIAL_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "</s>",
}


def sentencepiece_model(dummy_prefix: bool, symbols: list[str], strips: bool = False) -> bytes:
    """Return a model like Llama's and InternLM2's: BPE with bytes, without stripped spaces."""
    SetMinLogLevel(2)
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=380,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=strips,
        add_dummy_prefix=dummy_prefix,
        user_defined_symbols=symbols,
        num_threads=1,
    )
    return model.getvalue()


def write_sentencepiece(
    folder: Path, dummy_prefix: bool = True, rstrip: bool = False, strips=False, **settings
) -> Path:
    """Write a model and a config that adds tokens: two with ids of the model, others after it."""
    model, processor = sentencepiece_model(dummy_prefix, UNUSED, strips), SentencePieceProcessor()
    (folder / "tokenizer.model").write_bytes(model)
    processor.LoadFromSerializedProto(model)
    contents = ["<unk>", "<s>", "</s>", *CONTROLS, *IMAGES, "<|endoftext|>"]
    ids = [0, 1, 2, *map(processor.PieceToId, UNUSED), *range(processor.GetPieceSize(), 999)]
    no_flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    decoder = {
        str(number): {"content": content, "special": True, **no_flags}
        for number, content in zip(ids, contents, strict=False)
    }
    for token in decoder.values():
        token["lstrip"] = token["content"] == "<quad>"
        token["rstrip"] = rstrip and token["content"] in CONTROLS
    config = {"added_tokens_decoder": decoder, "chat_template": "not read", **SPECIAL_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder / "tokenizer.model"


def slow_of(path: Path, kind: type = SentencePieceBackend, **options) -> SentencePieceBackend:
    """Return transformers' slow tokenizer for the same files."""
    config = json.loads(path.with_name("tokenizer_config.json").read_text())
    decoder = {
        int(number): AddedToken(**token) for number, token in config["added_tokens_decoder"].items()
    }
    return kind(vocab_file=str(path), added_tokens_decoder=decoder, **SPECIAL_TOKENS, **options)


class LlamaNotLegacy(SentencePieceBackend):
    """Llama's slow tokenizer with `legacy=False`, which transformers had before version 5."""

    def tokenize(self, text, **options):
        if not text:
            return []
        named = {self.bos_token, self.eos_token, self.unk_token, self.pad_token}
        tokens = super().tokenize(SPACE + text.replace(SPACE, " "), **options)
        return tokens[1:] if tokens[:1] == [SPACE] and {*tokens[1:2]} & named else tokens


def byte_level_bpe(
    texts: list[str], words: str = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\n]*|\s*[\n]+|\s+"
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE like Qwen's, trained on texts cut into words by a pattern."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts * 5, trainer)
    return model


def write_fast(folder: Path) -> Path:
    """Write a byte-level BPE with added tokens in tokenizer.json."""
    model = byte_level_bpe(WORDS)
    model.add_special_tokens(["<s>", "<|endoftext|>", *CONTROLS, *IMAGES])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    return folder / "tokenizer.json"


def save_qwen2(folder: Path) -> Qwen2Tokenizer:
    """Save a tokenizer with its own class over bytes, without a begin token."""
    model = json.loads(byte_level_bpe(WORDS).to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
    tokenizer.add_tokens([*CONTROLS, *IMAGES], special_tokens=True)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama3(folder: Path) -> PreTrainedTokenizerFast:
    """Save a byte BPE with Llama 3's word pattern; its post-processor adds a begin token."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    model, begin = byte_level_bpe(WORDS, words + rest), "<|begin_of_text|>"
    model.add_special_tokens([begin, "<|endoftext|>", *CONTROLS, *IMAGES])
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, model.token_to_id(begin))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=begin)
    fast.save_pretrained(folder)
    return fast


def fast_of(path: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<s>")


def ids_by(hugging_face) -> Callable[[str], list[int]]:
    """Return a function from text to ids without a begin token."""
    return lambda text: hugging_face(text, add_special_tokens=False).input_ids


KINDS = ("legacy", "no dummy prefix", "not legacy", "fast")


def write_kind(kind: str, folder: Path, **settings) -> tuple[Path, PreTrainedTokenizerBase]:
    """Return a tokenizer's files and transformers' own; `settings` apply only to "not legacy"."""
    if kind == "fast":
        path = write_fast(folder)
        return path, fast_of(path)
    if kind == "not legacy":
        llama = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
        path = write_sentencepiece(folder, rstrip=True, **llama, **settings)
        return path, slow_of(path, LlamaNotLegacy, legacy=False)
    path = write_sentencepiece(folder, dummy_prefix=kind == "legacy")
    return path, slow_of(path)

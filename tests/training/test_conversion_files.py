"""Files next to the weights: configurations, indices and tokenizers, as other tools read them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from conversion_file_cases import (
    INDEX,
    SHARD_BYTES,
    TYPES,
    assert_equal_tensors,
    check_round_trip,
    content,
    edit_config,
    edit_json,
    edit_tensor,
    export_to_layout,
    export_to_match,
    tensors_of,
)
from PIL import Image
from released import (
    IMAGE_TOKEN,
    KINDS,
    PIECES,
    configuration,
    imported,
    save_released,
    save_toy,
    write_tokenizer,
)
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    GenerationConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    Qwen2Config,
    Qwen2Tokenizer,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron.vlm.checkpoint.identity import open_newest
from megatron.vlm.conversion.config_files import configurations, internvl_processor_files
from megatron.vlm.conversion.importing import import_checkpoint, open_released
from megatron.vlm.conversion.tensor_map import TensorLayout
from megatron.vlm.conversion.tokenizer_files import make_fast_tokenizer
from megatron.vlm.inputs.reader import SampleReader
from omnibal.base.errors import UserError
from omnibal.data.chat import encode_sample
from omnibal.data.sample import IMAGE, Sample, Turn
from omnibal.data.stored_files import ImageFile
from omnibal.data.tokenizer import open_tokenizer
from omnibal.model.config import load_model
from omnibal.model.encoders import TilingConfig

END_TOKEN = PIECES.index("<|im_end|>")
HEAD = "language_model.lm_head.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a read-only sharded checkpoint in the original layout."""
    folder = tmp_path_factory.mktemp("files") / "there"
    save_toy("300m-qwen2", folder, "qwen2", torch.bfloat16, SHARD_BYTES)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenization_own.py").write_text("raise ImportError\n")
    return folder


@pytest.fixture(scope="module")
def run(source, tmp_path_factory) -> Path:
    return imported(source, tmp_path_factory.mktemp("files") / "run")


def copy_changed(source: Path, target: Path, *changes: Callable[[Path], None]) -> Path:
    shutil.copytree(source, target)
    for change in changes:
        change(target)
    return target


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


LANGUAGE = {"transformers": "text_config", "qwen2": "llm_config"}
"""Table of the language model in a config.json, by layout."""
# (layout, tie_word_embeddings of the model and of its language model, head in the file (None: no
# tensor; "copy": equal to the embedding), whether the head is tied).
TIES = {
    "outer-alone": ("transformers", True, False, "other", False),
    "both-but-another-head": ("transformers", True, True, "other", False),
    "both-and-a-copy": ("transformers", True, True, "copy", True),
    "outer-without-a-head": ("transformers", True, False, None, True),
    "inner-without-a-head": ("transformers", False, True, None, True),
    "unsaid-without-a-head": ("transformers", None, None, None, True),
    "unsaid-with-a-head": ("transformers", None, None, "other", False),
    "outer-alone-original": ("qwen2", True, False, "other", False),
    "inner-alone-original": ("qwen2", False, True, None, True),
    "outer-original-inner-unsaid": ("qwen2", True, None, None, True),
}


@pytest.mark.parametrize(("layout", "outer", "inner", "head", "tied"), TIES.values(), ids=TIES)
def test_whether_the_head_is_tied(tmp_path, layout, outer, inner, head, tied):
    """Prevents an import that drops a trained head or requires a missing head. Transformers saves
    two entries, one derived from the other, and they may contradict."""
    kind = "300m-qwen2" if head == "other" else "6b-qwen2-tied"
    there = save_toy(kind, tmp_path / "there", layout, head_copy=head == "copy")
    assert (HEAD in tensors_of(there)) == (head is not None)
    own = {f"{LANGUAGE[layout]}__tie_word_embeddings": inner}
    edit_config(tie_word_embeddings=outer, **own)(there)
    run = imported(there, tmp_path / "run")
    assert open_newest(run).model.language.tied_head == tied
    back = content(export_to_match(run, there, tmp_path / "back"))
    if head is None and layout == "qwen2":
        # InternVL's own code requires the head's tensor, so the export adds it.
        assert HEAD in tensors_of(tmp_path / "back")
        assert back.pop("model.safetensors") != (there / "model.safetensors").read_bytes()
        assert back == {"config.json": (there / "config.json").read_bytes()}
    else:
        assert back == content(there)


@pytest.mark.parametrize("layout", LANGUAGE)
def test_configuration_is_for_all_versions_and_ends_answers(tmp_path, run, layout):
    """Prevents an exported model that does not stop after its answer, the default RoPE base of
    10,000 in other versions of Transformers, and another dtype than requested."""
    out = export_to_layout(run, layout, tmp_path / "out", torch.bfloat16)
    ends, config = GenerationConfig.from_pretrained(out), config_of(out)
    assert (ends.eos_token_id, ends.pad_token_id) == (END_TOKEN, END_TOKEN)
    text = config[LANGUAGE[layout]]
    assert text["eos_token_id"] == END_TOKEN and config["torch_dtype"] == "bfloat16"
    for name in ("tokenizer.json", "chat_template.jinja", "tokenization_own.py"):
        assert (out / name).read_bytes() == (run / "tokenizer" / name).read_bytes()
    if layout == "transformers":
        assert text["rope_theta"] == text["rope_parameters"]["rope_theta"] == 5000.0
        read = AutoConfig.from_pretrained(out)
        assert read.text_config.max_position_embeddings == 32_768 and read.dtype == torch.bfloat16
        assert read.text_config.eos_token_id == END_TOKEN and read.image_token_id == IMAGE_TOKEN


@pytest.mark.parametrize(
    ("size", "most"), [((16, 16), 6), ((30, 17), 1), ((30, 17), 6), ((47, 16), 6), ((20, 61), 6)]
)
def test_image_processor_makes_the_tiles_of_training(tmp_path, source, size, most):
    """Prevents inference images of another size, tile count or value scale than in training."""
    there = copy_changed(source, tmp_path / "there", edit_config(max_dynamic_patch=most))
    run = imported(there, tmp_path / "run")
    processor = AutoImageProcessor.from_pretrained(
        export_to_layout(run, "transformers", tmp_path / "out"), backend="pil"
    )
    values = np.random.default_rng(0).integers(0, 256, (*reversed(size), 3), np.uint8)
    picture = Image.fromarray(values)
    picture.save(tmp_path / "picture.png")
    theirs = processor(images=[picture], return_tensors="pt")["pixel_values"]
    model = open_newest(run).model
    assert model.vision.tiling == TilingConfig(max_dynamic_patch=most)
    images, turns = (ImageFile(tmp_path / "picture.png"),), (Turn(IMAGE, "", None),)
    sample = Sample(identity="one", source="one", where="one", images=images, turns=turns)
    tokenizer = open_tokenizer(run / "tokenizer")
    ours = SampleReader([sample], tokenizer, model).pixels(sample)
    assert theirs.shape == ours.shape and (len(ours) > 1) == (most > 1 and size != (16, 16))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)


INDICES = {
    "as-it-is": lambda index: index,
    "no-size": lambda index: index | {"metadata": {}},
    "metadata-null": lambda index: index | {"metadata": None},
    "no-metadata": lambda index: {"weight_map": index["weight_map"]},
    "other-keys": lambda index: index | {"extra": [1], "metadata": {"nested": {"a": None}}},
}


@pytest.mark.parametrize("change", INDICES.values(), ids=INDICES)
def test_index_comes_back(tmp_path, source, change):
    """Prevents an index that is refused or rewritten in this project's format."""
    there = copy_changed(source, tmp_path / "there")
    index = change(json.loads((there / INDEX).read_text()))
    (there / INDEX).write_text(json.dumps(index, indent=7))
    run = check_round_trip(there, tmp_path)
    other = export_to_match(run, there, tmp_path / "other", torch.float32)
    found = json.loads((other / INDEX).read_text())
    size = sum(one.nbytes for one in tensors_of(other).values())
    assert found == index | {"metadata": (index.get("metadata") or {}) | {"total_size": size}}


def test_a_whole_file_goes_before_shards(tmp_path, source):
    """Prevents loading the shards if Transformers would load the single file."""
    there, shards = copy_changed(source, tmp_path / "there"), tensors_of(source)
    whole = {name: tensor + 1 for name, tensor in shards.items()}
    save_file(whole, there / "model.safetensors", {"format": "pt"})
    run = imported(there, tmp_path / "run")
    back = export_to_match(run, there, tmp_path / "back")
    assert_equal_tensors(tensors_of(back), whole)
    assert not (back / INDEX).exists()


def test_configuration_tells_the_type_that_was_asked_for(tmp_path, source, run):
    """Prevents an fp16 copy that loads as bf16, and a rewritten config.json."""
    other = export_to_match(run, source, tmp_path / "other", TYPES["fp16"])
    text = (source / "config.json").read_text()
    assert text.count('"torch_dtype": "bfloat16"') == 2
    assert (other / "config.json").read_text() == text.replace('"bfloat16"', '"float16"')
    assert all(tensor.dtype == torch.float16 for tensor in tensors_of(other).values())


@pytest.mark.parametrize("message", [None, "", "You see \N{LATIN SMALL LETTER E WITH ACUTE}."])
def test_system_message_is_of_chats_alone(tmp_path, source, message):
    """Prevents training prompts that differ from InternVL's: its training uses the template's
    system message, and config.json's only applies to chats."""
    there = copy_changed(source, tmp_path / "there", edit_config(system_message=message))
    run = imported(there, tmp_path / "run")
    model = load_model(str(run / "model.toml"))
    assert model == open_newest(run).model
    assert (model.system_message, model.chat_system_message) == (None, message)
    again = imported(export_to_layout(run, "qwen2", tmp_path / "there2"), tmp_path / "again")
    assert open_newest(again).model.chat_system_message == message


def test_message_of_training_is_that_of_exported_chats(source, run):
    """Prevents InternVL's chat code from using another system message than training did."""
    model = open_newest(run).model.model_copy(update={"system_message": "Read."})
    for chats, expected in ((None, "Read."), ("", ""), ("See.", "See.")):
        told = model.model_copy(update={"chat_system_message": chats})
        made = configurations(told, TensorLayout.INTERNVL_QWEN2, "float32", None)["config.json"]
        assert json.loads(made)["system_message"] == expected


def test_remedy_of_another_image_size_helps(tmp_path, source):
    """Prevents an error about force_image_size with advice that leads to the next error."""
    there = copy_changed(source, tmp_path / "there", edit_config(force_image_size=32))
    with pytest.raises(UserError, match=r"force_image_size 32, but .* 16 pixels.*set it to 16"):
        open_released(there)
    edit_config(force_image_size=16)(there)
    assert open_released(there).model == open_released(source).model
    # The result of InternVL's resize_pos_embeddings.
    edit_config(force_image_size=32, vision_config__image_size=32)(there)
    name = "vision_model.embeddings.position_embedding"
    edit_tensor(name, lambda at: torch.cat([at, at, at, at[:, 3:]], 1))(there)
    assert open_released(there).model.vision.image_size == 32


DYNAMIC = {
    "llm_config__rope_scaling": {"type": "dynamic", "factor": 3.0},
    "llm_config__max_position_embeddings": 4096,
}


def test_dynamic_rope_limits_samples_and_comes_back(tmp_path, source):
    """Prevents training without RoPE scaling on samples that the released model would scale, and an
    export that loses the scaling."""
    run = check_round_trip(
        copy_changed(source, tmp_path / "there", edit_config(**DYNAMIC)), tmp_path
    )
    language = load_model(str(run / "model.toml")).language
    assert (language.max_positions, language.rope_factor) == (4096, 3.0)
    for layout, table in LANGUAGE.items():
        out = export_to_layout(run, layout, tmp_path / layout)
        assert config_of(out)[table]["max_position_embeddings"] == 4096
        assert open_released(out).model.language == language
    scaling = config_of(tmp_path / "qwen2")["llm_config"]["rope_scaling"]
    assert scaling == {"type": "dynamic", "factor": 3.0}
    rope = AutoConfig.from_pretrained(tmp_path / "transformers").text_config.rope_parameters
    assert rope == {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("name", "layout", "kind"),
    [("300m-qwen2", "qwen2", Qwen2Config), ("6b-llama", "llama", LlamaConfig)],
)
def test_limit_that_is_not_said_is_the_default_of_the_class(tmp_path, name, layout, kind):
    """Prevents a default limit that differs from where the released model begins to scale."""
    language = open_released(save_toy(name, tmp_path / "there", layout)).model.language
    assert language.max_positions == kind().max_position_embeddings


def test_released_model_scales_just_beyond_the_limit():
    """Prevents an off-by-one limit: Transformers' RoPE changes one token above it."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 24}
    kinds = ({"rope_type": "default"}, {"rope_type": "dynamic", "factor": 2.0})
    configs = (LlamaConfig(**sizes, rope_parameters={"rope_theta": 5e3, **kind}) for kind in kinds)
    ropes = [LlamaRotaryEmbedding(config) for config in configs]
    for tokens in (24, 25):
        plain, scaled = (rope(torch.zeros(1), torch.arange(tokens)[None])[0] for rope in ropes)
        assert torch.equal(plain, scaled) == (tokens == 24)


def test_rope_without_a_type_is_unscaled(tmp_path, source):
    """Prevents refusing a rope_scaling entry without a type, which means no scaling."""
    scaling = {"rope_type": None, "type": None}
    there = copy_changed(source, tmp_path / "there", edit_config(llm_config__rope_scaling=scaling))
    unscaled = copy_changed(source, tmp_path / "b", edit_config(llm_config__rope_scaling=None))
    language = open_released(there).model.language
    assert language == open_released(unscaled).model.language
    assert (language.max_positions, language.rope_factor) == (None, None)


def test_model_is_named_after_the_folder_or_the_hub(tmp_path, source, monkeypatch):
    """Prevents models named after a snapshot's hash or a symlink's target."""
    hub = tmp_path / "models--Own--Model-2B"
    snapshot = copy_changed(source, hub / "snapshots" / "0b2c5ad2b6cc")
    (tmp_path / "Linked").symlink_to(snapshot)
    names = [open_released(path).model.name for path in (source, snapshot, tmp_path / "Linked")]
    assert names == ["there", "model-2b", "linked"]
    monkeypatch.chdir(snapshot)
    assert open_released(Path()).model.name == "model-2b"
    assert open_released(Path("..") / snapshot.name).model.name == "model-2b"


SLOW_TEXTS = [
    "aba abab  abc\n\n ab",
    "it's a cab, aabb 12 cafe\N{COMBINING ACUTE ACCENT} \r\n\t",
    "<|im_start|>a\nba<|im_end|> <img><IMG_CONTEXT></img>ab",
]


def write_slow_tokenizer(folder: Path, configured: bool = True) -> None:
    """Write the files of a small Qwen2 tokenizer without tokenizer.json."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        ["ab aba 12 ab12 12 cab"] * 9, vocab_size=264, min_frequency=2, show_progress=False
    )
    trained.save_model(str(folder))
    first = trained.get_vocab_size()
    pieces = [*(piece for piece in PIECES if len(piece) > 1), "<|endoftext|>"]
    added = {
        str(number): {"content": piece, "special": piece != "<unk>"}
        for number, piece in enumerate(pieces, first)
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False}
    config |= {"add_bos_token": False, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if configured:
        config["added_tokens_decoder"] = added
    else:
        ids = {one["content"]: int(number) for number, one in added.items()}
        (folder / "added_tokens.json").write_text(json.dumps(ids))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("configured", [True, False])
def test_slow_tokenizer_is_what_transformers_makes_of_it(tmp_path, configured):
    """Prevents other token ids than Transformers' slow tokenizer gives."""
    write_slow_tokenizer(tmp_path, configured)
    theirs = Qwen2Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(make_fast_tokenizer(tmp_path))
    ours = open_tokenizer(tmp_path)
    for text in SLOW_TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids)
    assert len(ours.encode("ab")) == 1 and ours.vocab_size == len(theirs)


def test_slow_tokenizer_is_imported(tmp_path):
    """Prevents refusing a released model with a slow tokenizer as one without tokenizer."""
    config = configuration(KINDS["300m-qwen2"])
    config.text_config.vocab_size = 300
    there = save_released(InternVLForConditionalGeneration(config), tmp_path / "there", "qwen2")
    write_slow_tokenizer(there)
    lines = import_checkpoint(open_released(there), tmp_path / "run", lambda size: None)
    assert "tokenizer.json" in lines[-1]
    assert open_tokenizer(tmp_path / "run" / "tokenizer").encode("ab<img>")
    assert content(export_to_match(tmp_path / "run", there, tmp_path / "back")) == content(there)


def test_slow_tokenizer_that_is_not_understood_is_told(tmp_path, source):
    """Prevents a tokenizer made from inconsistent files, and a misleading "has no tokenizer"."""
    there = copy_changed(source, tmp_path / "there")
    (there / "tokenizer.json").unlink()
    write_slow_tokenizer(there)
    with pytest.raises(UserError, match=r"there/tokenizer.json has 2\d\d pieces, .* embeds 51"):
        import_checkpoint(open_released(there), tmp_path / "run", lambda size: None)
    (there / "merges.txt").write_text("x yz\n")
    with pytest.raises(UserError, match=r"vocab.json and merges.txt are not of one tokenizer"):
        import_checkpoint(open_released(there), tmp_path / "run", lambda size: None)
    edit_json(there / "tokenizer_config.json", lambda at: at.update(tokenizer_class="Other"))
    lines = import_checkpoint(open_released(there), tmp_path / "run", lambda size: None)
    assert "save_pretrained" in lines[-1] and "has no tokenizer" not in lines[-1]
    assert not (tmp_path / "run" / "tokenizer").exists()


@pytest.mark.parametrize("template", ["internvl2_5", "Hermes-2"])
def test_internvl_in_transformers_format_has_its_processors_files(tmp_path, template):
    """Prevents an exported InternVL with a processor that fails to load or gives other tokens."""
    write_slow_tokenizer(tmp_path, True)
    (tmp_path / "tokenizer.json").write_text(make_fast_tokenizer(tmp_path))
    tokenizer = open_tokenizer(tmp_path)
    model = load_model("internvl-digits").model_copy(update={"chat_template": template})
    for name, text in internvl_processor_files(model, tokenizer).items():
        (tmp_path / name).write_text(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    known = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    start, end, context, _ = (getattr(theirs, name) for name in known)
    settings = json.loads((tmp_path / "processor_config.json").read_text())
    turns = Turn(f"{IMAGE}\nWhat is it?", "A \u4f60.", None), Turn("Why?", "So.", None)
    images = (ImageFile(Path("a.png")),)
    sample = Sample(identity="one", source="one", where="one", images=images, turns=turns)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A \u4f60."}]},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]
    text = theirs.apply_chat_template(messages, tokenize=False)
    shown = start + 3 * settings["image_seq_length"] * context + end
    expected = encode_sample(sample, [3], model, tokenizer).token_ids.tolist()
    assert theirs.encode(text.replace(context, shown, 1), add_special_tokens=False) == expected

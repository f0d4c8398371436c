"""`omnibal run` with default options, on a released checkpoint of each format."""

import json
import shutil
from pathlib import Path

import native_data_cases
import native_resolution_cases
import pytest
import torch
from end_to_end_cases import forked_steps, losses
from native_data_cases import native_models, picture, write_tokenizer
from released import KINDS, configuration, randomize, save_released
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    InternVLForConditionalGeneration,
    LlamaConfig,
    Qwen3Config,
)

from megatron.vlm.conversion.importing import open_released
from megatron.vlm.inputs.reader import SampleReader
from omnibal import cli
from omnibal.data.annotations import Annotations
from omnibal.data.tokenizer import open_tokenizer

IMAGE_PIECES = (
    ("image_token_id", "<|image_pad|>"), ("image_token_id", "<IMG_CONTEXT>"),
    ("video_token_id", "<|video_pad|>"), ("vision_start_token_id", "<|vision_start|>"),
    ("vision_end_token_id", "<|vision_end|>"),
)  # fmt: skip
FORMATS = "internvl internvl-hf qwen2.5-vl qwen3-vl qwen3.5-vl llama qwen3".split()
SPECIAL = {
    "internvl": "<s> <|im_start|> <|im_end|> <img> </img> <IMG_CONTEXT>".split(),
    "llama": "<s> <|start_header_id|> <|end_header_id|> <|eot_id|>".split(),
}
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 44, "vocab_size": 320,
}  # fmt: skip
PIXELS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}


def save(name: str, folder: Path) -> torch.nn.Module:
    """Write a released folder with a tokenizer; return Transformers' model."""
    special = SPECIAL.get(name.removesuffix("-hf"), native_data_cases.SPECIAL)
    if name.startswith("internvl"):
        config = configuration(KINDS["300m-qwen2"])
        config.text_config.vocab_size = SIZES["vocab_size"]
        model = InternVLForConditionalGeneration(config)
    elif name.endswith("-vl"):
        model = native_resolution_cases.transformers_model(native_models()[name])
    else:
        text = LlamaConfig(**SIZES) if name == "llama" else Qwen3Config(**SIZES, head_dim=12)
        model = AutoModelForCausalLM.from_config(text)
    pieces = folder.with_name("tokenizer")
    write_tokenizer(pieces, special)
    tokenizer = open_tokenizer(pieces)
    for part, piece in IMAGE_PIECES:
        if piece in special:
            model.config.update({part: tokenizer.require_id(piece)})
    randomize(model)
    if name.startswith("internvl"):
        chat = pieces / "chat_template.jinja"
        shown, template = "<|vision_start|><|image_pad|><|vision_end|>", chat.read_text()
        chat.unlink()
        if name.endswith("hf"):
            assert shown in template
            chat.write_text(template.replace(shown, "<IMG_CONTEXT>\n"))
        save_released(model, folder, "transformers" if name.endswith("hf") else "qwen2")
    else:
        model.save_pretrained(folder)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        if name.endswith("-vl"):
            (folder / file).write_text(json.dumps(PIXELS))
    shutil.copytree(pieces, folder, dirs_exist_ok=True)
    return model


@torch.inference_mode()
def loss_of(model: torch.nn.Module, folder: Path, data: Path) -> float:
    """Return the mean loss per loss token of Transformers' model over all samples."""
    ours, samples = open_released(folder).model, Annotations.open(data)
    reader, sums = SampleReader(samples, open_tokenizer(folder), ours), torch.zeros(2)
    for sample in map(samples.__getitem__, range(len(samples))):
        shown, given = reader.list_shown(sample), {}
        tiles = sum(reader.tiles_per_image(sample)) if ours.takes_images else 0
        encoded = reader.encode(sample, tiles, 0, shown)
        ids = torch.from_numpy(encoded.token_ids)[None]
        if shown:
            given["image_grid_thw"] = torch.tensor([tuple(image.grid) for image in shown])
            given["mm_token_type_ids"] = (ids == reader.tokenizer.require_id("<|image_pad|>")).int()
            given["pixel_values"] = reader.patches(sample, shown)
        elif sample.images:
            given["pixel_values"] = reader.pixels(sample)
        labels = torch.where(torch.from_numpy(encoded.loss_mask)[None].bool(), ids, -100)
        tokens = (labels[:, 1:] >= 0).sum()
        sums += torch.tensor([model(input_ids=ids, labels=labels, **given).loss * tokens, tokens])
    return float(sums[0] / sums[1])


@pytest.mark.parametrize("name", FORMATS)
def test_training_begins_and_ends_with_the_weights_that_transformers_has(
    name, tmp_path, monkeypatch
):
    """Prevents fine-tuning wrong weights, tokens or images, a restart when epochs are added, and
    exports of untrained weights."""
    folder, data, job = tmp_path / "released", tmp_path / "data.jsonl", tmp_path / "job"
    model, shows = save(name, folder), "-vl" in name or "internvl" in name
    records = []
    for number, said in enumerate(("a cat", "what is it?", "it")):
        picture(24 + 9 * number, 40, number).save(tmp_path / f"{number}.png")
        image = {"images": [f"{number}.png"]} if shows and number else {}
        asked = {"role": "user", "content": "<image>" * len(image) + "What?"}
        records.append({"messages": [asked, {"role": "assistant", "content": said}], **image})
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    said = forked_steps(monkeypatch)
    command = ["run", "--model", folder, "--data", data, "--cluster", "laptop-cpu", "--gpus", "2"]
    for more in ([], ["--epochs", "2"])[: 2 if name == "qwen3-vl" else 1]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, [*command, "-o", job]), *more])
        assert not ended.value.code, said
    assert losses(job / "run")[0] == pytest.approx(loss_of(model, folder, data), abs=1e-4)
    assert {path.name for path in (job / "hf").iterdir()} == {
        path.name for path in folder.iterdir()
    }
    if name == "qwen3-vl":  # after the first epoch
        trained = AutoModelForImageTextToText.from_pretrained(job / "hf-1")
        assert losses(job / "run")[1] == pytest.approx(loss_of(trained, folder, data), abs=1e-4)
        assert losses(job / "run")[1] < losses(job / "run")[0]

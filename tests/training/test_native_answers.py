"""Answers about native-resolution images and videos, compared with Transformers' generation."""

import json
from pathlib import Path

import pytest
import torch
from evaluation_cases import answers, reader_of_run
from native_data_cases import picture
from qwen_vl_cases import transformers_model, write_companions
from ranks import run_ranks
from released import imported

from megatron.vlm.inputs.reader import SampleReader
from omnibal.data.annotations import video_at
from omnibal.data.sample import Sample, Turn
from omnibal.data.stored_files import ImageFile
from omnibal.model.parallel import Parallel

NEW_TOKENS = 5
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}


def make_samples(folder: Path) -> list[Sample]:
    """Return samples with one image, two images and a video, and text only."""
    (folder / "clip").mkdir()
    sizes = {"0": (30, 22), "1": (9, 40), **{f"clip/{number}": (20, 28) for number in range(5)}}
    for seed, (name, size) in enumerate(sizes.items()):
        picture(*size, seed).save(folder / f"{name}.png")
    images = tuple(ImageFile(folder / f"{number}.png") for number in range(2))
    clip = (video_at(folder / "clip"),)
    return [
        Sample(
            identity="s", source="s", where="s", images=shown, videos=videos,
            turns=(Turn(question, "", None),),
        )
        for question, shown, videos in (
            ("<image> a b", images[:1], ()),
            ("<image> a <video> b <image> c", images, clip),
            ("a b", (), ()),
        )
    ]  # fmt: skip


def hf_answer(model, reader: SampleReader, sample: Sample) -> list[int]:
    """Return token ids that Transformers generates from equal tokens and patches."""
    shown = reader.list_shown(sample)
    prompt = reader.prompt(sample, 0, NEW_TOKENS, chatting=True)
    ids, patches = torch.from_numpy(prompt.token_ids)[None], reader.patches(sample, shown)
    given, kinds = {}, torch.zeros_like(ids, dtype=torch.int32)
    items = list(zip(shown, patches.split([grid.patches for grid, _ in shown]), strict=True))
    for number, (kind, name) in enumerate(PIXELS.items()):
        kinds[ids == reader.tokenizer.require_id(f"<|{kind}_pad|>")] = number + 1
        chosen = [pair for pair in items if (pair[0].seconds is not None) == (kind == "video")]
        if chosen:
            given[name] = torch.cat([own for _, own in chosen])
            given[f"{kind}_grid_thw"] = torch.tensor([tuple(item.grid) for item, _ in chosen])
        if chosen and kind == "video" and reader.model.images.video.positions_per_second:
            given["second_per_grid_ts"] = torch.tensor([item.seconds for item, _ in chosen])
    end = reader.answer_end
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds,
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=end, **given,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
    return found[: found.index(end)] if end in found else found


@pytest.mark.parametrize("name", ["qwen3-vl-tied", "qwen2.5-vl-tied"])
def test_answers_are_those_of_transformers(tmp_path, name):
    """Prevents patches, grids or positions that differ between a prompt and its answer."""
    model, released = transformers_model(name), tmp_path / "released"
    model.save_pretrained(released)
    write_companions(released)
    settings = {
        "patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024},
    }  # fmt: skip
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (released / file).write_text(json.dumps(settings))
    run = imported(released, tmp_path / "run")
    samples = make_samples(tmp_path)
    expected = [hf_answer(model, reader_of_run(run, sample), sample) for sample in samples]
    [found] = run_ranks(Parallel(pipeline=1), answers, run, samples, NEW_TOKENS)
    assert found == expected
    assert any(expected)

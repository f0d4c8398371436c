"""Greedy answers under a pipeline, compared with answering questions separately in one process."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_cases import make_turns
from evaluation_cases import MAX_NEW_TOKENS, SAMPLES, pipeline_answers, reader_of
from ranks import run_ranks
from toy import OPTIONS, stages_of, toy_plan

from megatron.vlm.inputs.batch import MicroBatch
from megatron.vlm.step.evaluate import _list_questions, question_batch
from megatron.vlm.step.train import build_trainer
from omnibal.data.annotations import Annotations
from omnibal.data.chat import encode_prompt
from omnibal.model.config import load_model

IN_PARTS = {"tensor": 2, "sequence_parallel": True}


def answers_one_by_one(links, plan, folder):
    """Return answers without packing, pipeline or batching: one growing sequence at a time."""
    stage = build_trainer(plan, links, OPTIONS, steps=1, seed=1).stage.eval()
    reader = reader_of(folder)
    total, answers = len(reader.annotations), []
    for index in np.linspace(0, total - 1, SAMPLES).round().astype(int):
        sample = reader.annotations[int(index)]
        all_pixels, tiles = reader.pixels(sample), reader.tiles_per_image(sample)
        for turn in range(len(sample.turns)):
            ids = encode_prompt(sample, turn, tiles, reader.model, reader.tokenizer)
            ids, answer = ids.tolist(), []
            context = ids.count(reader.tokenizer.image_context)
            pixels = all_pixels[: context // reader.model.vision.tokens_per_item]
            while len(answer) < MAX_NEW_TOKENS and reader.answer_end not in answer:
                token_ids = torch.tensor(ids + answer)
                images = (token_ids == reader.tokenizer.image_context).nonzero().squeeze(1)
                stage.set_input_tensor(None)
                with torch.no_grad():
                    next_id = stage(
                        MicroBatch(
                            tiles=len(pixels),
                            tokens=len(token_ids),
                            segment_tokens=(len(token_ids),),
                            pixels_TCPP=pixels,
                            token_ids_S=token_ids,
                            image_positions_M=images,
                            answer_positions_A=torch.tensor([len(token_ids) - 1]),
                        )
                    )
                answer.append(int(next_id))
            words = [token for token in answer if token != reader.answer_end]
            answers.append((sample.identity, turn, reader.tokenizer.decode(words)))
    return answers


def write_image_per_turn(digits: Path, folder: Path) -> None:
    """Write held-out data with images in several turns, and a turn without image."""
    (folder / "heldout").mkdir()
    shutil.copy(digits / "tokenizer.model", folder)
    found = Annotations.open(digits / "heldout" / "meta.json")
    images = list(dict.fromkeys(sample.images[0].path for sample in found if sample.images))
    lines = []
    for number in range(SAMPLES):
        asked = ["<image>\nWhich?", "And?", "<image>\nAnd here?"][: 3 - number % 2]
        shown = [str(images[2 * number])]
        shown += [str(images[2 * number + 1])] * (len(asked) == 3)
        messages = make_turns(*itertools.chain.from_iterable((question, "7") for question in asked))
        lines.append(json.dumps({"image": shown, "conversations": messages}))
    (folder / "heldout" / "a.jsonl").write_text("\n".join(lines))
    meta = {"a": {"root": "", "annotation": "a.jsonl"}}
    (folder / "heldout" / "meta.json").write_text(json.dumps(meta))


def test_a_prompt_shows_what_was_asked_about(digits, tmp_path):
    """Prevents images of later turns in an earlier question's prompt."""
    write_image_per_turn(digits, tmp_path)
    reader = reader_of(tmp_path)
    sample = reader.annotations[0]
    first, second = reader.tiles_per_image(sample)
    prompts = [reader.prompt(sample, turn, room=8) for turn in range(3)]
    assert [prompt.items["tiles"] for prompt in prompts] == [first, first, first + second]
    for prompt in prompts:
        context = np.count_nonzero(prompt.token_ids == reader.tokenizer.image_context)
        assert context == prompt.items["tiles"] * reader.model.vision.tokens_per_item
    # Equals a single question about the first image, tiled as it is with two images.
    alone = replace(sample, images=sample.images[:1], turns=sample.turns[:1])
    share = reader.model.vision.tiling.max_dynamic_patch // 2
    prompt = reader.prompt(replace(alone, max_dynamic_patch=share), 0, room=8)
    assert prompt.items["tiles"] == first
    np.testing.assert_array_equal(prompt.token_ids, prompts[0].token_ids)


@pytest.mark.parametrize(
    ("name", "cuts", "sizes"),
    [
        pytest.param("internvl-digits", (3,), {}, id="pipeline"),
        pytest.param("internvl-digits", (), {"data": 2}, id="data"),
        pytest.param(
            "internvl-digits", (3,), {"tensor": 2, "sequence_parallel": True}, id="tensor"
        ),
        pytest.param("internvl-digits-moe", (3,), {"data": 2, "expert": 2}, id="experts"),
        pytest.param("internvl-digits", (3,), None, id="images-of-later-turns"),
    ],
)
def test_answers_equal_one_by_one(digits, tmp_path, name, cuts, sizes):
    """Prevents answers that depend on the pack or use later tiles, questions repeated, lost or
    mixed up, and a rank that finishes early and no longer joins expert-parallel exchanges."""
    folder = digits
    if sizes is None:
        write_image_per_turn(digits, tmp_path)
        folder = tmp_path
    model = load_model(name)
    plan = toy_plan(model, stages_of(model, *cuts), **sizes or {})
    whole = toy_plan(model, stages_of(model))
    evaluation, *others = run_ranks(plan.parallel, pipeline_answers, plan, folder)
    assert all(other == evaluation for other in others)
    [expected] = run_ranks(whole.parallel, answers_one_by_one, whole, folder)
    ranks = plan.parallel.data  # they take questions in turn
    dealt = [text for rank in range(ranks) for _, _, text in expected[rank::ranks]]
    assert [answer.answered for answer in evaluation.examples] == dealt
    assert len({text for _, _, text in expected}) > 1, "answers must differ to tell them apart"
    for kind in evaluation.kinds:
        members = [answer for answer in evaluation.examples if answer.kind == kind.kind]
        assert kind.questions == len(members)
        assert kind.correct == sum(answer.answered == answer.expected for answer in members)


def test_the_images_word_in_an_answer_stands_for_no_image(digits):
    """Prevents early ends and shifted images once a model answers with the image token."""
    reader = reader_of(digits)
    questions = [next(_list_questions(reader, SAMPLES, 3)) for _ in range(2)]
    before = question_batch(questions, {}, reader).image_positions_M.tolist()
    first = len(questions[0].prompt.token_ids)
    for question in questions:
        question.answer_ids.append(reader.tokenizer.image_context)
    after = question_batch(questions, {}, reader).image_positions_M.tolist()
    assert before and after == [place + (place >= first) for place in before]

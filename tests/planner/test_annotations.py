"""InternVL's meta JSON and JSONL: what is read, and how each mistake is reported."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from omnibal.data.annotations import Annotations
from omnibal.errors import UserError


def line(question="Which?", answer="7", **extra) -> str:
    messages = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return json.dumps({"conversations": messages, **extra})


def open_lines(folder: Path, *lines: str, **meta) -> Annotations:
    """Annotations of one source whose JSONL holds these lines."""
    (folder / "a.jsonl").write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
    entry = {"root": "pictures", "annotation": "a.jsonl", **meta}
    (folder / "meta.json").write_text(json.dumps({"a": entry}))
    return Annotations.open(folder / "meta.json")


def test_sample_as_written(tmp_path):
    """Prevents a field of the line from being lost or swapped."""
    messages = [
        {"from": speaker, "value": value}
        for speaker, value in zip(
            ["human", "gpt"] * 2, ["<image>é<image>", "1", "q", "2"], strict=True
        )
    ]
    text = json.dumps(
        {"id": 5, "image": ["x.png", "y.png"], "conversations": messages, "kinds": ["k", "l"]},
        ensure_ascii=False,
    )
    annotations = open_lines(tmp_path, line(), text)
    sample = annotations[1]
    assert len(annotations) == 2
    assert annotations.sources == ("a",)
    assert sample.identity == "a/5"
    assert sample.where == f"{tmp_path / 'a.jsonl'}: line 2"
    assert sample.images == (tmp_path / "pictures/x.png", tmp_path / "pictures/y.png")
    assert [(t.question, t.answer, t.kind) for t in sample.turns] == [
        ("<image>é<image>", "1", "k"),
        ("q", "2", "l"),
    ]


def test_text_only_sample(tmp_path):
    """Prevents samples without image, or with an empty one, from being refused."""
    for extra in ({}, {"image": ""}, {"image": []}, {"image": None}):
        sample = open_lines(tmp_path, line(**extra))[0]
        assert sample.images == ()
        assert sample.identity == "a/1"
        assert sample.turns[0].kind is None


def test_single_image_without_placeholder_comes_first(tmp_path):
    """Prevents an image from being loaded but not shown, where InternVL prepends it."""
    assert (
        open_lines(tmp_path, line("Which?", image="x.png"))[0].turns[0].question
        == "<image>\nWhich?"
    )


@pytest.mark.parametrize("ending", ["", "\n"])
def test_last_line_with_and_without_newline(tmp_path, ending):
    """Prevents the last sample from being dropped, or an empty one from being added."""
    (tmp_path / "a.jsonl").write_text(f"{line('1')}\n{line('2')}{ending}")
    (tmp_path / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    annotations = Annotations.open(tmp_path / "meta.json")
    assert [sample.turns[0].question for sample in annotations] == ["1", "2"]


@pytest.mark.parametrize(
    ("repeat_time", "expected"),
    [(1, "0123"), (2, "01230123"), (0.5, "01"), (1.25, "01230"), (0.3, "0")],
)
def test_repeat_time(tmp_path, repeat_time, expected):
    """Prevents a mixture other than the one asked for."""
    annotations = open_lines(tmp_path, *(line(str(k)) for k in range(4)), repeat_time=repeat_time)
    assert "".join(sample.turns[0].question for sample in annotations) == expected


def test_sources_follow_the_meta(tmp_path):
    """Prevents samples from being counted to another source."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f"{line(name)}\n" * 2)
    meta = {name: {"root": "", "annotation": f"{name}.jsonl"} for name in "ba"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    annotations = Annotations.open(tmp_path / "meta.json")
    assert annotations.sources == ("b", "a")
    assert annotations.source.tolist() == [0, 0, 1, 1]
    assert [sample.source for sample in annotations] == ["b", "b", "a", "a"]


def test_samples_taken_are_those_of_the_whole(tmp_path):
    """Prevents another process from reading other lines, or naming other places, than meant."""
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line(name + k)}\n" for k in "123"))
    meta = {name: {"root": "", "annotation": f"{name}.jsonl", "repeat_time": 2} for name in "ab"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    annotations = Annotations.open(tmp_path / "meta.json")
    indices = np.array([11, 4, 0, 7])
    taken = pickle.loads(pickle.dumps(annotations.take(indices)))
    assert [sample.turns[0].question for sample in taken] == ["b3", "a2", "a1", "b2"]
    assert list(taken) == [annotations[index] for index in indices]
    assert [taken.where(k) for k in range(4)] == [sample.where for sample in taken]
    assert taken.source.tolist() == [1, 0, 0, 1]


def test_hash_follows_content_and_not_place(tmp_path):
    """Prevents training on changed data under an old plan, and refusal after a mere move."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    reference = open_lines(first, line()).sha256
    shutil.copytree(first, second)
    assert Annotations.open(second / "meta.json").sha256 == reference
    assert open_lines(second, line(answer="8")).sha256 != reference
    assert open_lines(second, line(), repeat_time=2).sha256 != reference


def test_augmentation_is_known_and_changes_no_hash(tmp_path):
    """Prevents a switch of augmentation from being lost, or from asking for a new plan."""
    reference = open_lines(tmp_path, line())
    assert not reference[0].augment
    assert reference.augmented == ()
    augmented = open_lines(tmp_path, line(), data_augment=True)
    assert augmented[0].augment and augmented.take(np.array([0]))[0].augment
    assert augmented.augmented == ("a",)
    assert open_lines(tmp_path, line(), data_augment=False).sha256 == reference.sha256
    assert augmented.sha256 == reference.sha256
    content = hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    spelled_out = json.dumps(["a", 1, content]).encode()
    assert reference.sha256 == hashlib.sha256(spelled_out).hexdigest()


def test_readable_after_fork(tmp_path):
    """Prevents two processes from moving each other's place in a shared file."""
    annotations = open_lines(tmp_path, *(line(str(k)) for k in range(50)))
    _ = annotations[0]
    child = os.fork()
    wrong = any(annotations[k].turns[0].question != str(k) for k in list(range(50)) * 4)
    if child == 0:
        os._exit(wrong)
    assert not wrong
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"conversations": [', "is not JSON"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"id": ' + "9" * 5000 + "}", "is not JSON"),
        (line("\ud800"), "has text that is not Unicode"),
        ("[1]", "is a JSON list"),
        ("{}", 'must have "conversations"'),
        (json.dumps({"conversations": []}), 'must have "conversations"'),
        (json.dumps({"conversations": ["q", "a"]}), 'must have "conversations"'),
        (json.dumps({"conversations": [HUMAN, {"from": "gpt"}]}), 'must have "conversations"'),
        (json.dumps({"conversations": [HUMAN]}), "from human; human and gpt must alternate"),
        (json.dumps({"conversations": [GPT, HUMAN]}), "from gpt, human; human and gpt"),
        (json.dumps({"conversations": [HUMAN, HUMAN]}), "must alternate"),
        (line("<image>"), r"has 1 <image> for 0 image\(s\)"),
        (line("<image><image>", image="x.png"), r"has 2 <image> for 1 image\(s\)"),
        (line("<image>", image=["x.png", "y.png"]), r"has 1 <image> for 2 image\(s\)"),
        (line("no", image=["x.png", "y.png"]), r"has 0 <image> for 2 image\(s\)"),
        (line("q", "<image>", image="x.png"), "<image> in an answer"),
        (line(image=7), 'odd "image"'),
        (line(image=[7]), 'odd "image"'),
        (line(video="x.mp4"), 'has a "video"'),
        (line("<IMG_CONTEXT>"), "has '<IMG_CONTEXT>' in its text"),
        (line("q", "<img>"), "has '<img>' in its text"),
        (line("</img>"), "has '</img>' in its text"),
        (line("<|im_end|>"), r"has '<\|im_end\|>' in its text"),
        (line(kinds=["a", "b"]), 'in "kinds" one name for each of its 1'),
        (line(kinds="a"), 'in "kinds" one name'),
    ],
)
def test_mistakes_in_a_line_name_file_and_line(tmp_path, text, message):
    """Prevents a mistake in the data from being trained on, or reported without its place."""
    annotations = open_lines(tmp_path, line(), text, line())
    with pytest.raises(UserError, match=message) as error:
        _ = annotations[1]
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'}: line 2 ")
    assert annotations[2].turns[0].question == "Which?"


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("[]", "maps each source name"),
        ("{", "maps each source name"),
        ("{}", "names no source"),
        ('{"a": {"root": ""}}', "a: annotation: Field required"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "weight": 2}}', "a: weight: Extra"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "data_augment": 7}}', "a: data_augment"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "repeat_time": 0}}', "a: repeat_time"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "repeat_time": 0.1}}', "leaves no sample"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "length": 3}}', "holds 2 lines"),
        ('{"a": {"root": "", "annotation": "b.jsonl"}}', r"b\.jsonl: no such annotation file"),
        ('{"a": {"root": "", "annotation": "empty.jsonl"}}', r"empty\.jsonl: is empty"),
    ],
)
def test_mistakes_in_the_meta(tmp_path, meta, message):
    """Prevents a wrong meta from ending in a traceback or in an empty run."""
    (tmp_path / "a.jsonl").write_text(f"{line()}\n{line()}\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(UserError, match=message):
        Annotations.open(tmp_path / "meta.json")


def test_missing_meta(tmp_path):
    """Prevents a traceback for a wrong path."""
    with pytest.raises(UserError, match="no such meta file"):
        Annotations.open(tmp_path / "meta.json")

"""InternVL's meta JSON and JSONL: what is read, and how each mistake is reported."""

import hashlib
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiling_cases import internvl_grid

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
from omnibal.data.record_files import index_array, is_array
from omnibal.data.sample import middle_frames
from omnibal.data.stored_files import ImageFile, natural_order
from omnibal.data.tiling import tile_grid
from omnibal.model.encoders import TilingConfig


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
    image_names = ["x.png", "y.png"]
    messages = [
        {"from": speaker, "value": value}
        for speaker, value in zip(
            ["human", "gpt"] * 2, ["<image>é<image>", "1", "q", "2"], strict=True
        )
    ]
    text = json.dumps(
        {"id": 5, "image": image_names, "conversations": messages, "kinds": ["k", "l"]},
        ensure_ascii=False,
    )
    annotations = open_lines(tmp_path, line(), text)
    sample = annotations[1]
    assert len(annotations) == 2
    assert annotations.sources == ("a",)
    assert sample.identity == "a/5"
    assert sample.where == f"{tmp_path / 'a.jsonl'}: line 2"
    assert sample.images == tuple(ImageFile(tmp_path / "pictures" / name) for name in image_names)
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
    later = [HUMAN, GPT, {**HUMAN, "value": "What is <image> this?"}, GPT]
    [sample] = open_lines(tmp_path, json.dumps({"image": "x.png", "conversations": later}))
    assert [turn.question for turn in sample.turns] == ["q", "What is <image> this?"]


@pytest.mark.parametrize("ending", ["", "\n", "\n\n", " \r\n\t \n \n", "\n  "])
def test_last_line_with_and_without_newline(tmp_path, ending):
    """Prevents the last sample from being dropped, or an empty one from being added."""
    (tmp_path / "a.jsonl").write_text(f"{line('1')}\n{line('2')}{ending}")
    (tmp_path / "meta.json").write_text('{"a": {"root": "", "annotation": "a.jsonl"}}')
    annotations = Annotations.open(tmp_path / "meta.json")
    assert [sample.turns[0].question for sample in annotations] == ["1", "2"]


@pytest.mark.parametrize(
    ("repeat_time", "expected"),
    [
        *[(1, "0123"), (2, "01230123"), (0.5, "01"), (1.25, "01230"), (0.3, "0")],
        # Below 1 the rest of a line is dropped; 0.95 * 4 and 2.9 * 4 are no whole numbers.
        *[(0.95, "012"), (2.9, "01230123012")],
    ],
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
    # Which tiles do depend on.
    limited = open_lines(tmp_path, line(), max_dynamic_patch=6)
    assert len({limited.sha256, open_lines(tmp_path, line(), max_dynamic_patch=7).sha256}) == 2
    assert limited.sha256 != reference.sha256


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


def talk(*speakers: str, system: str = "s", **extra) -> str:
    """A line of these speakers' messages, of which each question and answer is its number."""
    messages = [
        {"from": speaker, "value": system if speaker == "system" else str(number)}
        for number, speaker in enumerate(speakers)
    ]
    return json.dumps({"conversations": messages, **extra})


@pytest.mark.parametrize(
    ("speakers", "system", "greeting", "texts"),
    [
        (["human", "gpt"], None, None, [("0", "1")]),
        (["system", "human", "gpt"], "s", None, [("1", "2")]),
        (["gpt", "human", "gpt"], None, "0", [("1", "2")]),
        (["system", "gpt", "human", "gpt", "human", "gpt"], "s", "1", [("2", "3"), ("4", "5")]),
    ],
)
def test_system_message_and_greeting(tmp_path, speakers, system, greeting, texts):
    """Prevents a system message from being asked, and a greeting from being taken for an answer."""
    sample = open_lines(tmp_path, talk(*speakers))[0]
    assert (sample.system, sample.greeting) == (system, greeting)
    assert [(turn.question, turn.answer) for turn in sample.turns] == texts


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
        ('{"messages": "a"}', 'must have "messages": a list of {"role", "content"}'),
        ('{"messages": [{"role": "user"}]}', 'in "messages" as message 1 an odd "content"'),
        ('{"messages": [{"role": "user", "content": null}]}', 'message 1 an odd "content"'),
        ('{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', 'part of "type" null'),
        (
            json.dumps({"messages": [HUMAN, {"role": "assistant", "content": "a"}]}),
            'in "messages" as message 2 "from" null; it must be one of system, human',
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "a"}]}),
            "from user; user and assistant must alternate, user first and assistant last",
        ),
        (
            json.dumps({"messages": [{"role": "user", "content": "a"}], "conversations": [HUMAN]}),
            'has "conversations" and "messages"; leave one of them out',
        ),
        (json.dumps({"conversations": []}), 'must have "conversations"'),
        (json.dumps({"conversations": ["q", "a"]}), 'must have "conversations"'),
        (json.dumps({"conversations": [HUMAN, {"from": "gpt"}]}), 'message 2 an odd "value"'),
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
        (line(image=[""]), 'odd "image"'),
        (line(video=["f.jpg", ""]), 'odd "video"'),
        (
            json.dumps({"conversations": [{**GPT, "value": "<image>"}, HUMAN, GPT]}),
            "<image> in an answer",
        ),
        (line(video=["a.jpg", "x.MKV"]), "has the video file x.MKV among frames"),
        (line(video=7), 'odd "video"'),
        (line("<video>\n", video=["f.jpg"], image=["x.png", "y.png"]), "has 0 <image> for 2"),
        (line("<image>", video=["f.jpg"]), "has 1 <image> for 0 image"),
        (line("<video>", video=["f.jpg"]), "is about a video"),
        (line("<video>\n<video>\n", video=["f.jpg"]), "is about a video"),
        (talk("system", "human", "human"), "from system, human, human; human and gpt"),
        (talk("system"), "from system; human and gpt"),
        (talk("human", "system", "gpt"), "must alternate"),
        (talk("gpt"), "from gpt; human"),
        (talk("gpt", "gpt", "human", "gpt"), "must alternate"),
        (talk("user", "model"), 'message 2 "from" "model"; it must be one of'),
        (talk("system", "human", "gpt", system="<image>"), "<image> in an answer or system"),
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
        ("[]", "is an empty array"),
        ("7", "maps each source name"),
        ("{", "maps each source name"),
        ('{"messages":\n[]}', "an annotation file instead is a JSON list of samples"),
        ("{}", "names no source"),
        ('{"a": {"root": ""}}', 'a: one of "annotation", "shards" and "energon" must'),
        ('{"a": {"annotation": "a.jsonl", "shards": "a.tar"}}', 'one of "annotation"'),
        ('{"a": {"shards": "a.tar", "root": ""}}', '"root", the folder of the files, goes with'),
        ('{"a": {"shards": "a.tar", "split": "train"}}', '"split" goes with "energon" alone'),
        ('{"a": {"root": "", "annotation": "a.jsonl", "conv_style": "x"}}', "conv_style: Extra"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "max_dynamic_patch": 0}}', "max_dynamic_pat"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "weight": 2}}', "a: weight: Extra"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "data_augment": 7}}', "a: data_augment"),
        *[
            (f'{{"a": {{"root": "", "annotation": "a.jsonl", "repeat_time": {value}}}}}', message)
            for message, values in (
                ("a: repeat_time: Input should be a valid number", ("true", '"2"')),
                ("a: repeat_time: Input should be", ("0", "10001", "1e300", "1e999")),
            )
            for value in values
        ],
        ('{"a": {"root": "", "annotation": "a.jsonl", "repeat_time": 0.1}}', "leaves no sample"),
        ('{"a": {"root": "", "annotation": "a.jsonl", "length": 3}}', "holds 2 lines"),
        ('{"a": {"root": "", "annotation": "b.jsonl"}}', r"b\.jsonl: no such annotation file"),
        ('{"a": {"root": "", "annotation": "empty.jsonl"}}', r"empty\.jsonl: is empty"),
        ('{"a": {"root": "", "annotation": "blank.jsonl"}}', r"blank\.jsonl: is empty"),
        ('{"a": {"root": "", "annotation": "array.jsonl"}}', r"array\.jsonl: is a JSON array"),
        (f'{{"a": {{"root": "", "annotation": "{"b" * 999}"}}}}', r"cannot be read \(File name"),
    ],
)
def test_mistakes_in_the_meta(tmp_path, meta, message):
    """Prevents a wrong meta from ending in a traceback or in an empty run."""
    (tmp_path / "a.jsonl").write_text(f"{line()}\n{line()}\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text(" \n\t\n  ")
    (tmp_path / "array.jsonl").write_text(f" [ \r\n{line()}\n]\n")
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(UserError, match=message):
        Annotations.open(tmp_path / "meta.json")


def test_missing_meta(tmp_path):
    """Prevents a traceback for a wrong path."""
    with pytest.raises(UserError, match="no such meta file"):
        Annotations.open(tmp_path / "meta.json")


@pytest.mark.parametrize("share", [1, 2, 3])
def test_one_tile_where_the_share_is_below_the_least(tmp_path, share):
    """Prevents tiles where InternVL finds no grid at all and leaves the image whole."""
    sample = open_lines(tmp_path, line("<image>" * 2, image=["x", "y"]))[0]
    most = 2 * share
    shared = sample.tiling(TilingConfig(min_dynamic_patch=min(4, most), max_dynamic_patch=most))
    for width in (10, 100, 1000, 9000):
        found = tile_grid(width, 100, shared, 448)
        expected = internvl_grid(width, 100, min(4, most), share, 448)
        assert found == expected == (1, 1)


TILING = TilingConfig(min_dynamic_patch=2, max_dynamic_patch=12)


@pytest.mark.parametrize(
    ("images", "limit", "most"),
    [
        *[(0, None, 12), (1, None, 12), (2, None, 6), (5, None, 2), (7, None, 1), (40, None, 1)],
        *[(1, 24, 24), (2, 24, 12), (1, 3, 3), (2, 3, 1), (3, 12, 4)],
    ],
)
def test_images_share_the_most_tiles(tmp_path, images, limit, most):
    """Prevents other tiles than the released models were trained with, or an empty range of them.

    InternVL: `max_num=max(1, max_dynamic_patch // number of images)`.
    """
    names = [f"{k}.png" for k in range(images)]
    meta = {} if limit is None else {"max_dynamic_patch": limit}
    sample = open_lines(tmp_path, line("<image>" * images, image=names), **meta)[0]
    found = sample.tiling(TILING)
    assert (found.max_dynamic_patch, found.min_dynamic_patch) == (most, min(2, most))
    assert found.use_thumbnail and sample.shown(TILING) == sample


def middles_spelled_out(frames: int, most: int) -> list[int]:
    """InternVL's frames, from the definition: the middle of each of `most` equal intervals."""
    chosen, parts = [], min(frames, most)
    for part in range(parts):
        start, end = frames * part // parts, frames * (part + 1) // parts - 1
        chosen.append(start + (end - start) // 2)
    return chosen


def test_middle_frames():
    """Prevents frames that InternVL would not show, or one of them twice."""
    for most in (1, 2, 3, 8, 32):
        for frames in [*range(1, 100), 1000, 1001, 54321]:
            chosen = middle_frames(frames, most)
            assert chosen == sorted(set(chosen))
            if frames <= most:
                assert chosen == list(range(frames))
            # Where floating point meets a border from below, as NumPy's linspace does.
            wrong = np.abs(np.subtract(chosen, middles_spelled_out(frames, most)))
            assert wrong.max() <= 1 and wrong.mean() <= 0.1
    assert middle_frames(100, 4) == [12, 37, 62, 87]


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("What?", "Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\nWhat?"),
        ("<video>\nWhat?", "Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\nWhat?"),
        ("<video>\r\nWhat?", "Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\nWhat?"),
        ("Look: <video>\n", "Look: Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\n"),
    ],
)
def test_video_frames(tmp_path, question, shown):
    """Prevents frames in another order or number than the question says, or cut into tiles."""
    folder = tmp_path / "pictures/clip"
    folder.mkdir(parents=True)
    hidden = "._frame1.jpg"
    for name in ("frame10.jpg", "frame2.JPG", "frame1.jpg", "notes.txt", "frame9.png", hidden):
        (folder / name).touch()
    [in_file] = open_lines(tmp_path, line(video="clip/notes.txt"))
    with pytest.raises(UserError, match=r"has the video file .*clip/notes\.txt.* ffmpeg -i"):
        in_file.shown(TILING)
    names = ["frame1.jpg", "frame2.JPG", "frame9.png", "frame10.jpg"]
    tiling = TILING.model_copy(update={"max_frames_per_video": 3})
    listed = [f"clip/{name}" for name in names]
    for video in ("clip", listed):
        sample = open_lines(tmp_path, line(question, video=video))[0]
        [of_sample] = sample.videos
        assert [frame.path for frame in of_sample.frames] == [folder / name for name in names]
        assert sample.files == of_sample.frames
        few = sample.shown(tiling)
        chosen = [names[k] for k in middles_spelled_out(4, 3)]
        assert [image.path.name for image in few.images] == chosen
        assert few.turns[0].question == shown
        assert few.shown(tiling) == few and few.files == few.images
        assert few.tiling(tiling).max_dynamic_patch == few.tiling(tiling).min_dynamic_patch == 1
        assert sample.shown(TILING).turns[0].question.count("<image>") == 4


def refused(*_):
    raise PermissionError(13, "Permission denied")


def test_files_that_cannot_be_read_make_bad_samples(tmp_path, monkeypatch):
    """Prevents one folder or line that is out of reach from ending a scan that may skip it."""
    long, folder = "x" * 5000, tmp_path / "pictures/clip"
    annotations = open_lines(tmp_path, line(video=long), line(video="clip"))
    assert annotations[0].files == (ImageFile(tmp_path / "pictures" / long),)
    folder.mkdir(parents=True)
    (folder / "1.jpg").touch()
    assert annotations[1].files == (ImageFile(folder / "1.jpg"),)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refused)
        assert annotations[1].files == (ImageFile(folder),)
        patched.setattr(Path, "is_file", refused)
        assert annotations[1].files == (ImageFile(folder),)
        with pytest.raises(UserError, match=r"meta\.json: cannot be read \(Permission denied\)"):
            Annotations.open(tmp_path / "meta.json")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refused)
        with pytest.raises(UserError, match=r"a\.jsonl: line 2 cannot be read \(.*denied"):
            _ = annotations[1]


@given(st.lists(st.text(), min_size=1))
def test_natural_order(names):
    """Prevents a crash on names that mix digits and letters, or an order by chance."""
    shuffled = names[::-1]
    ordered = sorted(names, key=natural_order)
    assert ordered == sorted(shuffled, key=natural_order)
    numbered = [f"{names[0]}x{k}" for k in (1, 2, 9, 10, 11, 100)]
    assert sorted(numbered, key=natural_order) == numbered


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    array=st.lists(JSON, min_size=1),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 0, 3]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_array_elements_are_those_of_the_whole(tmp_path, array, ensure_ascii, indent, mark):
    """Prevents an element from being cut at a bracket or quote in a string, or between bytes."""
    text = mark + json.dumps(array, ensure_ascii=ensure_ascii, indent=indent)
    path = tmp_path / "a.json"
    try:
        path.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        return
    assert is_array(path)
    index = index_array(path)
    content = path.read_bytes()
    elements = [
        json.loads(content[start : start + size])
        for start, size in zip(index.start, index.size, strict=True)
    ]
    assert elements == array
    assert index.digest == hashlib.sha256(content).digest()


@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_samples_of_an_array(tmp_path, name):
    """Prevents LLaVA's files from being refused, or read otherwise than the same lines."""
    messages = [{"from": "human", "value": "Was ist das? 「[é]」\n<image>"}, GPT]
    records = [
        {"id": "x", "image": "x.png", "conversations": messages},
        json.loads(line("2")),
        {"conversations": [HUMAN]},
    ]
    entry = {"root": "pictures", "annotation": name, "repeat_time": 2}
    (tmp_path / "meta.json").write_text(json.dumps({"a": entry}))
    (tmp_path / name).write_text(json.dumps(records, ensure_ascii=False, indent=1), "utf-8")
    array = Annotations.open(tmp_path / "meta.json")
    lines = open_lines(tmp_path, *map(json.dumps, records), repeat_time=2)
    assert array[0].turns[0].question == messages[0]["value"]
    assert array[0].identity == "a/x"
    assert len(array) == len(lines) == 6
    for k in (0, 1, 3, 4):
        assert replace(array[k], where="") == replace(lines[k], where="")
        assert array[k].where == f"{tmp_path / name}: sample {k % 3 + 1}"
    with pytest.raises(UserError, match=rf"{name}: sample 3 has \"conversations\" from human"):
        _ = array[5]
    # Some .json files hold lines.
    (tmp_path / name).write_bytes((tmp_path / "a.jsonl").read_bytes())
    named = json.dumps({"a": entry})
    (tmp_path / "meta.json").write_text(named)
    assert [Annotations.open(tmp_path / "meta.json")[k].images for k in range(2)] == [
        lines[k].images for k in range(2)
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "is an empty array"),
        (" [ ] x", "extra data at byte 5, line 1"),
        ("[1", "expecting ',' or ']' at byte 2"),
        ("[1,\n2 3]", "expecting ',' or ']' at byte 6, line 2"),
        ('["é", x]', "Expecting value at byte 7, line 1"),
        ("[1,]", "Expecting value at byte 3"),
        ("[1,", "Expecting value at byte 3"),
        ('[{"a": "b]', "Unterminated string starting at at byte 7"),
        ("[1] ]", "extra data at byte 4"),
        ("[" * 100_000, "recursion"),
        ("[" + "9" * 5000 + "]", "Exceeds the limit"),
    ],
)
def test_malformed_arrays(tmp_path, content, message):
    """Prevents half of a file from being trained on, or a mistake without its place."""
    (tmp_path / "a.json").write_text(content, "utf-8")
    (tmp_path / "meta.json").write_text('{"a": {"root": "", "annotation": "a.json"}}')
    with pytest.raises(UserError, match=message) as error:
        Annotations.open(tmp_path / "meta.json")
    assert str(error.value).startswith(f"{tmp_path / 'a.json'}: ")

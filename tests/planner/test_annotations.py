"""InternVL's meta JSON and JSONL: parsed fields, and the error for each mistake."""

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
from jsonl_cases import open_jsonl, open_meta, record_of, said, write_jsonl
from tiling_cases import internvl_grid

from omnibal.base.errors import UserError
from omnibal.data import record_files
from omnibal.data.annotations import Annotations
from omnibal.data.record_files import index_array, index_lines, is_array
from omnibal.data.sample import Turn, middle_frames
from omnibal.data.stored_files import ImageFile, natural_order
from omnibal.data.tiling import tile_grid
from omnibal.model.encoders import TilingConfig


def test_sample_as_written(tmp_path):
    """Prevents a field of the line from being lost or swapped."""
    messages = said("<image>é<image>", "1", "q", "2")
    record = {"id": 5, "image": ["x.png", "y.png"], "conversations": messages, "kinds": ["k", "l"]}
    text = json.dumps(record, ensure_ascii=False)
    annotations = open_jsonl(tmp_path, record_of(), text, root="pictures")
    sample, pictures = annotations[1], tmp_path / "pictures"
    assert (len(annotations), annotations.sources, sample.identity) == (2, ("a",), "a/5")
    assert sample.where == f"{tmp_path / 'a.jsonl'}: line 2"
    assert sample.images == (ImageFile(pictures / "x.png"), ImageFile(pictures / "y.png"))
    assert sample.turns == (Turn("<image>é<image>", "1", "k"), Turn("q", "2", "l"))


def test_images_with_and_without_placeholder(tmp_path):
    """Prevents refusing text-only samples, and losing an image without placeholder."""
    for extra in ({}, {"image": ""}, {"image": []}, {"image": None}):
        sample = open_jsonl(tmp_path, record_of(**extra))[0]
        assert (sample.images, sample.identity, sample.turns[0].kind) == ((), "a/1", None)
    later = {"image": "x.png", "conversations": said("q", "a", "What is <image> this?", "a")}
    first, second = open_jsonl(tmp_path, record_of(image="x.png"), later)
    assert first.turns[0].question == "<image>\nWhich?"
    assert [turn.question for turn in second.turns] == ["q", "What is <image> this?"]


@pytest.mark.parametrize("ending", ["", "\n", "\n\n", " \r\n\t \n \n", "\n  "])
def test_last_line_with_and_without_newline(tmp_path, ending):
    """Prevents the last sample from being dropped, or an empty one from being added."""
    lines = "\n".join(json.dumps(record_of(text)) for text in "12")
    (tmp_path / "a.jsonl").write_text(lines + ending)
    annotations = open_meta(tmp_path, a={"root": "", "annotation": "a.jsonl"})
    assert [sample.turns[0].question for sample in annotations] == ["1", "2"]


@pytest.mark.parametrize(
    ("repeat_time", "expected"),
    [
        *[(1, "0123"), (2, "01230123"), (0.5, "01"), (1.25, "01230"), (0.3, "0")],
        # Below 1 the fractional line is dropped. 0.95 * 4 and 2.9 * 4 are not integers.
        *[(0.95, "012"), (2.9, "01230123012")],
    ],
)
def test_repeat_time(tmp_path, repeat_time, expected):
    """Prevents a mixture other than the requested repetition."""
    annotations = open_jsonl(tmp_path, *map(record_of, "0123"), repeat_time=repeat_time)
    assert "".join(sample.turns[0].question for sample in annotations) == expected


def test_sources_follow_the_meta(tmp_path):
    """Prevents a sample under another source, and other lines or locations in another process."""
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", *(record_of(name + k) for k in "123"))
    entry = {"root": "", "repeat_time": 2}
    annotations = open_meta(tmp_path, **{n: {"annotation": f"{n}.jsonl", **entry} for n in "ba"})
    assert annotations.sources == ("b", "a")
    assert annotations.source.tolist() == 6 * [0] + 6 * [1]
    assert [sample.source for sample in annotations] == 6 * ["b"] + 6 * ["a"]
    indices = np.array([11, 4, 0, 7])
    taken = pickle.loads(pickle.dumps(annotations.take(indices)))
    assert [sample.turns[0].question for sample in taken] == ["a3", "b2", "b1", "a2"]
    assert list(taken) == [annotations[index] for index in indices]
    assert [taken.where(k) for k in range(4)] == [sample.where for sample in taken]
    assert taken.source.tolist() == [1, 0, 0, 1]


def test_hash_follows_content_and_not_place(tmp_path):
    """Prevents training on changed data with an old plan, and refusing data that only moved."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    reference = open_jsonl(first, record_of()).sha256
    shutil.copytree(first, second)
    assert Annotations.open(second / "meta.json").sha256 == reference
    changed = [{"repeat_time": 2}, {"max_dynamic_patch": 6}, {"max_dynamic_patch": 7}]
    hashes = [open_jsonl(second, record_of(), **entry).sha256 for entry in changed]
    hashes.append(open_jsonl(second, record_of(answer="8")).sha256)
    assert len({reference, *hashes}) == 5


def test_augmentation_is_known_and_changes_no_hash(tmp_path):
    """Prevents losing the augmentation switch, or a new data hash because of it."""
    content = hashlib.sha256(write_jsonl(tmp_path / "a.jsonl", record_of()).read_bytes())
    spelled_out = json.dumps(["a", 1, content.hexdigest()]).encode()
    for entry in ({}, {"data_augment": False}, {"data_augment": True}):
        augmented, annotations = any(entry.values()), open_jsonl(tmp_path, record_of(), **entry)
        assert annotations.sha256 == hashlib.sha256(spelled_out).hexdigest()
        assert annotations.augmented_sources == (("a",) if augmented else ())
        assert annotations[0].augment == annotations.take(np.array([0]))[0].augment == augmented


def test_readable_after_fork(tmp_path):
    """Prevents two processes sharing the file offset of one open file."""
    annotations = open_jsonl(tmp_path, *(record_of(str(k)) for k in range(50)))
    _ = annotations[0]
    child = os.fork()
    wrong = any(annotations[k].turns[0].question != str(k) for k in list(range(50)) * 4)
    if child == 0:
        os._exit(wrong)
    assert not wrong
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def talk(*speakers: str, system: str = "s") -> dict:
    """Return a record of these speakers. Each text is its position."""
    texts = [system if name == "system" else str(k) for k, name in enumerate(speakers)]
    messages = zip(speakers, texts, strict=True)
    return {"conversations": [{"from": name, "value": text} for name, text in messages]}


@pytest.mark.parametrize(
    ("speakers", "system", "greeting", "texts"),
    [
        ("human gpt", None, None, [("0", "1")]),
        ("system human gpt", "s", None, [("1", "2")]),
        ("gpt human gpt", None, "0", [("1", "2")]),
        ("system gpt human gpt human gpt", "s", "1", [("2", "3"), ("4", "5")]),
    ],
)
def test_system_message_and_greeting(tmp_path, speakers, system, greeting, texts):
    """Prevents a system message taken for a question, and a greeting taken for an answer."""
    sample = open_jsonl(tmp_path, talk(*speakers.split()))[0]
    assert (sample.system, sample.greeting) == (system, greeting)
    assert [(turn.question, turn.answer) for turn in sample.turns] == texts


HUMAN, GPT = said("q", "a")
USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"conversations": [', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"id": ' + "9" * 5000 + "}", "is not JSON"),
        (record_of("\ud800"), "has text that is not Unicode"),
        ([1], "is a JSON list"),
        ({}, 'must have "conversations"'),
        ({"messages": "a"}, 'must have "messages": a list of {"role", "content"}'),
        ({"messages": [{"role": "user"}]}, 'in "messages" as message 1 an odd "content"'),
        ({"messages": [{"role": "user", "content": None}]}, 'message 1 an odd "content"'),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, 'part of "type" null'),
        (
            {"messages": [HUMAN, USER]},
            'in "messages" as message 2 "from" null; it must be one of s',
        ),
        ({"messages": [USER]}, "from user; user .human. and assistant .gpt. must alternate"),
        ({"messages": [USER], "conversations": [HUMAN]}, 'has "conversations" and "messages"; le'),
        ({"conversations": []}, 'must have "conversations"'),
        ({"conversations": ["q", "a"]}, 'must have "conversations"'),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, 'message 2 an odd "value"'),
        ({"conversations": [HUMAN]}, "from user; user .human."),
        ({"conversations": [GPT, HUMAN]}, "from assistant, user; user"),
        ({"conversations": [HUMAN, HUMAN]}, "must alternate"),
        (record_of("<image>"), r"has 1 <image> for 0 image\(s\)"),
        (record_of("<image><image>", image="x.png"), r"has 2 <image> for 1 image\(s\)"),
        (record_of("<image>", image=["x.png", "y.png"]), r"has 1 <image> for 2 image\(s\)"),
        (record_of("no", image=["x.png", "y.png"]), r"has 0 <image> for 2 image\(s\)"),
        (record_of("q", "<image>", image="x.png"), "<image> in an answer"),
        (record_of(image=7), 'odd "image"'),
        (record_of(image=[7]), 'odd "image"'),
        (record_of(image=[""]), 'odd "image"'),
        (record_of(video=["f.jpg", ""]), 'odd "video"'),
        ({"conversations": [GPT | {"value": "<image>"}, HUMAN, GPT]}, "<image> in an answer"),
        (record_of(video=["a.jpg", "x.MKV"]), "has the video file x.MKV among frames"),
        (record_of(video=7), 'odd "video"'),
        (record_of("<video>\n", video=["f.jpg"], image=["x.png", "y"]), "has 0 <image> for 2"),
        (record_of("<image>", video=["f.jpg"]), "has 1 <image> for 0 image"),
        (record_of("<video>\n<video>\n", video=["f.jpg"]), r"has 2 <video> for 1 video"),
        (talk("system", "human", "human"), "from system, user, user; user"),
        (talk("system"), "from system; user"),
        (talk("human", "system", "gpt"), "must alternate"),
        (talk("gpt"), "from assistant; user"),
        (talk("gpt", "gpt", "human", "gpt"), "must alternate"),
        (talk("user", "model"), 'message 2 "from" "model"; it must be one of'),
        (talk("system", "human", "gpt", system="<image>"), "<image> in an answer or system"),
        (record_of(kinds=["a", "b"]), 'in "kinds" a name for each of 1'),
        (record_of(kinds="a"), 'in "kinds" a name'),
    ],
)
def test_mistakes_in_a_line_name_file_and_line(tmp_path, record, message):
    """Prevents training on malformed data, or an error without file and line."""
    annotations = open_jsonl(tmp_path, record_of(), record, record_of())
    with pytest.raises(UserError, match=message) as error:
        _ = annotations[1]
    assert str(error.value).startswith(f"{tmp_path / 'a.jsonl'}: line 2 ")
    assert annotations[2].turns[0].question == "Which?"


LINES = {"root": "", "annotation": "a.jsonl"}


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (None, "no such file"),
        ("[]", "is an empty array"),
        ("7", "maps each source name"),
        ("{", "maps each source name"),
        ('{"messages":\n[]}', "an annotation file instead is a JSON list of samples"),
        ("{}", "names no source"),
        ({"root": ""}, 'a: one of "annotation", "shards" and "energon" must'),
        ({"annotation": "a.jsonl", "shards": "a.tar"}, 'one of "annotation"'),
        ({"shards": "a.tar", "root": ""}, '"root", the folder of the files, goes with'),
        ({"shards": "a.tar", "split": "train"}, '"split" goes with "energon" alone'),
        (LINES | {"conv_style": "x"}, "conv_style: Extra"),
        (LINES | {"max_dynamic_patch": 0}, "max_dynamic_pat"),
        (LINES | {"weight": 2}, "a: weight: Extra"),
        (LINES | {"data_augment": 7}, "a: data_augment"),
        (LINES | {"repeat_time": True}, "a: repeat_time: Input should be a valid number"),
        (LINES | {"repeat_time": "2"}, "a: repeat_time: Input should be a valid number"),
        *[
            (LINES | {"repeat_time": value}, "a: repeat_time: Input should be")
            for value in (0, 10001, 1e300)
        ],
        ('{"a": {"annotation": "a.jsonl", "repeat_time": 1e999}}', "a: repeat_time: Input should"),
        (LINES | {"repeat_time": 0.1}, "leaves no sample"),
        (LINES | {"length": 3}, "holds 2 lines"),
        ({"annotation": "b.jsonl"}, r"b\.jsonl: no such annotation file"),
        ({"annotation": "empty.jsonl"}, r"empty\.jsonl: is empty"),
        ({"annotation": "blank.jsonl"}, r"blank\.jsonl: is empty"),
        ({"annotation": "array.jsonl"}, r"array\.jsonl: is a JSON array"),
        ({"annotation": "b" * 999}, r"cannot be read \(File name"),
    ],
)
def test_mistakes_in_the_meta(tmp_path, meta, message):
    """Prevents a traceback, or a run without samples, from a malformed meta file."""
    write_jsonl(tmp_path / "a.jsonl", record_of(), record_of())
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text(" \n\t\n  ")
    (tmp_path / "array.jsonl").write_text(f" [ \r\n{json.dumps(record_of())}\n]\n")
    if meta is not None:
        text = meta if isinstance(meta, str) else json.dumps({"a": meta})
        (tmp_path / "meta.json").write_text(text)
    with pytest.raises(UserError, match=message):
        Annotations.open(tmp_path / "meta.json")


@pytest.mark.parametrize("share", [1, 2, 3])
def test_one_tile_where_the_share_is_below_the_least(tmp_path, share):
    """Prevents several tiles where InternVL finds no grid and keeps the image as one tile."""
    sample = open_jsonl(tmp_path, record_of("<image>" * 2, image=["x", "y"]))[0]
    most = 2 * share
    shared = sample.tiling(TilingConfig(min_dynamic_patch=min(4, most), max_dynamic_patch=most))
    for width in (10, 100, 1000, 9000):
        expected = internvl_grid(width, 100, min(4, most), share, 448)
        assert tile_grid(width, 100, shared, 448) == expected == (1, 1)


TILING = TilingConfig(min_dynamic_patch=2, max_dynamic_patch=12)


@pytest.mark.parametrize(
    ("images", "limit", "most"),
    [
        *[(0, None, 12), (1, None, 12), (2, None, 6), (5, None, 2), (7, None, 1), (40, None, 1)],
        *[(1, 24, 24), (2, 24, 12), (1, 3, 3), (2, 3, 1), (3, 12, 4)],
    ],
)
def test_images_share_the_most_tiles(tmp_path, images, limit, most):
    """Prevents tiles beyond InternVL's `max_num=max(1, max_dynamic_patch // number of images)`."""
    record = record_of("<image>" * images, image=[f"{k}.png" for k in range(images)])
    sample = open_jsonl(tmp_path, record, max_dynamic_patch=limit)[0]
    found = sample.tiling(TILING)
    assert (found.max_dynamic_patch, found.min_dynamic_patch) == (most, min(2, most))
    assert found.use_thumbnail and sample.shown(TILING) == sample


def reference_frames(frames: int, most: int) -> list[int]:
    """Return InternVL's frames by definition: the middle of each of `most` equal intervals."""
    chosen, parts = [], min(frames, most)
    for part in range(parts):
        start, end = frames * part // parts, frames * (part + 1) // parts - 1
        chosen.append(start + (end - start) // 2)
    return chosen


def test_blank_lines_are_passed_over(tmp_path):
    """Prevents a sample made of a blank line, and a wrong line number in an error."""
    lines = "", record_of("a"), " \t", "", record_of("b"), record_of("<image>"), "  "
    annotations = open_jsonl(tmp_path, *lines)
    assert [annotations[k].turns[0].question for k in range(2)] == ["a", "b"]
    assert annotations.number.tolist() == [0, 1, 2]
    with pytest.raises(UserError, match=r"a\.jsonl: sample 3 has 1 <image> for 0"):
        _ = annotations[2]


@pytest.mark.parametrize("chunk", [1, 4, 5, 9])
def test_files_larger_than_a_chunk(tmp_path, monkeypatch, chunk):
    """Prevents an error for files above 16 MiB, or lines cut at a chunk's border."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{1}\n\n {22}\r\n\n{4}\n{55}")
    monkeypatch.setattr(record_files, "_CHUNK_BYTES", chunk)
    found = index_lines(path)
    lines = [
        path.read_bytes()[a : a + b].strip() for a, b in zip(found.start, found.size, strict=True)
    ]
    assert lines == [b"{1}", b"{22}", b"{4}", b"{55}"]


def test_middle_frames():
    """Prevents frames InternVL would not show, or a frame shown twice."""
    for most in (1, 2, 3, 8, 32):
        for frames in [*range(1, 100), 1000, 1001, 54321]:
            chosen = middle_frames(frames, most)
            assert chosen == sorted(set(chosen))
            assert frames > most or chosen == list(range(frames))
            # Floating point reaches a border from below, as NumPy's linspace does.
            wrong = np.abs(np.subtract(chosen, reference_frames(frames, most)))
            assert wrong.max() <= 1 and wrong.mean() <= 0.1
    assert middle_frames(100, 4) == [12, 37, 62, 87]


FRAMES = "Frame-1: <image>\nFrame-2: <image>\nFrame-3: <image>\n"


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("What?", f"{FRAMES}What?"),
        ("<video>\nWhat?", f"{FRAMES}What?"),
        ("<video>\r\nWhat?", f"{FRAMES}What?"),
        ("Look: <video>\n", f"Look: {FRAMES}"),
    ],
)
def test_video_frames(tmp_path, question, shown):
    """Prevents frames in another order or number than the prompt's, or frames cut into tiles."""
    folder = tmp_path / "clip"
    folder.mkdir()
    names = ["frame1.jpg", "frame2.JPG", "frame9.png", "frame10.jpg"]
    for name in (*names[::-1], "notes.txt", "._frame1.jpg"):
        (folder / name).touch()
    [in_file] = open_jsonl(tmp_path, record_of(video="clip/notes.txt"))
    with pytest.raises(UserError, match=r"has the video file .*clip/notes\.txt.* ffmpeg -i"):
        in_file.shown(TILING)
    tiling = TILING.model_copy(update={"max_frames_per_video": 3})
    for video in ("clip", [f"clip/{name}" for name in names]):
        sample = open_jsonl(tmp_path, record_of(question, video=video))[0]
        [of_sample] = sample.videos
        assert [frame.path for frame in of_sample.frames] == [folder / name for name in names]
        assert sample.files == of_sample.frames
        few = sample.shown(tiling)
        chosen = [names[k] for k in reference_frames(4, 3)]
        assert [image.path.name for image in few.images] == chosen
        assert few.turns[0].question == shown
        assert few.shown(tiling) == few and few.files == few.images
        assert few.tiling(tiling).max_dynamic_patch == few.tiling(tiling).min_dynamic_patch == 1
        assert sample.shown(TILING).turns[0].question.count("<image>") == 4


def deny_access(*_):
    raise PermissionError(13, "Permission denied")


def test_files_that_cannot_be_read_make_bad_samples(tmp_path, monkeypatch):
    """Prevents an unreadable folder or line from ending a scan that may skip bad samples."""
    long, folder = "x." * 500, tmp_path / "clip"
    annotations = open_jsonl(tmp_path, record_of(video=long), record_of(video="clip"))
    assert annotations[0].files == (ImageFile(tmp_path / long),)
    folder.mkdir()
    (folder / "1.jpg").touch()
    assert annotations[1].files == (ImageFile(folder / "1.jpg"),)
    with monkeypatch.context() as patched:
        for name in ("iterdir", "is_file"):
            patched.setattr(Path, name, deny_access)
            assert annotations[1].files == (ImageFile(folder),)
        with pytest.raises(UserError, match=r"meta\.json: cannot be read \(Permission denied\)"):
            Annotations.open(tmp_path / "meta.json")
    monkeypatch.setattr(Path, "open", deny_access)
    with pytest.raises(UserError, match=r"a\.jsonl: line 2 cannot be read \(.*denied"):
        _ = annotations[1]


@given(st.lists(st.text(), min_size=1))
def test_natural_order(names):
    """Prevents a crash on names that mix digits and letters, or an unstable order."""
    shuffled = names[::-1]
    assert sorted(names, key=natural_order) == sorted(shuffled, key=natural_order)
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
    index, content = index_array(path), path.read_bytes()
    places = zip(index.start, index.size, strict=True)
    assert [json.loads(content[start : start + size]) for start, size in places] == array
    assert is_array(path) and index.digest == hashlib.sha256(content).digest()


@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_samples_of_an_array(tmp_path, name):
    """Prevents LLaVA's JSON arrays refused, or parsed differently from JSONL."""
    first = record_of("Was ist das? 「[é]」\n<image>", id="x", image="x.png")
    records = [first, record_of("2"), {"conversations": [HUMAN]}]
    lines = open_jsonl(tmp_path, *records, repeat_time=2)
    (tmp_path / name).write_text(json.dumps(records, ensure_ascii=False, indent=1), "utf-8")
    array = open_meta(tmp_path, a={"root": "", "annotation": name, "repeat_time": 2})
    assert array[0].turns == (Turn(first["conversations"][0]["value"], "7", None),)
    assert array[0].identity == "a/x"
    assert len(array) == len(lines) == 6
    for k in (0, 1, 3, 4):
        where = f"{tmp_path / name}: sample {k % 3 + 1}"
        assert array[k] == replace(lines[k], where=where)
    with pytest.raises(UserError, match=rf"{name}: sample 3 has \"conversations\" from user"):
        _ = array[5]


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
    """Prevents training on half of a file, or a syntax error without its position."""
    (tmp_path / "a.json").write_text(content, "utf-8")
    with pytest.raises(UserError, match=message) as error:
        open_meta(tmp_path, a={"root": "", "annotation": "a.json"})
    assert str(error.value).startswith(f"{tmp_path / 'a.json'}: ")


def test_data_root_holds_every_file_below_it(tmp_path):
    """Prevents an untrusted meta file or sample from opening files outside the data root."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside / "frames", outside):
        folder.mkdir(parents=True)
        (folder / "a.png").touch()
        (folder / "a.jsonl").write_text(json.dumps(record_of()))
    (inside / "link").symlink_to(outside)
    (inside / "frames" / "b.png").symlink_to(outside / "a.png")

    def open_data(source: dict, **media) -> Annotations:
        marks = "".join(
            f"<{kind}>\n" * (kind == "video" or len(names)) for kind, names in media.items()
        )
        record = {"conversations": said(marks, "1"), **media}
        (inside / "a.jsonl").write_text(json.dumps(record))
        (inside / "meta.json").write_text(json.dumps({"a": source}))
        return Annotations.open(inside / "meta.json", below=inside)

    kept = open_data(
        {"annotation": "a.jsonl"}, image=["frames/a.png", str(inside / "frames/a.png")]
    )
    assert len(kept[0].images) == 2
    for source in (
        *({"annotation": name} for name in ("../out/a.jsonl", "link/a.jsonl", "s3://b/a.jsonl")),
        *({"shards": name} for name in (str(outside / "{0..3}.tar"), "file:///etc/0.tar")),
        {"energon": "../out"},
    ):
        with pytest.raises(UserError, match="is outside --data-root"):
            open_data(source)
    for media in (
        *({"image": [name]} for name in ("../out/a.png", str(outside / "a.png"), "link/a.png")),
        {"image": ["file:///etc/a.png"]},
        *({"video": name} for name in ("link", "frames", ["link/a.png", "frames/a.png"])),
    ):
        with pytest.raises(UserError, match="is outside --data-root"):
            open_data({"annotation": "a.jsonl"}, **media)[0]

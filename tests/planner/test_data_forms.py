"""Data in the formats of ms-swift, LLaMA-Factory, Qwen-VL and LLaVA, and rows of Parquet."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonl_cases import open_meta, record_of, said, scan, write_jsonl
from shard_cases import SAMPLES, make_samples, write_lines

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import LocalPool
from omnibal.data.annotations import Annotations
from omnibal.data.data_index import DataIndex


def open_records(folder: Path, *records: object, name: str = "data.jsonl") -> Annotations:
    """Return annotations of a bare file with these records."""
    return Annotations.open(write_jsonl(folder / name, *records))


def bare(annotations: Annotations) -> list:
    """Return the samples without identity, source and location."""
    return [replace(sample, where="", identity="", source="") for sample in annotations]


def messages(*said: tuple[str, object]) -> list[dict]:
    """Return messages of (role, content)."""
    return [{"role": role, "content": content} for role, content in said]


def talk(*contents: object, **extra) -> dict:
    """Return alternating user and assistant messages."""
    roles = ("user", "assistant") * len(contents)
    return {"messages": messages(*zip(roles, contents, strict=False)), **extra}


def parts(*given: object) -> list[dict]:
    """Return content parts from texts and (type, fields) items."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], **part[1]}
        for part in given
    ]


def test_one_conversation_in_every_form(tmp_path):
    """Prevents a data format that yields different images or texts."""
    files, texts = ["x.png", "y.png"], ["three", parts("four"), "five"]
    internvl = said("<image>one<image>two", "three", "four", "five")
    with_system = [{"from": "system", "value": "s"}, *internvl]
    by_role = talk("<image>one<image>two", "three", "four", "five")["messages"]
    by_role_with_system = [{"role": "system", "content": "s"}, *by_role]
    openai = parts(
        ("image_url", {"image_url": {"url": "file://%78.png"}}), "one",
        ("image_url", {"image_url": "y.png"}), "two",
    )  # fmt: skip
    qwen = parts(("image", {"image": "x.png"}), "one", ("image", {"path": "y.png"}), "two")
    unnamed = parts(("image", {}), "one", ("image", {"image": None}), "two")
    wrapped = [{"path": "x.png", "bytes": None}, {"path": "y.png"}]
    forms = [
        {"images": files, "conversations": with_system},
        {"images": files, "system": "s", "conversations": internvl},
        {"images": files, "messages": by_role_with_system, "image_url": "https://a/x.png"},
        {"images": wrapped, "messages": by_role_with_system},
        {"image": files, "messages": by_role_with_system, "width": 3, "source": "web"},
        talk(openai, *texts, system="s"),
        talk(qwen, *texts, system="s"),
        talk(unnamed, *texts, system="s", images=files),
    ]
    expected, *others = bare(
        open_records(tmp_path, {"image": files, "conversations": with_system}, *forms)
    )
    assert [image.path for image in expected.images] == [tmp_path / name for name in files]
    turns = [("<image>one<image>two", "three"), ("four", "five")]
    assert [(turn.question, turn.answer) for turn in expected.turns] == turns
    assert others == [expected] * len(forms)


def test_questions_and_answers_under_keys_of_their_own(tmp_path):
    """Prevents a turn lost, or learned although ms-swift, LLaMA-Factory and TRL mask it."""
    texts = ["<image>one", "two", "three\nfour", "five"]
    whole = {**talk(*texts), "images": ["x.png"], "system": "s"}
    prompt, completion = talk(*texts)["messages"][:3], talk(*texts)["messages"][3:]
    history, asked = (
        [texts[:2]],
        dict(zip(("instruction", "input"), ("three", "four"), strict=True)),
    )
    shown = {"images": ["x.png"], "system": "s"}
    named = talk("<img>x.png</img>one", *texts[1:], system="s")
    expected, query, text, alpaca, marked, partly = bare(
        open_records(
            tmp_path,
            whole,
            {"query": texts[2], "response": texts[3], "history": history, **shown},
            {"query": texts[2], "response": texts[3], "history": repr(history), **shown},
            {**asked, "output": texts[3], "history": history, "text": "three four five", **shown},
            named,
            {"prompt": prompt, "completion": completion, **shown},
        )
    )
    assert query == text == alpaca == marked == expected
    assert [turn.learned for turn in partly.turns] == [False, True]
    assert partly.turns[1] == expected.turns[1]
    columns = {"prompt": "p", "query": "q", "response": "r", "images": "files", "system": "how"}
    record = {"p": "three", "q": "<image>four", "r": "five", "files": ["x.png"], "how": "s"}
    for changes in ({}, {"formatting": "alpaca"}):
        described = {"file_name": "lines.json", "columns": columns, **changes}
        write_jsonl(tmp_path / "lines.json", record)
        [sample] = bare(open_meta(tmp_path, a=described))
        assert (sample.system, sample.turns[0].question) == ("s", "three\n<image>four")
    one = {"instruction": "q", "input": "", "output": "a"}
    [sample] = bare(open_records(tmp_path, one, name="lines.json"))
    assert (sample.turns[0].question, sample.turns[0].answer) == ("q", "a")


def test_a_bare_file_is_its_meta(tmp_path):
    """Prevents a file without a meta from being refused, or parsed differently than with a meta."""
    records = [talk("<image>\n1", "2", images=["x.png"]), talk("3", "4")]
    lines = open_records(tmp_path, *records)
    (tmp_path / "data.json").write_text(json.dumps(records))
    whole = open_meta(tmp_path, data={"annotation": "data.jsonl"})
    assert lines.sha256 == whole.sha256
    assert list(lines) == list(whole)
    assert lines[1].identity == "data/2"
    assert lines[1].where == f"{tmp_path / 'data.jsonl'}: line 2"
    open_records(tmp_path, *records, name="lines.json")
    for name in ("data.json", "lines.json"):
        assert bare(Annotations.open(tmp_path / name)) == bare(lines)


def test_loss_flags(tmp_path):
    """Prevents learning an answer that the data excludes from the loss."""
    record = talk("1", "2", "3", "4", "5", "6")
    for place, loss in ((1, False), (3, True)):
        record["messages"][place]["loss"] = loss
    greeting = {"role": "assistant", "content": "a", "loss": False}
    samples = open_records(tmp_path, record, {"messages": [greeting, *record["messages"]]})
    for sample, learned in zip(samples, (True, False), strict=True):
        assert [turn.learned for turn in sample.turns] == [False, True, True]
        assert sample.greeting_learned == learned


CALL = {"name": "add", "arguments": {"a": 1, "b": [2]}}


def test_calls_and_results_in_every_form(tmp_path):
    """Prevents a tool call from being lost, or a tool's response from being learned."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    speakers = ("human", "function_call", "observation", "gpt")
    values = ("1 + 2?", json.dumps([CALL, CALL]), "3", "It is 3.")
    pairs = zip(speakers, values, strict=True)
    sharegpt = [{"from": speaker, "value": value} for speaker, value in pairs]
    asked, told = messages(("user", "1 + 2?"), ("assistant", "It is 3."))
    swift = messages(*[("tool_call", json.dumps(CALL))] * 2, ("tool_response", "3"))
    call = {"type": "function", "id": "1", "function": {**CALL, "arguments": '{"a":1,"b":[2]}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    *forms, more = bare(
        open_records(
            tmp_path,
            {"tools": json.dumps(tools), "conversations": sharegpt},
            {"tools": tools, "messages": [asked, *swift, told]},
            {"tools": tools, "messages": [asked, calling, result, told], "name": "x"},
            {"messages": [asked, calling, result, result, told]},
        )
    )
    assert forms[1:] == forms[:1] * 2
    first, second = forms[0].turns
    assert [json.loads(each) for each in first.calls] == [CALL, CALL]
    assert (first.question, first.answer, first.results) == ("1 + 2?", "", ())
    assert (second.question, second.answer, second.results) == ("", "It is 3.", ("3",))
    assert json.loads(forms[0].tools) == tools
    assert (more.turns[1].results, more.tools) == (("3", "3"), None)


def test_videos_in_every_form(tmp_path):
    """Prevents video frames taken for images, and a video shown at the wrong position."""
    (tmp_path / "v").mkdir()
    frames = [f"v/{number}.jpg" for number in (1, 2, 10)]
    for name in frames:
        (tmp_path / name).touch()
    forms = [
        talk("<video>\nq", "a", video="v"),
        talk("<video>q", "a", videos=["v"]),
        talk("<video>q", "a", videos="v"),
        talk("<video>q", "a", videos=[frames]),
        talk(parts(("video", {"video": frames}), "q"), "a"),
        talk(parts(("video", {"video": "v"}), "q"), "a"),
    ]
    for sample in open_records(tmp_path, *forms):
        [video] = sample.videos
        assert [image.path for image in video.frames] == [tmp_path / name for name in frames]
        assert sample.images == ()
        shown = sample.with_frames(video.frames[:2]).turns[0].question
        assert shown == "Frame-1: <image>\nFrame-2: <image>\nq"
    together = parts("1", ("video", {"video": "y.mp4"}), "2", ("image", {"image": "x"}))
    files = {"images": ["x"], "videos": ["y.mp4", "z.mp4"]}
    forms = [
        talk("1<video>2<image>", "a", "<video>", "b", **files),
        talk(together, "a", parts(("video", {"video": "z.mp4"})), "b"),
    ]
    for sample in open_records(tmp_path, *forms):
        assert [each.path.name for each in sample.files] == ["x", "y.mp4", "z.mp4"]
        shown = [str(each).rpartition("/")[2] for each in sample.shown_in_order]
        assert shown == ["y.mp4", "x", "z.mp4"]
        until = [("<image>", 0), ("<video>", 0), ("<video>", 1)]
        assert [sample.items_until(*each) for each in until] == [1, 1, 2]
    for name in ("video", "videos"):
        [sample] = open_records(tmp_path, talk("<video>\nq", "a", **{name: ["y.mp4"]}))
        assert sample.files == sample.files and sample.videos[0].file.path == tmp_path / "y.mp4"


def test_llama_factorys_description_of_a_dataset(tmp_path):
    """Prevents a renamed column or role from being refused, or confused with another."""
    texts = ["<image>1", "2", "3", "4"]
    speakers = zip(("Q", "A", "observation", "A"), texts, strict=True)
    chat = [{"who": speaker, "what": text} for speaker, text in speakers]
    record = {"chat": chat, "pictures": ["x.png"]}
    entry = {
        "file_name": "data.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "chat", "images": "pictures"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "Q", "assistant_tag": "A"},
    }
    by_role = messages(*zip(("user", "assistant", "tool", "assistant"), texts, strict=True))
    expected = bare(open_records(tmp_path, {"messages": by_role, "images": ["x.png"]}))
    plain = record_of("q", "a")

    def described(*records: object, **changes) -> Annotations:
        open_records(tmp_path, *records)
        (tmp_path / "dataset_info.json").write_text(json.dumps({"demo": entry | changes}))
        return Annotations.open(tmp_path / "dataset_info.json")

    assert bare(described(record)) == expected
    for usual in (plain, talk("q", "a")):
        assert bare(described(usual, columns={}, tags={})) == bare(open_records(tmp_path, plain))
    with pytest.raises(UserError, match=r'line 1 lacks "chat", which is named as its messages'):
        _ = described(plain)[0]
    for changes, message in (
        ({"ranking": True}, "preference data"),
        ({"formatting": None}, "columns: 'messages' must be one of prompt"),
        ({"columns": {"chosen": "c"}}, "demo: columns: 'chosen' must be one of messages"),
        ({"tags": {"user": "c"}}, "demo: tags: 'user' must be one of role_tag"),
    ):
        with pytest.raises(UserError, match=message):
            described(record, **changes)


def with_message(place: int, **changes) -> dict:
    """Return a record of a question and an answer, with changed fields in one message."""
    record = talk("q", "a")
    record["messages"][place] |= changes
    return record


def with_part(kind: str, **extra) -> dict:
    """Return a record with a single part as its question."""
    return talk([{"type": kind, **extra}], "a")


ASKED, ANSWERED = talk("q", "a")["messages"]
BAD = [
    (with_message(0, role="critic"), 'as message 1 "role" "critic"; it must be one of system'),
    (with_message(0, role=7), 'message 1 "role" 7'),
    (with_message(1, weight=2), 'message 2 "weight", which is not understood'),
    (with_message(1, loss="no"), 'message 2 an odd "loss"; it must be true or false'),
    (with_message(1, loss=0.5), 'an odd "loss"; it must be'),
    (with_message(0, loss=True), 'message 1 "loss", which only an assistant'),
    (with_message(0, tool_calls=[CALL]), '"tool_calls", which only an assistant'),
    (with_message(1, tool_calls=[{"name": 1}]), "message 2 an odd tool call"),
    (with_message(1, tool_calls="add(1)"), "an odd tool call"),
    (with_message(1, role="tool_call"), "an odd tool call"),
    (with_message(1, reasoning_content=1), 'an odd "reasoning_content"'),
    (talk([], "a"), 'message 1 an odd "content"'),
    (talk([7], "a"), 'a part of "type" null'),
    (with_part("gif"), 'a part of "type" "gif"'),
    (with_part("text", text=1), 'a part of "type" "text"'),
    (with_part("image", image="x.png", max_pixels=9), "with image, max_pixels; it may have one"),
    (with_part("image", image="x", url="y"), "part of type image with image, url; it may have one"),
    (with_part("image", image="x") | {"images": ["y"]}, 'shows or says in "images" and in "mess'),
    (talk("q", "a", image="x", images=["y"]), 'in "image" and in "images"; give each item in one'),
    (talk("<image>q", "a", images=["http://a/x.png"]), "'http://a/x.png', which is no file"),
    (talk("<image>q", "a", images=["data:image/png;base64,AA"]), "which is no file"),
    (talk("<image>q", "a", images=[{"bytes": "AA"}]), 'in "images" bytes in place of a path'),
    (talk("<image>q", "a", images=[7]), 'odd "images"'),
    (talk("q", "a", images=["x", "y"]), "has 0 <image> for 2 image"),
    (talk("<video>q", "a", videos=["v", "w"]), "has 1 <video> for 2 video"),
    (talk("<video>q", "a", videos=7), 'has an odd "videos"'),
    (talk("<video>q", "a", videos=[[]]), "has an empty list as a video"),
    (with_part("video", video=[]), "has an empty list as a video"),
    (talk("q", "a", imags=["x"]), 'has "imags"; did it mean "images"'),
    (talk("q", "a", image_path="x"), 'has "image_path"; did it mean "image"'),
    (talk("q", "a", img="x.png"), 'has "img"; did it mean "image"'),
    (talk("q", "a", source=["a/b.MP4"]), 'has "source"; did it mean "video"'),
    (talk("q", "a", blob=[{"bytes": 3}]), 'has "blob"; did it mean "image"'),
    (talk("q", "a", note="data:audio/wav;base64,AA"), 'has "note"; did it mean "audio"'),
    (talk("q", "a", url="http://a/b.png"), 'has "url"; did it mean "image"'),
    (talk("<video>q", "a"), "has 1 <video> for 0 video"),
    (talk("<audio>q", "a"), "has 1 <audio> for 0 recording"),
    (talk("q", "<video>"), "has <video> in an answer"),
    (
        talk("q", "a", images=["/9j/" + "4AAQSkZJRgABAQAAAQAB" * 999]),
        "AQAB4AAQSkZJRgABAQAA', which is no file",
    ),
    (talk("q", "a", rejected_response="b"), 'has "rejected_response", which is preference data'),
    (talk("q", "a", label=False), 'has "label", which is preference data'),
    ({"prompt": [], "chosen": [], "rejected": []}, 'has "chosen", which is preference data'),
    ({"query": "q"}, 'has "query" without "response"'),
    ({"query": "q", "prompt": "q", "response": "a"}, 'has "query" and "prompt"; leave one'),
    ({"query": "q", "response": 7}, "what is no text"),
    ({"query": "q", "response": "a", "history": [["q"]]}, 'has an odd "history"'),
    ({"prompt": "q", "completion": "a"}, 'has in "prompt" no list of messages'),
    (talk("q", "a", history=[["q", "a"]]), 'has "history", by which nothing'),
    (talk("q", "<img>x.png</img>"), "has <image> in an answer"),
    (talk("q", "a", objects={"bbox": []}), 'has "objects"'),
    (talk("q", "a", tools="add"), 'has an odd "tools"'),
    (talk("q", "a", system=7), 'has an odd "system"'),
    ({"system": "s", "messages": messages(("system", "t"))}, 'has "system" and a sys'),
    ({"messages": [ASKED, ASKED, ANSWERED]}, 'has "messages" from user, user, assistant; user (h'),
    ({"messages": [ASKED, ANSWERED, *messages(("tool", "3"))]}, "must alternate"),
    (
        {"messages": [ASKED, ANSWERED, {"role": "tool_call", "content": [CALL], "loss": False}]},
        'an answer and a call with unequal "loss"',
    ),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_bad_records_name_file_line_and_key(tmp_path, record, message):
    """Prevents ignoring unknown keys, and an error without file, line and key."""
    annotations = open_records(tmp_path, talk("q", "a"), record)
    with pytest.raises(UserError) as error:
        _ = annotations[1]
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'data.jsonl'}: line 2 ")


def test_a_compressed_file_is_refused(tmp_path):
    """Prevents a compressed file from being reported as malformed JSON."""
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as file:
        file.write(json.dumps(talk("q", "a")))
    with pytest.raises(UserError, match=r"data\.jsonl\.gz: is compressed.*gunzip data.jsonl.gz"):
        Annotations.open(tmp_path / "data.jsonl.gz")


def write_rows(path: Path, records: list[dict], pictures: Path | None) -> None:
    """Write records in small row groups; embed the images if their folder is given."""
    rows = [dict(record) for record in records]
    for row in rows:
        if pictures is not None and "image" in row:
            row["image"] = [
                {"bytes": (pictures / name).read_bytes(), "path": name} for name in row["image"]
            ]
    # Columns of all rows, as the first row may lack some.
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: pa.array([row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), path, row_group_size=5)


def files_of(annotations: Annotations, index: int) -> list[bytes]:
    return [file.open().read() for file in annotations[index].files]


@pytest.fixture(scope="module")
def row_folder(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Return a folder with lines.json and Parquet of its records, images named or embedded."""
    folder = tmp_path_factory.mktemp("rows")
    records, pictures = make_samples(folder), folder / "pictures"
    write_lines(folder, records)
    write_rows(folder / "named.parquet", records, None)
    write_rows(folder / "inside.parquet", records, pictures)
    for number in range(2):
        write_rows(folder / f"train-{number}.parquet", records[number * 12 :][:12], pictures)
    return folder, records


@pytest.mark.parametrize("name", ["named", "inside"])
def test_rows_are_the_samples_of_lines(row_folder, tokenizer, name):
    """Prevents rows of another row group, reordered images, or keys that Arrow adds."""
    folder, _ = row_folder
    lines = Annotations.open(folder / "lines.json")
    rows = open_meta(folder, a={"annotation": f"{name}.parquet", "root": "pictures"})
    assert len(rows) == SAMPLES
    expected = scan(lines, tokenizer).lengths
    for processes in (1, 2):
        found = scan(rows, tokenizer, pool=LocalPool(processes)).lengths
        for column in ("tiles", "tokens", "loss_tokens"):
            assert (found.column(column) == expected.column(column)).all()
    for index in reversed(range(SAMPLES)):  # alternates between row groups
        assert files_of(rows, index) == files_of(lines, index)
        assert rows[index].turns == lines[index].turns


def test_files_of_rows_are_one_source(row_folder):
    """Prevents rows of a second file taken for the first file's, or missing from the hash."""
    folder, records = row_folder
    rows = open_meta(folder, a={"shards": "train-{0..1}.parquet"})
    lines = Annotations.open(folder / "lines.json")
    for index, record in enumerate(records):
        if "video" not in record:
            assert files_of(rows, index) == files_of(lines, index)
            assert rows[index].identity == lines[index].identity
    assert rows.sha256 != open_meta(folder, a={"shards": "train-{0..0}.parquet"}).sha256


def test_an_index_knows_rows(row_folder, tmp_path):
    """Prevents training that reads entire Parquet files to open them, finds other rows, or names a
    present file as missing."""
    meta = row_folder[0] / "meta.json"
    meta.write_text('{"a": {"annotation": "inside.parquet"}}')
    first = Annotations.open(meta, DataIndex.resume(tmp_path / "data.index", LocalPool()))
    again = Annotations.open(meta, DataIndex.open_complete(tmp_path / "data.index"))
    assert again.sha256 == first.sha256
    assert files_of(again, 22) == files_of(first, 22)
    meta.write_text('{"a": {"shards": "train-{0..2}.parquet"}}')
    with pytest.raises(UserError, match=r"train-2\.parquet: cannot be read \(No such file"):
        Annotations.open(meta, DataIndex.open_complete(tmp_path / "data.index"))


def test_one_image_or_recording_of_a_row(tmp_path):
    """Prevents refusing a column of a single file, as in the hub's image datasets."""
    row = record_of("<image><audio>What?", image={"bytes": b"png", "path": None}, audio=[b"wav"])
    pq.write_table(pa.Table.from_pylist([{**row, "width": 3}]), tmp_path / "a.parquet")
    annotations = Annotations.open(tmp_path / "a.parquet")
    assert files_of(annotations, 0) == [b"png", b"wav"]
    assert "a.parquet: row 1, image 1" in str(annotations[0].images[0])


def test_columns_without_a_value_are_none(tmp_path):
    """Prevents refusing messages because of null fields that Arrow adds."""
    said = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    names = ("role", "content", "tool_calls")
    schema = pa.schema({"messages": pa.list_(pa.struct([(n, pa.string()) for n in names]))})
    pq.write_table(pa.Table.from_pylist([{"messages": said}], schema), tmp_path / "a.parquet")
    rows = Annotations.open(tmp_path / "a.parquet")
    lines = Annotations.open(write_jsonl(tmp_path / "a.jsonl", {"messages": said}))
    assert rows[0].turns == lines[0].turns
    assert json.loads(rows.read_stored(0).content) == json.loads(lines.read_stored(0).content)


def test_what_is_wrong_is_said_in_a_line(tmp_path):
    """Prevents a traceback, or samples of a broken file dropped silently."""
    path = tmp_path / "a.parquet"
    with pytest.raises(UserError, match="no such"):
        open_meta(tmp_path, a={"annotation": "a.parquet"})
    path.write_bytes(b"PAR1 is not all")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        Annotations.open(path)
    pq.write_table(pa.table({"conversations": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="has no row"):
        Annotations.open(path)
    pq.write_table(pa.Table.from_pylist([{"mask": b"png", **record_of()}]), path)
    with pytest.raises(UserError, match='row 1 has "mask"; did it mean "image"'):
        Annotations.open(path)[0]
    mixed = [{"bytes": b"png", "path": None}, {"bytes": None, "path": "b.png"}]
    pq.write_table(pa.Table.from_pylist([{"images": mixed, **record_of()}]), path)
    with pytest.raises(UserError, match="row 1 has some of its files inside"):
        Annotations.open(path)[0]


def test_rows_with_images_inside_are_not_exported(row_folder):
    """Prevents exporting annotations that name embedded images."""
    folder, records = row_folder
    inside = open_meta(folder, a={"annotation": "inside.parquet"})
    with pytest.raises(UserError, match="row 2 has media inside"):
        inside.read_stored(1)
    assert json.loads(inside.read_stored(0).content)["id"] == records[0]["id"]
    named = open_meta(folder, a={"annotation": "named.parquet", "root": "pictures"})
    assert json.loads(named.read_stored(1).content)["image"] == records[1]["image"]

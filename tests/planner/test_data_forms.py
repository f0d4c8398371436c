"""Data as ms-swift, LLaMA-Factory, Qwen-VL and LLaVA write it: what is read, what is refused."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def opened(folder: Path, *records: object, name: str = "data.jsonl") -> Annotations:
    """Annotations of one bare file of these records."""
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return Annotations.open(folder / name)


def said(annotations: Annotations) -> list:
    return [replace(sample, where="", identity="", source="") for sample in annotations]


def talk(*contents: object, **extra) -> dict:
    """Messages of a user and an assistant in turn."""
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return {"messages": messages, **extra}


def parts(*given: object) -> list[dict]:
    """Texts, and items as (type, fields)."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], **part[1]}
        for part in given
    ]


def test_one_conversation_in_every_form(tmp_path):
    """Prevents a form of data that shows another image, or says another thing, than the others."""
    internvl = {
        "image": ["x.png", "y.png"],
        "conversations": [
            {"from": "system", "value": "s"},
            {"from": "human", "value": "<image>one<image>two"},
            {"from": "gpt", "value": "three"},
            {"from": "human", "value": "four"},
            {"from": "gpt", "value": "five"},
        ],
    }
    said_by_role = talk("<image>one<image>two", "three", "four", "five")["messages"]
    system = {"role": "system", "content": "s"}
    openai = parts(
        ("image_url", {"image_url": {"url": "file://%78.png"}}), "one",
        ("image_url", {"image_url": "y.png"}), "two",
    )  # fmt: skip
    qwen = parts(("image", {"image": "x.png"}), "one", ("image", {"path": "y.png"}), "two")
    unnamed = parts(("image", {}), "one", ("image", {"image": None}), "two")
    wrapped = [{"path": "x.png", "bytes": None}, {"path": "y.png"}]
    files = ["x.png", "y.png"]
    texts = ["three", parts("four"), "five"]
    forms = [
        {"images": files, "conversations": internvl["conversations"]},
        {"images": files, "system": "s", "conversations": internvl["conversations"][1:]},
        {"images": files, "messages": [system, *said_by_role]},
        {"images": wrapped, "messages": [system, *said_by_role]},
        {"image": files, "messages": [system, *said_by_role], "width": 3, "source": "web"},
        talk(openai, *texts, system="s"),
        talk(qwen, *texts, system="s"),
        talk(unnamed, *texts, system="s", images=files),
    ]
    expected, *others = said(opened(tmp_path, internvl, *forms))
    assert [image.path for image in expected.images] == [tmp_path / name for name in files]
    assert [(t.question, t.answer) for t in expected.turns] == [
        ("<image>one<image>two", "three"), ("four", "five"),
    ]  # fmt: skip
    assert others == [expected] * len(forms)


def test_a_bare_file_is_its_meta(tmp_path):
    """Prevents a file without a meta from being refused, or read otherwise than with one."""
    records = [talk("<image>\n1", "2", images=["x.png"]), talk("3", "4")]
    lines = opened(tmp_path, *records)
    (tmp_path / "data.json").write_text(json.dumps(records))
    opened(tmp_path, *records, name="lines.json")
    (tmp_path / "meta.json").write_text('{"data": {"annotation": "data.jsonl"}}')
    whole = Annotations.open(tmp_path / "meta.json")
    assert lines.sha256 == whole.sha256
    assert list(lines) == list(whole)
    assert lines[1].identity == "data/2"
    assert lines[1].where == f"{tmp_path / 'data.jsonl'}: line 2"
    for name in ("data.json", "lines.json"):
        assert said(Annotations.open(tmp_path / name)) == said(lines)


def test_loss_flags(tmp_path):
    """Prevents an answer that the data says not to learn from being learned."""
    record = talk("1", "2", "3", "4", "5", "6")
    for place, loss in ((1, False), (3, True)):
        record["messages"][place]["loss"] = loss
    greeting = {"messages": [{**ANSWERED, "loss": False}, *record["messages"]]}
    first, second = opened(tmp_path, record, greeting)
    assert [turn.learned for turn in first.turns] == [False, True, True]
    assert [turn.learned for turn in second.turns] == [False, True, True]
    assert (first.greeting_learned, second.greeting_learned) == (True, False)


CALL = {"name": "add", "arguments": {"a": 1, "b": [2]}}


def test_calls_and_results_in_every_form(tmp_path):
    """Prevents a call from being lost, or what a tool answered from being learned."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    sharegpt = {
        "tools": json.dumps(tools),
        "conversations": [
            {"from": "human", "value": "1 + 2?"},
            {"from": "function_call", "value": json.dumps([CALL, CALL])},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "It is 3."},
        ],
    }
    end = {"role": "assistant", "content": "It is 3."}
    swift = {
        "tools": tools,
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "tool_call", "content": json.dumps(CALL)},
            {"role": "tool_call", "content": json.dumps(CALL)},
            {"role": "tool_response", "content": "3"},
            end,
        ],
    }
    call = {"type": "function", "id": "1", "function": {**CALL, "arguments": '{"a":1,"b":[2]}'}}
    openai = {
        "tools": tools,
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            end,
        ],
    }
    several = {"messages": [*openai["messages"][:3], openai["messages"][2], end]}
    *forms, more = said(opened(tmp_path, sharegpt, swift, {**openai, "name": "x"}, several))
    assert forms[1:] == forms[:1] * 2
    asked, told = forms[0].turns
    assert [json.loads(each) for each in asked.calls] == [CALL, CALL]
    assert (asked.question, asked.answer, asked.results) == ("1 + 2?", "", ())
    assert (told.question, told.answer, told.results) == ("", "It is 3.", ("3",))
    assert json.loads(forms[0].tools) == tools
    assert (more.turns[1].results, more.tools) == (("3", "3"), None)


def test_videos_in_every_form(tmp_path):
    """Prevents a video whose frames are taken for images, or that is shown without its place."""
    (tmp_path / "v").mkdir()
    for number in (1, 2, 10):
        (tmp_path / f"v/{number}.jpg").touch()
    frames = [f"v/{number}.jpg" for number in (1, 2, 10)]
    forms = [
        talk("<video>q", "a", videos=["v"]),
        talk("<video>q", "a", videos="v"),
        talk("<video>q", "a", videos=[frames]),
        talk(parts(("video", {"video": frames}), "q"), "a"),
        talk(parts(("video", {"video": "v"}), "q"), "a"),
    ]
    meant, *others = said(opened(tmp_path, talk("<video>\nq", "a", video="v"), *forms))
    assert [image.path for image in meant.videos[0].frames] == [tmp_path / n for n in frames]
    shown = meant.with_frames(meant.videos[0].frames[:2]).turns[0].question
    assert shown == "Frame-1: <image>\nFrame-2: <image>\nq"
    for other in others:
        assert (other.videos, other.images) == (meant.videos, ())
        assert other.with_frames(other.videos[0].frames[:2]).turns[0].question == shown
    in_files = talk(
        "1<video>2<image>", "a", "<video>", "b", images=["x"], videos=["y.mp4", "z.mp4"]
    )
    together = parts("1", ("video", {"video": "y.mp4"}), "2", ("image", {"image": "x"}))
    forms = [in_files, talk(together, "a", parts(("video", {"video": "z.mp4"})), "b")]
    for sample in opened(tmp_path, *forms):
        assert [each.path.name for each in sample.files] == ["x", "y.mp4", "z.mp4"]
        assert [str(each).rpartition("/")[2] for each in sample.shown_in_order] == [
            "y.mp4", "x", "z.mp4",
        ]  # fmt: skip
        until = [("<image>", 0), ("<video>", 0), ("<video>", 1)]
        assert [sample.items_until(*each) for each in until] == [1, 1, 2]
    for name in ("video", "videos"):
        [sample] = opened(tmp_path, talk("<video>\nq", "a", **{name: ["y.mp4"]}))
        assert sample.files == sample.files and sample.videos[0].file.path == tmp_path / "y.mp4"


def test_llama_factorys_description_of_a_dataset(tmp_path):
    """Prevents a renamed column or role from being refused, or taken for another."""
    record = {
        "chat": [
            {"who": "Q", "what": "<image>1"}, {"who": "A", "what": "2"},
            {"who": "observation", "what": "3"}, {"who": "A", "what": "4"},
        ],
        "pictures": ["x.png"],
    }  # fmt: skip
    entry = {
        "file_name": "data.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "chat", "images": "pictures"},
        "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "Q", "assistant_tag": "A"},
    }
    roles = ("user", "assistant", "tool", "assistant")
    messages = [
        {"role": role, "content": message["what"]}
        for role, message in zip(roles, record["chat"], strict=True)
    ]
    expected = said(opened(tmp_path, {"messages": messages, "images": ["x.png"]}))
    plain = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}

    def described(*records: object, **changes) -> Annotations:
        opened(tmp_path, *records)
        (tmp_path / "dataset_info.json").write_text(json.dumps({"demo": entry | changes}))
        return Annotations.open(tmp_path / "dataset_info.json")

    assert said(described(record)) == expected
    for usual in (plain, talk("q", "a")):
        assert said(described(usual, columns={}, tags={})) == said(opened(tmp_path, plain))
    with pytest.raises(UserError, match=r'line 1 lacks "chat", which is named as its messages'):
        _ = described(plain)[0]
    for changes, message in (
        ({"formatting": None}, "takes a source for Alpaca's form"),
        ({"columns": {"chosen": "c"}}, "demo: columns: has 'chosen'; it must be one of messages"),
        ({"tags": {"user": "c"}}, "demo: tags: has 'user'; it must be one of role_tag"),
    ):
        with pytest.raises(UserError, match=message):
            described(record, **changes)


def with_message(place: int, **changes) -> dict:
    """A record of one question and answer, a message of which has other fields."""
    messages = [dict(ASKED), dict(ANSWERED)]
    messages[place] |= changes
    return {"messages": messages}


BAD = [
    (with_message(0, role="critic"), 'as message 1 "role" "critic"; it must be one of system'),
    (with_message(0, role=7), 'message 1 "role" 7'),
    (with_message(1, weight=2), 'message 2 "weight", which is not understood'),
    (with_message(1, loss="no"), 'message 2 a "loss" of "no"; it must be true or false'),
    (with_message(1, loss=0.5), 'a "loss" of 0.5'),
    (with_message(0, loss=True), 'message 1 "loss", which only an assistant'),
    (with_message(0, tool_calls=[CALL]), '"tool_calls", which only an assistant'),
    (with_message(1, tool_calls=[{"name": 1}]), "message 2 an odd call of a tool"),
    (with_message(1, tool_calls="add(1)"), "an odd call of a tool"),
    (with_message(1, role="tool_call"), "an odd call of a tool"),
    (with_message(1, reasoning_content=1), 'an odd "reasoning_content"'),
    (with_message(0, content=[]), 'message 1 an odd "content"'),
    (with_message(0, content=[7]), 'a part of "type" null'),
    (with_message(0, content=[{"type": "gif"}]), 'a part of "type" "gif"'),
    (with_message(0, content=[{"type": "text", "text": 1}]), 'a part of "type" "text"'),
    (
        with_message(0, content=parts(("image", {"image": "x.png", "max_pixels": 9}))),
        'part of type image with "max_pixels", which is not understood',
    ),
    (
        with_message(0, content=parts(("image", {"image": "x", "url": "y"}))),
        "part of type image with image, url; give one of them",
    ),
    (
        {**with_message(0, content=parts(("image", {"image": "x"}))), "images": ["y"]},
        'names what it shows or says in "images" and in "messages"',
    ),
    (talk("q", "a", image="x", images=["y"]), 'in "image" and in "images"; give each item in one'),
    (talk("<image>q", "a", images=["http://a/x.png"]), "'http://a/x.png', which is no file"),
    (talk("<image>q", "a", images=["data:image/png;base64,AA"]), "which is no file"),
    (talk("<image>q", "a", images=[{"bytes": "AA"}]), 'in "images" an item with bytes'),
    (talk("<image>q", "a", images=[7]), 'odd "images"'),
    (talk("q", "a", images=["x", "y"]), "has 0 <image> for 2 image"),
    (talk("<video>q", "a", videos=["v", "w"]), "has 1 <video> for 2 video"),
    (talk("<video>q", "a", videos=7), 'has an odd "videos"'),
    (talk("<video>q", "a", videos=[[]]), "has a video that is an empty list"),
    (
        with_message(0, content=parts(("video", {"video": []}))),
        "has a video that is an empty list",
    ),
    (talk("q", "a", imags=["x"]), 'has "imags"; did it mean "images"'),
    (talk("q", "a", rejected_response="b"), 'has "rejected_response", by which nothing is trained'),
    (talk("q", "a", label=False), 'has "label", by which nothing is trained'),
    (talk("q", "a", objects={"bbox": []}), 'has "objects"'),
    (talk("q", "a", tools="add"), 'has an odd "tools"'),
    (talk("q", "a", system=7), 'has an odd "system"'),
    ({"system": "s", "messages": [{"role": "system", "content": "t"}]}, 'has "system" and a sys'),
    ({"instruction": "q", "output": "a"}, "Alpaca's form is not read"),
    ({"messages": [ASKED, ASKED, ANSWERED]}, 'has "messages" from user, user, assistant; user and'),
    ({"messages": [ASKED, ANSWERED, {"role": "tool", "content": "3"}]}, "must alternate"),
    (
        {"messages": [ASKED, ANSWERED, {"role": "tool_call", "content": [CALL], "loss": False}]},
        'an answer and its call with different "loss"',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("record", "message"), BAD)
def test_bad_records_name_file_line_and_key(tmp_path, record, message):
    """Prevents what is not understood from being passed over, or told of without its place."""
    annotations = opened(tmp_path, talk("q", "a"), record)
    with pytest.raises(UserError) as error:
        _ = annotations[1]
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'data.jsonl'}: line 2 ")


def test_a_compressed_file_is_refused(tmp_path):
    """Prevents the bytes of a compressed file from being called malformed JSON."""
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as file:
        file.write(json.dumps(talk("q", "a")))
    with pytest.raises(UserError, match=r"data\.jsonl\.gz: is compressed.*gunzip data.jsonl.gz"):
        Annotations.open(tmp_path / "data.jsonl.gz")

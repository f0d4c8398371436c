"""Tar shards: the samples that webdataset and Energon read, equal to samples from files."""

import io
import json
import sqlite3
import struct
import subprocess
import sys
import tarfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from jsonl_cases import DIGITS, open_meta, picture, record_of, scan
from shard_cases import SAMPLES, TURNS, make_samples, write_lines, write_shards

from omnibal.base.errors import UserError
from omnibal.base.worker_pool import LocalPool
from omnibal.data.annotations import Annotations
from omnibal.data.tar_shards import Shard, energon_indexes, index_shard

webdataset = pytest.importorskip("webdataset")
COLUMNS = ("tiles", "tokens", "loss_tokens")
JSON_TURNS = json.dumps({"conversations": TURNS})


def open_shards(folder: Path, notation: str = "train-{000..002}.tar", **meta) -> Annotations:
    return open_meta(folder, a={"shards": notation, **meta})


@pytest.fixture(scope="module")
def tar_data(tmp_path_factory) -> tuple[Path, list[dict]]:
    """Return a read-only folder with lines.json and three shards, and their records."""
    folder = tmp_path_factory.mktemp("shards")
    records = make_samples(folder)
    write_lines(folder, records)
    assert len(write_shards(folder, records)) == 3
    return folder, records


def write_tar(path: Path, members: dict[str, bytes], tar_format: int = tarfile.PAX_FORMAT) -> None:
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(content), 1.5
            tar.addfile(entry, io.BytesIO(content))


def image_bytes(sample) -> list[bytes]:
    return [image.open().read() for image in sample.files]


def read_by_webdataset(notation: str) -> list[dict]:
    return list(webdataset.WebDataset(notation, shardshuffle=False, empty_check=False))


def members_of(sample: dict) -> dict[str, bytes]:
    """Return suffix and content of a library's sample."""
    return {name: content for name, content in sample.items() if not name.startswith("__")}


def test_the_same_samples_as_webdataset_reads(tar_data):
    """Prevents a sample or image that is lost, truncated, moved or swapped."""
    folder, _ = tar_data
    annotations = open_shards(folder)
    found = read_by_webdataset(str(folder / "train-{000..002}.tar"))
    assert len(annotations) == len(found) == SAMPLES
    for sample, expected in zip(annotations, found, strict=True):
        assert sample.identity == f"a/{int(expected['__key__'])}"
        members = members_of(expected)
        record = json.loads(members.pop("json"))
        assert sample.turns[0].answer == record["conversations"][1]["value"]
        assert sorted(image_bytes(sample)) == sorted(members.values())
        for image in sample.files:
            assert str(image) == f"{expected['__url__']}: {image.name}"


@pytest.mark.parametrize(
    "tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_odd_members_go_where_webdataset_puts_them(tmp_path, tar_format):
    """Prevents members outside samples from shifting the samples."""
    long = "d" * 90 + "/" + "n" * 95
    members = {
        "README": b"no key",
        "a/1.json": JSON_TURNS.encode(),
        "a/notes": b"in between",
        "__meta__/x.json": b"skipped",
        "._1.png": b"a Mac's",
        "a/1.PNG": picture(),
        "a/__thumbs__.jpg": b"of a key of its own",
        f"{long}.json": JSON_TURNS.encode(),
        f"{long}.jpg": picture(kind="jpeg"),
        "b.v/2.tar.json": b"not the record",
        "b.v/2.json": JSON_TURNS.encode(),
        "b.v/2.2.png": picture(3),
        "b.v/2.10.png": picture(4),
        "__end__": b"",
    }
    write_tar(tmp_path / "a.tar", members, tar_format)
    annotations = open_shards(tmp_path, "a.tar")
    found, good = read_by_webdataset(str(tmp_path / "a.tar")), []
    assert len(annotations) == len(found)
    for index, expected in enumerate(found):
        if "json" not in expected:
            with pytest.raises(UserError, match=rf"sample {index + 1} has no .*\.json, its conv"):
                _ = annotations[index]
            continue
        names = [name for name in expected if name.rpartition(".")[2] in ("png", "jpg")]
        contents = [expected[name] for name in sorted(names, key=len)]
        record = json.loads(expected["json"])
        record["conversations"][0]["value"] = "<image>" * len(names)
        members[f"{expected['__key__']}.json"] = json.dumps(record).encode()
        good.append((index, contents))
    write_tar(tmp_path / "a.tar", members, tar_format)
    annotations = open_shards(tmp_path, "a.tar")
    assert [image_bytes(annotations[index]) for index, _ in good] == [each for _, each in good]
    assert [len(contents) for _, contents in good] == [1, 1, 2]


def test_files_and_shards_are_scanned_alike(tar_data, tokenizer):
    """Prevents lengths that depend on how samples are stored."""
    folder, _ = tar_data
    files, shards = Annotations.open(folder / "lines.json"), open_shards(folder)
    expected = scan(files, tokenizer).lengths
    for processes in (1, 2):
        found = scan(shards, tokenizer, pool=LocalPool(processes)).lengths
        for name in COLUMNS:
            assert found.column(name).tolist() == expected.column(name).tolist()
        assert found.source.tolist() == expected.source.tolist()
    assert expected.column("tiles").max() > 8
    for index in range(SAMPLES):
        file, shard = files[index], shards[index]
        assert image_bytes(file) == image_bytes(shard)
        nothing = {"images": (), "videos": (), "where": ""}
        assert replace(file, **nothing) == replace(shard, **nothing)


def test_hash_follows_what_is_in_the_shards(tmp_path):
    """Prevents training on changed data under an old plan, and rejection after a mere move."""

    def sha256(*shards: dict[str, bytes]) -> str:
        for number, members in enumerate(shards):
            write_tar(tmp_path / f"{number}.tar", members)
        return open_shards(tmp_path, f"{{0..{len(shards) - 1}}}.tar").sha256

    one = {"1.json": b"{}", "1.png": picture()}
    two = {"2.json": b"{}", "2.png": picture(kind="jpeg")}
    reference = sha256(one | two)
    assert sha256(one, two) == reference
    changed = [
        one | two | {"1.json": b"[]"},
        one | two | {"2.png": picture(21, kind="jpeg") + b" "},
        {"1.json": b"{}", "1.jpg": one["1.png"]} | two,
        two | one,
        one,
    ]
    assert len({reference, *map(sha256, changed)}) == 1 + len(changed)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, ["0.png", "1.png"]),
        ({"image": ["1.png", "0.png"]}, ["1.png", "0.png"]),
        ({"image": "f/x.1.png"}, ["1.png"]),
        ({"image": "x.0.png"}, ["0.png"]),
        ({"image": []}, []),
        ({"image": None}, ["0.png", "1.png"]),
        ({"video": ["0.png", "1.png"]}, ["0.png", "1.png"]),
        ({"image": "2.png"}, "names '2.png', but the members of its key are f/x.json, f/x.0.png"),
        ({"video": "f"}, "it must be a member with a video, or a list of frames"),
        ({"video": "x.mp4"}, "names 'x.mp4', but the members of its key are f/x.json, f/x.0.png"),
    ],
)
def test_names_in_a_record(tmp_path, record, expected):
    """Prevents the wrong image, or all images although the record names some."""
    count = len(expected) if isinstance(expected, list) and "video" not in record else 0
    members = {"f/x.json": json.dumps(record_of("<image>" * count, **record)).encode()}
    write_tar(tmp_path / "a.tar", members | {"f/x.0.png": picture(), "f/x.1.png": picture(9)})
    annotations = open_shards(tmp_path, "a.tar")
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected) as error:
            _ = annotations[0]
        assert str(error.value).startswith(f"{tmp_path / 'a.tar'}: sample 1 ")
    else:
        assert annotations[0].identity == "a/f/x"
        assert [image.name.partition(".")[2] for image in annotations[0].files] == expected


def test_bad_samples_are_skipped_like_others(tmp_path, tokenizer):
    """Prevents one broken member from ending a scan with --on-error skip, or being accepted."""
    shard, record = tmp_path / "a.tar", json.dumps(record_of("<image>")).encode()
    whole, members = picture(64, 64), {}
    for number, content in enumerate([whole, whole[:-9], b"", b"no picture", whole]):
        members |= {f"{number}.json": record, f"{number}.png": content}
    write_tar(shard, members | {"5.json": b"{", "6.png": whole, "7.json": record})
    result = scan(open_shards(tmp_path, "a.tar"), tokenizer, on_error="skip")
    assert result.lengths.sample.tolist() == [0, 4]
    reasons = [
        f"image {shard}: 1.png cannot be read (is truncated)",
        f"image {shard}: 2.png cannot be read (no known image format)",
        f"image {shard}: 3.png cannot be read (no known image format)",
        "is not JSON",
        "has no 6.json",
        "has 1 <image> for 0 image(s)",
    ]
    for skipped, expected in zip(result.skipped, reasons, strict=True):
        assert skipped.reason.startswith(expected) and skipped.where in skipped.message


def test_a_video_that_no_record_names_is_shown(tmp_path):
    """Prevents learning a question about a video without its frames."""
    members = {"1.json": JSON_TURNS.encode(), "1.MP4": b"abc", "1.txt": b""}
    write_tar(tmp_path / "a.tar", members)
    [sample] = open_shards(tmp_path, "a.tar")
    assert image_bytes(sample) == [b"abc"] and len(sample.videos) == 1
    assert sample.turns[0].question.startswith("<video>\n")
    with pytest.raises(UserError, match=r"sample 1 has the video file 1\.MP4, .* takes frames"):
        sample.shown(DIGITS.tiling)
    named = json.dumps({"conversations": TURNS, "video": ["1.0.png"]}).encode()
    write_tar(tmp_path / "a.tar", members | {"1.json": named, "1.0.png": picture()})
    assert len(open_shards(tmp_path, "a.tar")[0].files) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:2000],
        lambda content: content.rstrip(b"\0") + bytes(-len(content.rstrip(b"\0")) % 512),
        lambda content: content[:1024] + b"x" * 512 + content[1536:],
        lambda content: b"",
        lambda content: content * 2,
    ],
    ids=["truncated", "without its end", "damaged", "empty", "two by cat"],
)
def test_damaged_shards(tmp_path, damage):
    """Prevents silently dropping the rest of a truncated shard."""
    members = {f"{k}.json": JSON_TURNS.encode() for k in range(4)}
    write_tar(tmp_path / "a.tar", members, tarfile.USTAR_FORMAT)
    assert len(open_shards(tmp_path, "a.tar")) == 4
    (tmp_path / "a.tar").write_bytes(damage((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(UserError, match="cannot be read as a shard") as error:
        open_shards(tmp_path, "a.tar")
    assert str(error.value).startswith(f"{tmp_path / 'a.tar'}: ")


@pytest.mark.parametrize(
    ("members", "notation", "message"),
    [
        ("1.json 1.b.png 1.B.png", "a.tar", r"a\.tar: .*duplicate file name"),
        ("1.json 2.json 1.png 2.png", "a.tar", r"a\.tar: .*files of 1 are apart"),
        ("", "train-{001..002}.tar", r"train-001\.tar: no such shard"),
        ("", "nowhere://a/train.tar", r"nowhere://a/train.tar: cannot be read \(Protocol not"),
        ("", "train-{001..002.tar", "cannot be expanded"),
        ("", "a-{0..99}{0..99}{0..99}{0..99}", "100,000,000 names"),
        ("", "{a..z}" * 9 + "{b,c{0..9}}.tar", "names"),
    ],
)
def test_mistakes_about_shards(tmp_path, members, notation, message):
    """Prevents a traceback for a wrong path or kind of file."""
    write_tar(tmp_path / "a.tar", dict.fromkeys(members.split(), b""))
    with pytest.raises(UserError, match=message):
        open_shards(tmp_path, notation)


def test_a_shard_is_what_the_meta_says(tmp_path):
    """Prevents a traceback for a compressed, shortened or removed shard."""
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("1.json"))
    with pytest.raises(UserError, match="plain tar"):
        open_shards(tmp_path, "a.tar.gz")
    write_tar(tmp_path / "a.tar", {"1.json": JSON_TURNS.encode()})
    with pytest.raises(UserError, match=r"holds 1 samples, but .* states length 3"):
        open_shards(tmp_path, "a.tar", length=3)
    annotations = open_shards(tmp_path, "a.tar")
    (tmp_path / "a.tar").unlink()
    with pytest.raises(UserError, match=r"a\.tar: cannot be read at byte 0"):
        _ = annotations[0]


WITHOUT_LIBRARIES = """
import pickle, sys
sys.modules["torch"] = sys.modules["megatron"] = sys.modules["webdataset"] = None
from pathlib import Path
from omnibal.base.errors import UserError
from omnibal.data.annotations import Annotations
energon, shards, pickled = map(Path, sys.argv[1:])
for meta in (shards, energon):
    try:
        Annotations.open(meta)
    except UserError as error:
        print(error)
del sys.modules["webdataset"]
annotations = Annotations.open(shards)
pickled.write_bytes(pickle.dumps(annotations.take(annotations.source + 3)))
"""
IN_A_WORKER = """
import pickle, sys
from pathlib import Path
annotations = pickle.loads(Path(sys.argv[1]).read_bytes())
annotations[0].files[0].open().read()
assert not {"torch", "webdataset"} & set(sys.modules)
"""


def test_shards_need_no_torch_and_a_missing_library_is_named(tar_data, tmp_path):
    """Prevents a planner or worker that needs torch, and a traceback if a library is missing."""
    open_shards(tar_data[0])
    (tmp_path / "energon.json").write_text('{"a": {"energon": "x"}}')
    files, pickled = (tmp_path / "energon.json", tar_data[0] / "meta.json"), tmp_path / "pickled"
    for program, *arguments in ((WITHOUT_LIBRARIES, *files, pickled), (IN_A_WORKER, pickled)):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        root = Path(__file__).parents[2]
        output = subprocess.run(command, check=True, cwd=root, stdout=subprocess.PIPE, text=True)
        said = output.stdout.splitlines()
        if program is WITHOUT_LIBRARIES:
            assert '"omnibal[webdataset]"' in said[0] and '"omnibal[energon]"' in said[1]


def test_the_same_samples_as_energon_reads(tar_data, tmp_path):
    """Prevents a split, order or exclusion that differs from Energon's."""
    pytest.importorskip("megatron.energon")
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
    from megatron.energon.flavors.webdataset.metadata import WebdatasetMeta
    from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator

    (tmp_path / "pictures").symlink_to(tar_data[0] / "pictures")
    names = [path.name for path in write_shards(tmp_path, tar_data[1], per_shard=4)]
    WebdatasetPreparator.prepare_dataset(
        tmp_path, names, split_parts_ratio=[("train", 0.7), ("val", 0.3)], workers=1
    )
    split, path, seen = tmp_path / ".nv-meta/split.yaml", EPath(tmp_path), set()
    meta = WebdatasetMeta.from_config(path, split_part="train")
    excluded = f"{meta.shards[0].name}/{4 * int(meta.shards[0].name[6:9]) + 1:04}"
    text = split.read_text()
    split.write_text(f"{text[: text.index('exclude')]}exclude: [{excluded}]\n")
    for part in ("train", "val"):
        annotations = open_meta(tmp_path, a={"energon": str(tmp_path), "split": part})
        meta = WebdatasetMeta.from_config(path, split_part=part)
        reader = ShardInfosITarReader(path, meta.shards, sample_filter=lambda key: key != excluded)
        expected = [sample for k in range(len(reader)) if (sample := reader[k]) is not None]
        assert len(annotations) == len(expected) > 3
        for sample, other in zip(annotations, expected, strict=True):
            assert sample.identity == f"a/{int(other['__key__'])}"
            images = [part for name, part in members_of(other).items() if name != "json"]
            assert sorted(image_bytes(sample)) == sorted(images)
            seen.add(sample.identity)
    assert len(seen) == SAMPLES - 1
    with pytest.raises(UserError, match="Energon finds no split 'test'"):
        open_meta(tmp_path, a={"energon": ".", "split": "test"})
    with pytest.raises(UserError, match="prepare the dataset with `energon prepare`"):
        open_meta(tmp_path, a={"energon": "pictures"})


def write_energon_index(folder: Path, names: list[str]) -> None:
    """Write the parts of `energon prepare` 7.4.1's index that are read, in its tables and order."""
    (folder / ".nv-meta").mkdir()
    counts, samples, parts = {}, [], []
    for number, name in enumerate(names):
        starts: dict[str, int] = {}
        with tarfile.open(folder / name) as tar:
            for entry in tar:
                key, _, part = entry.name.partition(".")
                starts.setdefault(key, entry.offset)
                parts.append((number, len(starts) - 1, part, entry.offset_data, entry.size))
            offsets = [*starts.values(), tar.offset]
        counts[name] = len(starts)
        for index, (key, (start, end)) in enumerate(zip(starts, pairwise(offsets), strict=True)):
            samples.append((number, key, index, start, end - start))
        packed = struct.pack(f"<{len(offsets)}Q", *offsets)
        (folder / name).with_suffix(".tar.idx").write_bytes(packed)
    (folder / ".nv-meta/.info.json").write_text(json.dumps({"shard_counts": counts}))
    tables = {
        "samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)": samples,
        "sample_parts (tar_file_id, sample_index, part_name, content_byte_offset, "
        "content_byte_size)": parts,
    }
    with sqlite3.connect(folder / ".nv-meta/index.sqlite") as database:
        for table, rows in tables.items():
            database.execute(f"CREATE TABLE {table}")
            database.executemany(f"INSERT INTO {table} VALUES (?, ?, ?, ?, ?)", rows)


@pytest.fixture
def shard_list(tar_data, tmp_path) -> list[Shard]:
    """Return the shards with an Energon index that lists the last shard first."""
    names = [path.name for path in sorted(tar_data[0].glob("*.tar"))]
    for name in names:
        (tmp_path / name).write_bytes((tar_data[0] / name).read_bytes())
    write_energon_index(tmp_path, [names[-1], *names[:-1]])
    indexes = zip(names, energon_indexes(tmp_path, names), strict=True)
    return [Shard(tmp_path / name, listed=index) for name, index in indexes]


def test_energons_index_is_as_good_as_the_shard(shard_list):
    """Prevents samples or a data hash that differ from the shard's own."""
    for shard in shard_list:
        assert shard.listed is not None
        found, expected = index_shard(shard), index_shard(replace(shard, listed=None))
        assert found.digest == expected.digest
        assert found.start.tolist() == expected.start.tolist()
        assert found.size.tolist() == expected.size.tolist()
    folder, names = shard_list[0].path.parent, [shard.path.name for shard in shard_list]
    (folder / "train-001.tar.idx").unlink()
    assert [each is not None for each in energon_indexes(folder, names)] == [True, False, True]
    with sqlite3.connect(folder / ".nv-meta/index.sqlite") as database:
        database.execute("DROP TABLE sample_parts")  # missing in earlier versions
    assert energon_indexes(folder, names) == [None] * 3


def test_a_stale_index_of_energons_is_refused(shard_list):
    """Prevents offsets from a stale index, even if the shard has equal length and samples."""
    first, second, third = (shard.path for shard in shard_list)
    content = bytearray(first.read_bytes())
    with tarfile.open(first) as tar:
        records = [entry for entry in tar if entry.name.endswith(".json")]
    # One byte less in a middle record.
    header, records[4].size = records[4].offset_data - 512, records[4].size - 1
    content[header : header + 512] = records[4].tobuf(tarfile.USTAR_FORMAT)
    first.write_bytes(content)
    second.write_bytes(third.read_bytes())
    third.write_bytes(third.read_bytes()[:-10240] + bytes(512) * 40)
    offsets = third.with_suffix(".tar.idx")
    offsets.write_bytes(offsets.read_bytes()[8:])
    stale = r"differs from Energon's index .*`energon prepare` again"
    for shard in shard_list:
        with pytest.raises(UserError, match=stale):
            index_shard(shard)

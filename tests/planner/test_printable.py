"""Secrets in URLs and control characters in names are not printed."""

import json

import pytest
from cli_cases import failure

from omnibal.base.errors import StorageError
from omnibal.base.printable import printable, without_secrets
from omnibal.base.remote_path import RemotePath, _open_storage
from omnibal.data.scan import BadSample, write_skipped

CANARY = "c4n4ry"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"https://me:{CANARY}@host/a.tar", "https://***@host/a.tar"),
        (f"s3:/key:{CANARY}/with@signs@bucket/x y", "s3:/***@bucket/x y"),
        (f"{CANARY[:0]}https://host/a?sig={CANARY}&x=1, and more", "https://host/a?*** and more"),
        (f"x_https://u:p@{CANARY}@h/a@b", "x_https://***@h/a@b"),
        (f"'http://h/it's a b?sig={CANARY}'", "'http://h/it's a b?***'"),
        (f"https:////u:it's{CANARY}@h", "https:////***@h"),
        ("s3://bucket/a@b.jpg", "s3://bucket/a@b.jpg"),
        (f"https://host/a#b;sig={CANARY}, and more", "https://host/a#b;*** and more"),
        (f"at https%3A%2F%2Fme%3A{CANARY}%40host%2Fa", "at https%3A%2F%2F***%40host%2Fa"),
        ("s3://bucket/a#1;2.tar", "s3://bucket/a#1;2.tar"),
        ("is it so? yes", "is it so? yes"),
    ],
)
def test_urls_lose_their_secrets_and_nothing_else(text, shown):
    """Prevents a password or signature in a log that is shown to others."""
    assert without_secrets(text) == shown


def test_names_cannot_write_to_the_terminal():
    """Prevents a source name that clears the screen or rewrites a line."""
    assert printable("a\x1b[2J\rb\u202e\nc") == "a\\x1b[2J\\rb\\u202e\nc"
    assert printable("\u3000\xa0\u2009\u540d") == "\u3000\xa0\u2009\u540d"


@pytest.mark.parametrize("key", ["annotation", "shards"])
def test_commands_do_not_print_secrets(tmp_path, capsys, monkeypatch, key):
    """Prevents a failed scan from logging the password of its data."""
    monkeypatch.chdir(tmp_path)
    source = {"root": ".", key: f"http://me:{CANARY}@127.0.0.1:9/a.tar?sig={CANARY}"}
    (tmp_path / "meta.json").write_text(json.dumps({"s": source}))
    error = failure(capsys, "lengths meta.json --model qwen3-8b --tokenizer-model t -o l.parquet")
    assert CANARY not in error


def test_lists_of_skipped_samples_have_no_secrets(tmp_path):
    """Prevents a signed URL in a list of skipped samples that is shown to others."""
    where = f"https://me:{CANARY}@host/a.jsonl: line 1"
    sample = BadSample(index=0, where=where, message=f"{where}: has 'a\ud800'")
    write_skipped([sample], tmp_path / "skipped.txt")
    listed = (tmp_path / "skipped.txt").read_text(encoding="utf-8")
    assert listed == "0\thttps://***@host/a.jsonl: line 1\thas 'a\\ud800'\n"


@pytest.mark.parametrize("secret", [f"key:{CANARY}@b", f"b/a?sig={CANARY}"])
def test_backends_do_not_print_secrets(secret):
    """Prevents a storage library's error message from printing a URL's password."""
    path = RemotePath(f"memory://{secret}")
    with pytest.raises(StorageError, match="bad name") as raised, _open_storage(path):
        raise ValueError(f"bad name {secret}")
    assert CANARY not in printable(str(raised.value))

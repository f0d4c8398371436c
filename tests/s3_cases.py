"""A local S3 server (moto) and its files."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import reserve_port

needs_s3 = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None, reason="moto or s3fs is not installed"
)
_MAIN = "from moto.server import main; main()"


@dataclass(frozen=True)
class Server:
    """An S3 server with one bucket, `data`."""

    url: str
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """Endpoint and credentials as environment variables."""
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        return keys | {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1"}

    def put_object(self, name: str, content: bytes | None) -> None:
        """Write a file to the bucket, or create the bucket."""
        # urllib's default content type would make the server parse a form.
        kind = {"Content-Type": "application/octet-stream"}
        url = f"{self.url}/data/{name}".rstrip("/")
        urllib.request.urlopen(urllib.request.Request(url, content, kind, method="PUT")).close()

    def put_folder(self, folder: Path) -> None:
        """Write all files of a folder under their relative paths."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put_object(str(path.relative_to(folder)), path.read_bytes())

    def reads_of(self, suffix: str) -> int:
        """Number of reads of files with this suffix."""
        lines = self.log.read_text().splitlines()
        return sum("GET /" in line and f"{suffix} HTTP" in line for line in lines)


@contextmanager
def started_s3(folder: Path) -> Iterator[Server]:
    """Start a server with an empty bucket; stop it after the `with`."""
    port = reserve_port()
    server = Server(f"http://127.0.0.1:{port}", folder / "moto.log")
    words = [sys.executable, "-c", _MAIN, "-H", "127.0.0.1", "-p", str(port)]
    with server.log.open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                server.put_object("", None)
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()

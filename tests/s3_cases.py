"""A server of S3 on this machine (moto's), and files in it."""

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
from commands import reserved_port

needs_s3 = pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None, reason="moto or s3fs is not installed"
)
_MAIN = "from moto.server import main; main()"


@dataclass(frozen=True)
class Server:
    """A server with one bucket, data."""

    url: str
    log: Path

    @property
    def environment(self) -> dict[str, str]:
        """How a command finds it, and who it is there."""
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        return keys | {"AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1"}

    def put(self, name: str, content: bytes | None) -> None:
        """Write a file of the bucket, or make the bucket."""
        # Else it would be read as a form.
        kind = {"Content-Type": "application/octet-stream"}
        url = f"{self.url}/data/{name}".rstrip("/")
        urllib.request.urlopen(urllib.request.Request(url, content, kind, method="PUT")).close()

    def put_folder(self, folder: Path) -> None:
        """Write all files of a folder, under their names in it."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(str(path.relative_to(folder)), path.read_bytes())

    def reads_of(self, suffix: str) -> int:
        """How often files that end so were read."""
        lines = self.log.read_text().splitlines()
        return sum("GET /" in line and f"{suffix} HTTP" in line for line in lines)


@contextmanager
def started_s3(folder: Path) -> Iterator[Server]:
    """Start a server with an empty bucket, which ends with the `with`."""
    port = reserved_port()
    server = Server(f"http://127.0.0.1:{port}", folder / "moto.log")
    words = [sys.executable, "-c", _MAIN, "-H", "127.0.0.1", "-p", str(port)]
    with server.log.open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 600
        while True:
            try:
                server.put("", None)
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()

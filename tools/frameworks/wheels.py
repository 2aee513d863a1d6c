# SPDX-License-Identifier: Apache-2.0
"""Python files of released wheels, read from the index without a download of the whole wheel.

RELEASES names the releases that libep's sockets are tested with. To try another release, change
its line. unpack() gives a folder with the Python files of a release, ready for sys.path. The
folder is kept in the user's cache, outside the source tree.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

RELEASES = {
    "vllm": "0.33.0",
    "sglang": "0.5.23",
    "torchtitan": "0.3.0",
    "flashinfer-python": "0.7.2.post1",
    "megatron-core": "0.16.1",
}

INDEX = os.environ.get("LIBEP_TEST_INDEX", "https://pypi.org/simple/")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "libep" / "released"
BLOCK = 1 << 19  # bytes of a request


def unpack(name: str, release: str | None = None) -> Path:
    """Give the folder with all Python files of a release, which the first call downloads."""
    release = release or RELEASES[name]
    folder = CACHE / f"{name}-{release}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as parent:
        into = Path(parent) / "files"
        with zipfile.ZipFile(io.BufferedReader(_Remote(_find(name, release)), BLOCK)) as wheel:
            wheel.extractall(into, [each for each in wheel.namelist() if each.endswith(".py")])
        try:
            into.rename(folder)
        except OSError:  # Another process was faster.
            if not folder.is_dir():
                raise
    return folder


def _find(name: str, release: str) -> str:
    """Give the address of a wheel of the release; a pure one or one for this machine is enough."""
    page = urllib.parse.urljoin(INDEX, f"{name}/")
    stem = re.escape(f"{name.replace('-', '_')}-{release}-")
    with urllib.request.urlopen(page, timeout=60) as answer:
        found = re.findall(rf'href="([^"#]*/{stem}[^"#]*\.whl)', answer.read().decode())
    if not found:
        raise LookupError(f"{page} has no wheel of {name} {release}")
    found.sort(key=lambda address: (not address.endswith("-any.whl"), "x86_64" not in address))
    return urllib.parse.urljoin(page, found[0])


class _Remote(io.RawIOBase):
    """A file of the index, of which requests read parts."""

    def __init__(self, address: str) -> None:
        self._address, self._at, self._whole = address, 0, b""
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        return True

    seekable = readable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        body = self._whole[self._at : end]
        if not body:
            asked = {"Range": f"bytes={self._at}-{end - 1}"}
            request = urllib.request.Request(self._address, headers=asked)
            with urllib.request.urlopen(request, timeout=180) as answer:
                body = answer.read()
                if answer.status != 206:  # an index that knows no parts
                    self._whole, body = body, body[self._at : end]
        buffer[: len(body)] = body
        self._at += len(body)
        return len(body)

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
import struct
import tempfile
import urllib.parse
import urllib.request
import zipfile
import zlib
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

# Files with at most this many unwanted bytes between them are read by one request.
GAP = 1 << 16
TAIL = 1 << 16


def unpack(name: str, release: str | None = None) -> Path:
    """Give the folder with all Python files of a release, which the first call downloads."""
    release = release or RELEASES[name]
    folder = CACHE / f"{name}-{release}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as parent:
        into = Path(parent) / "files"
        _read_python(_find(name, release), into)
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


def _range(address: str, first: int, last: int | None) -> tuple[bytes, int]:
    """Give the bytes from first to last, both included, and the size of the file."""
    asked = f"bytes={first}-{last}" if last is not None else f"bytes={first}"
    request = urllib.request.Request(address, headers={"Range": asked})
    with urllib.request.urlopen(request, timeout=180) as answer:
        body = answer.read()
        if answer.status != 206:
            return (body[first:] if last is None else body[first : last + 1]), len(body)
        return body, int(answer.headers["Content-Range"].rsplit("/", 1)[1])


def _directory(address: str) -> list[zipfile.ZipInfo]:
    """Read the list of files at the end of a wheel."""
    tail, size = _range(address, -TAIL, None)
    end = tail.rfind(b"PK\5\6")
    length, start = struct.unpack("<II", tail[end + 12 : end + 20])
    if length + (size - start - length) > len(tail):
        tail, _ = _range(address, start, size - 1)
    # zipfile wants offsets from the start of what it reads; it adds this file's own difference.
    with zipfile.ZipFile(io.BytesIO(tail[-(size - start) :])) as wheel:
        for info in wheel.infolist():
            info.header_offset += start
        return wheel.infolist()


def _read_python(address: str, into: Path) -> None:
    files = [i for i in _directory(address) if i.filename.endswith(".py")]
    files.sort(key=lambda info: info.header_offset)
    spans: list[list[zipfile.ZipInfo]] = []
    for info in files:
        if spans and info.header_offset - _end(spans[-1][-1]) <= GAP:
            spans[-1].append(info)
        else:
            spans.append([info])
    for span in spans:
        first = span[0].header_offset
        data, _ = _range(address, first, _end(span[-1]) - 1)
        for info in span:
            path = into / info.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_content(data, info.header_offset - first, info))


def _end(info: zipfile.ZipInfo) -> int:
    """Give an offset behind a file; its local header may have a longer extra field."""
    return info.header_offset + 30 + len(info.filename) + 1024 + info.compress_size


def _content(data: bytes, at: int, info: zipfile.ZipInfo) -> bytes:
    name, extra = struct.unpack("<HH", data[at + 26 : at + 30])
    start = at + 30 + name + extra
    packed = data[start : start + info.compress_size]
    content = packed if info.compress_type == zipfile.ZIP_STORED else zlib.decompress(packed, -15)
    if zlib.crc32(content) != info.CRC:
        raise ValueError(f"{info.filename} is damaged")
    return content

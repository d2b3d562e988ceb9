"""What a checkpoint's files hold, told from samples: enough to tell other bytes apart, far less than reading it.

From each weight file come its size, windows spread over all of it, and a window inside every tensor, wherever the
format says where tensors lie. A tensor that was trained on, merged, scaled or swapped is another one almost everywhere,
so its window shows it. Not seen is a change of single elements that no window meets.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import xxhash

from rfork.identity import Content, canonical_digest

SAMPLE_NBYTES = 64 * 1024
NUM_SAMPLES = 16
TENSOR_SAMPLE_NBYTES = 4096
MAX_HEADER_NBYTES = 256 << 20
NUM_READERS = 16

Extent = tuple[int, int]
"""First byte and number of bytes of one tensor in its file."""


def checkpoint_content(files: Iterable[Path]) -> Content:
    """Content of a checkpoint: name, size and XXH3-128 of the samples of each weight file.

    Files up to 1 MiB are read whole. Folder names don't count, so two mount paths of one checkpoint agree. Raises
    OSError if a file can't be read and ValueError if there is none.
    """
    paths = list(files)
    if not paths:
        raise ValueError("a checkpoint without weight files has no content")
    with ThreadPoolExecutor(min(NUM_READERS, len(paths)), thread_name_prefix="rfork-content") as pool:
        records = sorted(pool.map(_record, paths))
    return Content("checkpoint", canonical_digest(records)[:32])


def _record(path: Path) -> tuple[str, int, str]:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        for offset in sample_offsets(nbytes):
            hasher.update(os.pread(file.fileno(), SAMPLE_NBYTES, offset))
        if nbytes > SAMPLE_NBYTES * NUM_SAMPLES:
            header, extents = tensors_in(file, nbytes)
            hasher.update(header)
            for start, size in extents:
                at = start + _somewhere(start, size)
                hasher.update(os.pread(file.fileno(), min(size, TENSOR_SAMPLE_NBYTES), at))
    return path.name, nbytes, hasher.hexdigest()


def sample_offsets(nbytes: int) -> list[int]:
    """Start offsets of the windows that stand for a file of `nbytes` bytes."""
    if nbytes <= SAMPLE_NBYTES * NUM_SAMPLES:
        return list(range(0, nbytes, SAMPLE_NBYTES))
    last = nbytes - SAMPLE_NBYTES
    return [last * i // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]


def tensors_in(file: BinaryIO, nbytes: int) -> tuple[bytes, list[Extent]]:
    """What the file says of its tensors, as bytes, and where each lies. Empty for a format that says nothing."""
    return _safetensors(file, nbytes) or _zip(file) or (b"", [])


def _somewhere(start: int, size: int) -> int:
    """An offset for the window of a tensor, the same for everyone and not the same for all."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", start, size)) % max(1, size - TENSOR_SAMPLE_NBYTES + 1)


def _safetensors(file: BinaryIO, nbytes: int) -> tuple[bytes, list[Extent]] | None:
    """A length of 8 bytes, a JSON object with offsets from its own end, then the tensors."""
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
        return None
    header = os.pread(file.fileno(), length, 8)
    try:
        entries = json.loads(header)
        places = [e["data_offsets"] for name, e in entries.items() if name != "__metadata__"]
        extents = sorted((8 + length + begin, end - begin) for begin, end in places if end > begin)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return (header, extents) if all(at >= 0 and at + size <= nbytes for at, size in extents) else None


def _zip(file: BinaryIO) -> tuple[bytes, list[Extent]] | None:
    """PyTorch's own format: each storage is a member, whose checksum of all its bytes counts too."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = sorted(archive.infolist(), key=lambda m: m.header_offset)
    except (zipfile.BadZipFile, ValueError, OSError):
        return None
    said = json.dumps([(m.filename, m.file_size, m.CRC) for m in members]).encode()
    return said, [(m.header_offset, m.compress_size) for m in members if m.compress_size]

"""What a checkpoint's files hold: other bytes are another content, wherever they lie in whichever format."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rfork.checkpoint import checkpoint_content, sample_offsets, tensors_in

WINDOW = 64 * 1024


def write(folder: Path, **files: bytes) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def test_a_checkpoint_is_the_same_on_another_mount_and_in_another_order(tmp_path: Path) -> None:
    one = write(tmp_path / "a", x=b"1" * 100, y=b"2" * 100)
    two = write(tmp_path / "b" / "c", y=b"2" * 100, x=b"1" * 100)
    assert checkpoint_content(one) == checkpoint_content(two)
    assert checkpoint_content(one).kind == "checkpoint"


def test_bytes_names_and_sizes_count(tmp_path: Path) -> None:
    variants = [{"x": b"1" * 99}, {"x": b"1" * 100}, {"y": b"1" * 100}, {"x": b"1" * 99 + b"2"}, {"x": b""}]
    contents = [checkpoint_content(write(tmp_path / str(i), **files)) for i, files in enumerate(variants)]
    assert len({c.id for c in contents}) == len(variants)


def test_a_checkpoint_without_files_has_no_content(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without weight files"):
        checkpoint_content([])
    with pytest.raises(OSError, match="missing"):
        checkpoint_content([tmp_path / "missing"])


@given(st.integers(0, 1 << 45))
def test_samples_lie_inside_the_file_and_include_both_ends(nbytes: int) -> None:
    offsets = sample_offsets(nbytes)
    assert len(offsets) <= 16
    assert all(0 <= o < nbytes for o in offsets)
    if nbytes > WINDOW * 16:
        assert (offsets[0], offsets[-1] + WINDOW) == (0, nbytes)
        assert all(b - a >= WINDOW for a, b in itertools.pairwise(offsets))
    elif nbytes:
        assert offsets == list(range(0, nbytes, WINDOW))


NUM_TENSORS = 40
NUM_ELEMENTS = 1 << 17
"""40 tensors of 256 KiB: 10 MiB, of which the windows of the file meet one in ten bytes."""


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layers.{i:02}.weight": torch.randn(NUM_ELEMENTS).to(torch.bfloat16) for i in range(NUM_TENSORS)}


def save(path: Path, values: dict[str, torch.Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(values, path) if path.suffix == ".safetensors" else torch.save(values, path)
    os.utime(path, (1, 1))
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin"])
@pytest.mark.parametrize("number", range(0, NUM_TENSORS, 3))
def test_any_one_tensor_that_is_another_is_another_content(name: str, number: int, tmp_path: Path) -> None:
    """With equal names, sizes and times, and no window of the file needed to meet it."""
    values = tensors()
    one = save(tmp_path / "one" / name, values)
    values[f"layers.{number:02}.weight"] *= 1.25
    other = save(tmp_path / "other" / name, values)
    assert one.stat().st_size == other.stat().st_size
    assert checkpoint_content([one]) != checkpoint_content([other])


def test_bytes_between_all_windows_of_the_file_count(tmp_path: Path) -> None:
    """All signs turned, but for what the windows of the file see: what a sample of the file alone would call equal."""
    path = save(tmp_path / "one" / "model.safetensors", tensors())
    data = bytearray(path.read_bytes())
    seen = bytearray(len(data))
    for offset in sample_offsets(len(data)):
        seen[offset : offset + WINDOW] = b"\1" * WINDOW
    for at in range(1, len(data), 2):
        if not seen[at]:
            data[at] ^= 0x80
    other = tmp_path / "other" / "model.safetensors"
    other.parent.mkdir()
    other.write_bytes(data)
    assert checkpoint_content([path]) != checkpoint_content([other])


def test_every_tensor_is_found_in_both_formats(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.bin"):
        path = save(tmp_path / name, tensors())
        with path.open("rb") as file:
            said, extents = tensors_in(file, path.stat().st_size)
        assert said
        assert sum(size == 2 * NUM_ELEMENTS for _, size in extents) == NUM_TENSORS


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"PK\3\4" + bytes(60),
        (1 << 62).to_bytes(8, "little") + b"{}",
        (64).to_bytes(8, "little") + b"[" * 64,
        (40).to_bytes(8, "little") + b'{"w": {"data_offsets": [0, 99999999999]}}',
        (32).to_bytes(8, "little") + b'{"w": {"data_offsets": ["a", 1]}}',
    ],
    ids=["nothing", "half an archive", "endless header", "no object", "beyond the end", "no numbers"],
)
def test_a_file_of_no_known_format_is_sampled_all_the_same(head: bytes, tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "model.safetensors", tmp_path / "b" / "model.safetensors"
    for path, last in ((one, b"1"), (other, b"2")):
        path.parent.mkdir()
        path.write_bytes(head.ljust(2 << 20, b"x") + last)
    with one.open("rb") as file:
        assert tensors_in(file, one.stat().st_size) == (b"", [])
    assert checkpoint_content([one]) != checkpoint_content([other])

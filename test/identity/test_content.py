"""What the bytes are: told from the bytes, whatever a path, an index or a label says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.models import Models

from rfork.config import Config
from rfork.errors import NoSeedAvailable
from rfork.identity import Content
from sglang_rfork.srt.model_loader.content import expected_content
from sglang_rfork.srt.model_loader.identity import argument_value


def content(path: Path) -> Content:
    return expected_content(Config(), str(path), None)


def test_equal_config_and_index_do_not_make_equal_content(models: Models) -> None:
    one, other = (models.path("qwen2", seed=seed, num_shards=2) for seed in (0, 1))
    for name in ("config.json", "model.safetensors.index.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert content(one) != content(other)


def test_one_checkpoint_under_two_mount_paths_is_one_content(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models.path("qwen2"), tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(models.path("qwen2"))
    assert content(models.path("qwen2")) == content(tmp_path / "elsewhere") == content(tmp_path / "link")


def test_one_bit_in_a_small_file_is_another_content(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models.path("qwen2"), tmp_path / "flipped")
    file = tmp_path / "flipped" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data[: 1 << 20] if len(data) <= 1 << 20 else data)
    assert content(models.path("qwen2")) != content(tmp_path / "flipped")


def test_a_label_alone_is_never_enough() -> None:
    """A model name without files to look at could be any bytes: no fork, unless the content is pinned by its digest."""
    with pytest.raises(NoSeedAvailable, match="no weight files"):
        expected_content(Config(), "some-organisation/some-model", None)
    pinned = Content("checkpoint", "c0ffee")
    assert expected_content(Config(content=pinned), "some-organisation/some-model", None) == pinned


def test_an_expert_map_in_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    for name, text in (("a.json", "[0, 1]"), ("b.json", "[0, 1]"), ("c.json", "[1, 0]")):
        (tmp_path / name).write_text(text)
    a, b, c = (argument_value("init_expert_location", str(tmp_path / n)) for n in ("a.json", "b.json", "c.json"))
    assert a == b != c

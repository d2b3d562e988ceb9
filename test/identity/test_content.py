"""What the bytes are: told from the bytes, whatever a path, an index or a label says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.models import Models

from rfork.config import Config
from rfork.errors import NoSeedAvailable
from rfork.identity import Content
from sglang_rfork.srt.model_executor.model_runner import content_loaded
from sglang_rfork.srt.model_loader.content import disk_format, expected_content
from sglang_rfork.srt.model_loader.identity import argument_value


def content(path: Path, load_format: str = "auto") -> Content:
    return expected_content(Config(), str(path), None, load_format)


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


def test_a_file_that_is_replaced_is_looked_at_again(models: Models, tmp_path: Path) -> None:
    """Another file of that name, with size and time kept, as a roll-out by link or by rsync leaves it."""
    for seed in (0, 1):
        shutil.copytree(models.path("qwen2", seed=seed), tmp_path / str(seed))
        os.utime(tmp_path / str(seed) / "model.safetensors", (1, 1))
    link = tmp_path / "current"
    link.symlink_to("0")
    before = content(link)
    link.unlink()
    link.symlink_to("1")
    assert content(link) == content(tmp_path / "1") != before
    os.replace(tmp_path / "0" / "model.safetensors", tmp_path / "1" / "model.safetensors")
    assert content(link) == before


def test_what_changed_while_it_was_loaded_is_nobodys_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    one, other = Content("checkpoint", "1"), Content("checkpoint", "2")
    assert content_loaded(one, one) == one
    assert caplog.messages == []
    for before, after in ((one, other), (None, one), (one, None), (None, None)):
        assert content_loaded(before, after).kind == "live"
    assert "the weight files changed while they were loaded (checkpoint:1 before, checkpoint:2 after)" in caplog.text


def test_the_files_that_the_load_format_reads_are_what_counts(models: Models, tmp_path: Path) -> None:
    shutil.copytree(models.path("qwen2"), tmp_path / "both")
    both = tmp_path / "both"
    (both / "model.pt").write_bytes(b"other weights")
    assert content(both) == content(both, "safetensors") == content(models.path("qwen2")) != content(both, "pt")
    with pytest.raises(NoSeedAvailable, match="no weight files"):
        content(both, "mistral")
    for made in ("dummy", "flash_rl", "remote"):
        with pytest.raises(NoSeedAvailable, match=f"no file vouches for what load format '{made}' makes of it"):
            content(both, made)


def test_a_client_asks_for_what_it_would_read_itself() -> None:
    read = SimpleNamespace(load_format="auto")
    assert disk_format(Config(), read) == disk_format(Config(fallback="never"), read) == "auto"
    assert disk_format(Config(fallback="pt"), read) == "pt"
    assert disk_format(Config(fallback="dummy"), read) == "auto"


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

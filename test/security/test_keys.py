"""Where the key comes from, and that it stays there."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from rfork.config import load_config
from rfork.errors import ConfigError
from rfork.keys import KeyRing, keyring

from . import KEY, OTHER_KEY


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    write(path, f"# the fleet's\n{KEY}\n\n{OTHER_KEY}\n")
    return path


def write(path: Path, text: str) -> None:
    """As Secrets are mounted: a new file takes the old one's place."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o600)
    os.replace(fresh, path)


def test_the_first_line_is_the_current_key_and_the_second_the_previous_one(key_file: Path) -> None:
    assert KeyRing(path=str(key_file)).all() == (KEY.encode(), OTHER_KEY.encode())


def test_a_file_that_changes_is_read_again(key_file: Path) -> None:
    ring = KeyRing(path=str(key_file))
    write(key_file, OTHER_KEY)
    assert ring.all() == (OTHER_KEY.encode(),)


def test_a_file_that_is_unsound_or_gone_leaves_the_old_keys_and_says_so_once(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = KeyRing(path=str(key_file))
    write(key_file, "short")
    assert (ring.all(), ring.all()) == ((KEY.encode(), OTHER_KEY.encode()),) * 2
    assert len([r for r in caplog.records if "the keys read before stay" in r.message]) == 1
    key_file.unlink()
    assert ring.all()


@pytest.mark.parametrize("text", ["", "short", f"{KEY}\n{KEY}\n{KEY}", "k" * 5000, "# nothing\n"])
def test_a_file_that_holds_no_key_stops_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match=r"key_file: expected in .* the current key"):
        KeyRing(path=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="can't read"):
        KeyRing(path=str(tmp_path / "none"))


def test_no_error_shows_what_the_file_holds(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hush-hush")
    with pytest.raises(ConfigError) as caught:
        KeyRing(path=str(tmp_path / "key"))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o440, False), (0o644, True), (0o660, True)])
def test_a_file_that_others_can_read_is_warned_of(
    key_file: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        KeyRing(path=str(key_file))
    assert ("can be read by others" in caplog.text) is warns
    assert KEY not in caplog.text


def test_settings_name_one_ring_for_the_whole_process(key_file: Path) -> None:
    assert keyring(None, str(key_file)) is keyring(None, str(key_file))
    assert keyring(None, None) is None


def test_a_key_on_the_command_line_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="every user of the host can read") as caught:
        load_config(json.dumps({"key": KEY}), {})
    assert KEY not in str(caught.value)


def test_a_key_and_a_key_file_are_one_too_many(key_file: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of the two"):
        load_config(None, {"RFORK_KEY": KEY, "RFORK_KEY_FILE": str(key_file)})


def test_settings_and_ring_do_not_show_the_key() -> None:
    settings = load_config(None, {"RFORK_KEY": KEY})
    assert settings.key == KEY
    assert KEY not in f"{settings!r} {settings} {KeyRing(KEY)!r}"

"""R-Fork's share of the arguments: what can't work stops the start in one line, before anything is spawned."""

from __future__ import annotations

from argparse import ArgumentParser
from types import SimpleNamespace

import pytest

from rfork.errors import ConfigError
from sglang_rfork.srt.compat import installed_release
from sglang_rfork.srt.server_args import REQUEST_ATTRIBUTE, add_cli_args, take_over


def client_arguments() -> SimpleNamespace:
    """As SGLang has resolved them so far: a client of a seed that a planner will name."""
    return SimpleNamespace(
        load_format="remote_instance",
        speculative_draft_load_format=None,
        remote_instance_weight_loader_start_seed_via_transfer_engine=False,
        remote_instance_weight_loader_backend="transfer_engine",
        remote_instance_weight_loader_send_weights_group_ports=None,
        remote_instance_weight_loader_seed_instance_ip=None,
        remote_instance_weight_loader_seed_instance_service_port=None,
    )


def take(fallback: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("RFORK_FALLBACK", fallback)
    arguments = client_arguments()
    take_over(arguments, arguments, lambda fields: None)
    return arguments


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("nevr", "; did you mean 'never'?"),
        ("safetensor", "; did you mean 'safetensors'?"),
        ("zzz", "; known: auto, never, "),
    ],
)
def test_a_fallback_that_sglang_does_not_have_is_refused_at_the_start(
    typed: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        take(typed, monkeypatch)
    assert f"fallback: expected auto, never or a load format of SGLang, got {typed!r}{hint}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_loader_of_this_release_can_be_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = [str(each.value) for each in installed_release().get("arguments.load_formats")]
    assert {"auto", "safetensors", "dummy"} <= set(formats)
    for fallback in ["never", *formats]:
        if fallback != "remote_instance":
            assert hasattr(take(fallback, monkeypatch), REQUEST_ATTRIBUTE)


@pytest.mark.parametrize("again", [["--rfork-config", "{}"], ["--rfork-config={}"]], ids=["space", "equals sign"])
@pytest.mark.parametrize("first", [["--rfork-config", "{}"], ["--rfork-config={}"]], ids=["space", "equals sign"])
def test_settings_given_twice_are_refused(first: list[str], again: list[str]) -> None:
    parser = ArgumentParser()
    add_cli_args(None, parser)
    assert parser.parse_args(first).rfork_config == "{}"
    with pytest.raises(SystemExit, match=r"rfork: refusing to start: --rfork-config is given twice .*[^\n]$"):
        parser.parse_args([*first, *again])

"""`rfork check` in a fleet with a key: it asks as any client does, and says what is wrong with its own key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.ports import lend
from support.seed_node import Seed
from support.seed_rank import CHECKPOINT, IDENTITY

from rfork.cli.check import answer
from rfork.errors import SeedRefused, SeedUnproven, SeedUnreachable
from rfork.identity import RankIdentity
from rfork.wanted import Wanted, WantedModel

KEY, OTHER_KEY = "the key of this fleet", "the key of another fleet"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def wanted(**overrides: object) -> Wanted:
    """A server like the seed; `overrides` change fields of its identity, but for `config`."""
    config = overrides.pop("config", None)
    fields = {**IDENTITY.fields, **overrides}
    model = WantedModel(rank=RankIdentity(), engine=IDENTITY.engine, fields=fields, content=str(CHECKPOINT))
    return Wanted(models=(model,), config=config)


def at(seed: Seed) -> str:
    return seed.node.listener_url or ""


def test_with_the_key_the_seed_decides_and_no_lease_is_left(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = Seed(stack, key=KEY).serve()
    monkeypatch.setenv("RFORK_KEY", KEY)
    assert answer(at(seed), wanted())
    assert not answer(at(seed), wanted(dtype="int8"))
    assert "dtype: 'int8' here, 'uint8' there" in capsys.readouterr().out
    assert seed.node.num_readers == 0


def test_the_key_may_come_with_the_arguments(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--rfork-config` names a key file, as it may for a server; a previous key is taken too."""
    seed = Seed(stack, key=KEY).serve()
    monkeypatch.delenv("RFORK_KEY", raising=False)
    (tmp_path / "key").write_text(f"{OTHER_KEY}\n{KEY}\n")
    assert answer(at(seed), wanted(config=f'{{"key_file": "{tmp_path}/key"}}'))


@pytest.mark.parametrize(
    ("key", "said"),
    [("", "belongs to a fleet with a key"), (OTHER_KEY, "is the fleet key the same on both sides")],
    ids=["none", "wrong"],
)
def test_without_the_key_it_can_not_tell_and_says_where_keys_are_taken_from(
    key: str, said: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = Seed(stack, key=KEY).serve()
    monkeypatch.setenv("RFORK_KEY", key)
    with pytest.raises(SeedRefused, match=rf"{said}.*RFORK_KEY_FILE") as refusal:
        answer(at(seed), wanted())
    assert KEY not in str(refusal.value)
    assert seed.node.num_readers == 0


def test_a_seed_without_a_key_can_not_vouch_for_itself(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = Seed(stack).serve()
    monkeypatch.setenv("RFORK_KEY", KEY)
    with pytest.raises(SeedUnproven, match="without a proof of this fleet's key"):
        answer(at(seed), wanted())


def test_an_absent_seed_leaves_it_open() -> None:
    block = lend()
    try:
        with pytest.raises(SeedUnreachable):
            answer(f"127.0.0.1:{block.port}", wanted())
    finally:
        block.release()

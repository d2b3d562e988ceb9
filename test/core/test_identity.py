"""Identity: keys are content-addressed, pinned, and each field counts."""

from pathlib import Path

import msgspec
import pytest

from rfork.identity import (
    Content,
    ModelIdentity,
    RankIdentity,
    canonical_digest,
    digest_of_mapping,
    instance_key,
    new_instance_id,
)


def identity(**fields: object) -> ModelIdentity:
    return ModelIdentity("sglang", {"architecture": "Qwen3ForCausalLM", "dtype": "bfloat16", "tp_size": 2} | fields)


def test_the_instance_key_is_pinned() -> None:
    """A change of this value splits a fleet in two."""
    assert (
        instance_key(identity(), Content("checkpoint", "c0ffee"))
        == "49f75868307b17ff3f162000587d070ef75a449ff6c3ffb90d32cf13cabeb7f5"
    )


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"tp_size": 4}, {"tp_size": "2"}, {"new": None}])
def test_each_field_changes_the_key(change: dict[str, object]) -> None:
    content = Content("checkpoint", "c0ffee")
    assert instance_key(identity(**change), content) != instance_key(identity(), content)


def test_engine_and_content_change_the_key() -> None:
    key = instance_key(identity(), Content("checkpoint", "c0ffee"))
    assert instance_key(ModelIdentity("vllm", identity().fields), Content("checkpoint", "c0ffee")) != key
    assert instance_key(identity(), Content("live", "c0ffee")) != key
    assert instance_key(identity(), Content("checkpoint", "decaf")) != key


def test_the_order_of_fields_does_not_count() -> None:
    fields = identity().fields
    assert ModelIdentity("sglang", dict(reversed(fields.items()))).digest == identity().digest


def test_a_difference_lists_field_mine_theirs() -> None:
    assert identity().diff(identity(tp_size=4, quantization="fp8")) == [
        ("quantization", None, "fp8"),
        ("tp_size", 2, 4),
    ]
    assert ModelIdentity("vllm", {}).diff(ModelIdentity("sglang", {})) == [("engine", "vllm", "sglang")]


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_digest({"x": float("nan")})


def test_a_mapping_is_digested_as_text_where_json_has_no_word() -> None:
    assert digest_of_mapping({"a": Path("x"), "b": {1: 2}}) == digest_of_mapping({"b": {"1": 2}, "a": "x"})


@pytest.mark.parametrize(("kind", "ident"), [("disk", "x"), ("live", ""), ("", "x")])
def test_a_content_without_kind_or_id_is_refused(kind: str, ident: str) -> None:
    with pytest.raises(ValueError, match="content"):
        Content(kind, ident)


def test_content_survives_its_text() -> None:
    content = Content("checkpoint", "a:b")
    assert Content.parse(str(content)) == content


def test_two_updates_never_share_a_content() -> None:
    assert Content.live() != Content.live()
    assert new_instance_id() != new_instance_id()


def test_a_rank_key_is_canonical() -> None:
    rank = RankIdentity(tp_rank=1, tp_size=2)
    assert rank.key == "target.tp1of2.pp0of1.ep0of1.moe_tp0of1.attn_dp0of1"


def test_every_coordinate_tells_shards_apart() -> None:
    axes = ("pp", "tp", "ep", "moe_tp", "attn_dp")
    ranks = [RankIdentity(), RankIdentity(role="draft-0"), RankIdentity(role="draft-1")]
    ranks += [RankIdentity(**{f"{a}_size": 2, f"{a}_rank": r}) for a in axes for r in (0, 1)]
    assert len({r.key for r in ranks}) == len(set(ranks)) == len(ranks)


@pytest.mark.parametrize("role", ["", "draft", "draft-", "draft-x", "draft-٣", "seed", "draft-1/.."])
def test_an_unknown_role_is_refused(role: str) -> None:
    with pytest.raises(ValueError, match="role must be"):
        RankIdentity(role=role)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_coordinate_outside_its_axis_is_refused_also_from_the_wire(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="tp_rank"):
        RankIdentity(tp_rank=rank, tp_size=size)
    with pytest.raises(msgspec.ValidationError, match="tp_rank"):
        msgspec.json.decode(msgspec.json.encode({"tp_rank": rank, "tp_size": size}), type=RankIdentity)

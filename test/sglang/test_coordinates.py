"""No size that cuts weights goes unseen: identities hold all sizes, and two coordinates tell all others."""

from __future__ import annotations

import itertools

import pytest

from sglang_rfork.srt.compat import LAYOUT_FIELDS, PARALLEL_DIMENSIONS, installed_release
from sglang_rfork.srt.server_args import IMPOSSIBLE

pytestmark = pytest.mark.skipif(installed_release().version != "0.5.23", reason="other releases name them otherwise")

SIZES = {
    "tp_size": "tp",
    "pp_size": "pp",
    "ep_size": "moe_ep",
    "moe_dp_size": "moe_dp",
    "dcp_size": "attn_dcp",
    "attn_dp_size": "attn_dp",
    "attn_cp_size": "attn_cp",
}
"""Arguments that are sizes of parallel groups, as they stand in an identity."""

REFUSED = {"dwdp_size", "ep_join_rank_offset"}
"""Arguments with which R-Fork refuses to start; the offset is taken with --elastic-ep-join-mode only."""

NO_LAYOUT = {
    **dict.fromkeys(("nccl_port", "dist_init_addr", "gated_launch_port", "dist_timeout"), "where ranks meet"),
    **dict.fromkeys(("nnodes", "node_rank"), "where ranks are"),
    **dict.fromkeys(("dp_size", "load_balance_method"), "replicas, and who gets a request"),
    **dict.fromkeys(("pp_max_micro_batch_size", "pp_async_batch_depth"), "batches"),
    **dict.fromkeys(("enable_prefill_cp", "cp_strategy"), "tokens of a prompt, over the ranks of attn_cp_size"),
    **dict.fromkeys(("enable_dsa_cache_layer_split", "enable_kv_cache_sharding"), "the KV cache"),
    **dict.fromkeys(("dcp_comm_backend", "enable_p2p_check"), "how ranks talk"),
    **dict.fromkeys(("enable_attn_tp_input_scattered", "disable_attn_tp_gather"), "activations"),
    "enable_dp_attention_local_control_broadcast": "control messages",
    "max_ep_size": "room for ranks that join, which R-Fork refuses",
}


def test_every_argument_about_parallelism_is_in_the_identity_refused_or_known_to_cut_nothing() -> None:
    from sglang.srt.arg_groups.fields.parallel import Parallel

    known = {*SIZES, *LAYOUT_FIELDS, *REFUSED, *NO_LAYOUT}
    assert set(Parallel.__struct_fields__) - known == set()
    assert set(SIZES.values()) | {"moe_tp", "attn_tp"} == set(PARALLEL_DIMENSIONS)
    assert "ep_join_mode" in IMPOSSIBLE


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "dp", "moe_dp", "ep"),
    [(8, 2, 1, 1, 1, 1), (8, 2, 2, 2, 1, 4), (8, 1, 2, 1, 2, 4), (8, 1, 8, 1, 8, 1), (4, 2, 1, 4, 1, 2)],
)
def test_ranks_of_tensor_and_pipeline_tell_every_other_coordinate(
    tp: int, pp: int, cp: int, dp: int, moe_dp: int, ep: int
) -> None:
    """Each rank of a world has a pair of them of its own, from which SGLang derives the rest with the sizes alone."""
    from sglang.srt.runtime_context import derive_spawn_ranks

    def ranks(world_rank: int, offset: int = 0) -> dict[str, int]:
        return dict(
            derive_spawn_ranks(
                world_rank=world_rank, tp_size=tp, ep_join_rank_offset=offset, attn_cp_size=cp,
                attn_tp_size=tp // cp // dp, moe_dp_size=moe_dp, moe_ep_size=ep,
            )
        )  # fmt: skip

    found = [ranks(world_rank) for world_rank in range(tp * pp)]
    pairs = [(one["tp_rank"], one["pp_rank"]) for one in found]
    assert sorted(pairs) == list(itertools.product(range(tp), range(pp)))
    # A group that joins repeats them: two ranks of one deployment would be one shard.
    assert ranks(tp, offset=tp)["tp_rank"] == found[0]["tp_rank"]

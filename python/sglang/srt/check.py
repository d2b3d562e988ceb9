"""`rfork check`'s half that needs SGLang: what a server with these arguments would ask a seed for, without starting it.

Run as `python -m sglang_rfork.srt.check FD <server args>`; writes a `Wanted` as JSON to that descriptor. Takes plugins
and environment as a server would, resolves the arguments, and stops there: no process, no model, no memory on a device.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from rfork.errors import RForkError
from rfork.identity import RankIdentity
from rfork.wanted import Wanted, WantedModel
from sglang_rfork.srt.compat import installed_release
from sglang_rfork.srt.model_loader.content import disk_format, expected_content
from sglang_rfork.srt.model_loader.identity import model_identity
from sglang_rfork.srt.server_args import FLAG_ATTRIBUTE, api_key_of, request_of, settings_of


def wanted_by(argv: list[str]) -> Wanted:
    """What `sglang serve <argv>` would ask for, for its target and its draft. Exits as SGLang does on bad arguments."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(argv)
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    release = installed_release()
    view = release.arguments(server_args)
    settings, request, sizes = settings_of(server_args), request_of(server_args), sizes_of(view)
    rank = first_rank(sizes)
    models = [("target", view.model_path, view.revision)]
    if view.speculative_draft_model_path:
        models.append(("draft-0", view.speculative_draft_model_path, view.speculative_draft_model_revision))
    found = []
    for role, path, revision in models:
        config = ModelConfig.from_server_args(
            server_args, model_path=path, model_revision=revision, is_draft_model=role != "target"
        )
        identity = model_identity(release, server_args, config, role, sizes)
        try:
            content, problem = str(expected_content(settings, path, revision, disk_format(settings, view))), ""
        except RForkError as error:
            content, problem = "", str(error)
        who = msgspec.structs.replace(rank, role=role)
        found.append(
            WantedModel(rank=who, engine=identity.engine, fields=identity.fields, content=content, problem=problem)
        )
    return Wanted(
        models=tuple(found), weights=settings.weights, seed=request.seed_address if request else None,
        config=getattr(server_args, FLAG_ATTRIBUTE, None), api_key=api_key_of(view),
    )  # fmt: skip


def sizes_of(view: Any) -> dict[str, int]:
    """Sizes of the parallel groups that a server with these arguments makes; a running rank asks its groups instead."""

    def size(name: str) -> int:
        return int(getattr(view, name, 1) or 1)

    tp, ep, moe_dp, attn_cp = size("tp_size"), size("ep_size"), size("moe_dp_size"), size("attn_cp_size")
    attn_dp = size("dp_size") if view.enable_dp_attention else 1
    if hasattr(view, "attn_dp_size"):  # from 0.5.21 on an argument of its own
        attn_dp = size("attn_dp_size")
    return {
        "tp": tp, "pp": size("pp_size"), "moe_ep": ep, "moe_dp": moe_dp, "moe_tp": tp // ep // moe_dp,
        "attn_tp": tp // attn_dp // attn_cp, "attn_cp": attn_cp, "attn_dp": attn_dp, "attn_dcp": size("dcp_size"),
    }  # fmt: skip


def first_rank(sizes: dict[str, int]) -> RankIdentity:
    """Coordinates of rank 0 in groups of these sizes."""
    return RankIdentity(
        pp_size=sizes["pp"], tp_size=sizes["tp"], ep_size=sizes["moe_ep"], moe_tp_size=sizes["moe_tp"],
        attn_dp_size=sizes["attn_dp"],
    )  # fmt: skip


def main() -> None:
    answer = os.fdopen(int(sys.argv[1]), "wb")
    with answer:
        try:
            answer.write(msgspec.json.encode(wanted_by(sys.argv[2:])))
        except Exception as error:  # whoever reads the output takes its last line
            sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()

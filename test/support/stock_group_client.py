"""SGLang's own NCCL client, but for the device: its helper joins a group over gloo, and takes parameters one by one.

    python -m support.stock_group_client SEED_PORT GROUP_PORT       prints {name: SHA-256 of its bytes}

It learns names and sizes from the stock table of the seed, where SGLang's own client would build the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from typing import Any

import httpx
import torch
import torch.distributed as dist
from sglang.srt.utils import init_custom_process_group

HOST = "127.0.0.1"


def main() -> None:
    seed = httpx.Client(base_url=f"http://{HOST}:{sys.argv[1]}", timeout=30)
    port, name = sys.argv[2], f"send_weights_{HOST}"
    table = seed.get("/remote_instance_transfer_engine_info", params={"rank": 0}).json()
    sizes = {n: count * width for n, (_, count, width) in table["remote_instance_transfer_engine_info"][1].items()}
    body = {"master_address": HOST, "ports": port, "group_name": name}
    init = {**body, "group_rank": 0, "world_size": 2, "backend": "gloo"}
    asking = threading.Thread(target=post, args=(seed, "/init_weights_send_group_for_remote_instance", init))
    asking.start()
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://{HOST}:{port}", world_size=2, rank=1, group_name=f"{name}_{port}_0"
    )
    dist.barrier(group=group)
    asking.join()
    sending = threading.Thread(target=post, args=(seed, "/send_weights_to_remote_instance", body))
    sending.start()
    held = {}
    for parameter, nbytes in sizes.items():
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        dist.broadcast(tensor, src=0, group=group)
        held[parameter] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    sending.join()
    dist.destroy_process_group(group)
    print(json.dumps(held), flush=True)


def post(seed: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """Ask, and end with the seed's answer where it refuses: the other thread waits for a group that won't come."""
    answer = seed.post(path, json=body)
    if answer.status_code != 200:
        print(answer.text, file=sys.stderr, flush=True)
        os._exit(1)


if __name__ == "__main__":
    main()

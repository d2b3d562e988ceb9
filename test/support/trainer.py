"""A training job that pushes weights: rank 0 of a gloo group, as `/update_weights_from_distributed` expects one.

python -m support.trainer PORT NAME     reads paths of safetensors files, a line each, and broadcasts what is there
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.utils import init_custom_process_group

HOST = "127.0.0.1"


def main() -> None:
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://{HOST}:{sys.argv[1]}", world_size=2, rank=0, group_name=sys.argv[2]
    )
    for line in sys.stdin:
        for tensor in load_file(line.strip()).values():
            dist.broadcast(tensor, src=0, group=group)


if __name__ == "__main__":
    main()

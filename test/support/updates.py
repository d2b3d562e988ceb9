"""Changing the weights of a running seed, and what it grants meanwhile."""

from __future__ import annotations

import base64
import pickle
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import torch
import zmq
from safetensors.torch import load_file, save_file

from rfork.binding import Binding
from rfork.fence import read_fence
from support.forking import status
from support.outside import fence_page, lease_on
from support.ports import lend
from support.server import HOST, Server

Tensors = Mapping[str, torch.Tensor]


def request(seed: Server, path: str, **body: Any) -> httpx.Response:
    return seed.post(path, body, timeout=120)


def change(seed: Server, path: str, **body: Any) -> None:
    response = request(seed, path, **body)
    assert response.status_code == 200, response.text
    assert response.text in ("", "null") or response.json().get("success", True), response.text


def binding_of(seed: Server) -> Binding:
    with lease_on(seed) as lease:
        return lease.reply.binding


def generation(seed: Server) -> int:
    return int(status(seed)["generation"])


def is_open(binding: Binding) -> bool:
    return read_fence(fence_page(binding)).generation % 2 == 0


def serialized(**tensors: torch.Tensor) -> list[str]:
    """As `/update_weights_from_tensor` takes them, for one rank."""
    return [base64.b64encode(pickle.dumps(list(tensors.items()))).decode()]


def assert_refuses(seed: Server, reason: str) -> None:
    """Whatever is asked for, it is closed."""
    body = {"client": "i-test", "instance_key": "", "identity": {}, "engine": "sglang", "content": "checkpoint:0"}
    answer = httpx.post(f"{status(seed)['listener']}/rfork/v1/leases", json={**body, "rank": {}}, trust_env=False)
    assert answer.json()["reason"] == reason, answer.text


class Trainer:
    """A training job in a process of its own, joined with one rank of a seed; it ends with the block."""

    GROUP = "training"

    def __init__(self, seed: Server, folder: Path) -> None:
        self._seed, self._folder = seed, folder
        self._block = lend()
        self._num_pushed = 0
        port = self._block.take()
        self.program = subprocess.Popen(
            [sys.executable, "-m", "support.trainer", str(port), self.GROUP],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            text=True,
        )
        place = {"master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": 2}
        change(seed, "/init_weights_update_group", **place, group_name=self.GROUP, backend="gloo")

    def push(self, tensors: Tensors, **body: Any) -> httpx.Response:
        """One call of an update, with what it announces broadcast."""
        self._num_pushed += 1
        path = self._folder / f"push-{self._num_pushed}.safetensors"
        save_file(dict(tensors), path)
        named = load_file(path)  # in the order in which the other process sends them
        assert self.program.stdin is not None
        if self.program.poll() is None:
            self.program.stdin.write(f"{path}\n")
            self.program.stdin.flush()
        return request(
            self._seed,
            "/update_weights_from_distributed",
            names=list(named),
            dtypes=[str(t.dtype).removeprefix("torch.") for t in named.values()],
            shapes=[list(t.shape) for t in named.values()],
            group_name=self.GROUP,
            **body,
        )

    def kill(self) -> None:
        self.program.kill()
        self.program.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.program.stdin is not None
        self.program.stdin.close()
        self._block.release()


CHECKPOINT_ENGINE = """
import zmq

def update_weights_from_ipc(context, handle, device_id, *, run, post_hook=None):
    socket = context.socket(zmq.REP)
    socket.connect(handle)
    try:
        while (weights := socket.recv_pyobj()) is not None:
            run(weights)
            socket.send(b"")
        post_hook()
        socket.send(b"")
    except Exception:
        socket.send(b"failed")
        raise
    finally:
        socket.close()
"""
"""A stand-in for `checkpoint_engine.worker`, which takes tensors by CUDA or NPU handles and refuses any other device:
here they come whole.
"""


def install_checkpoint_engine(folder: Path) -> None:
    """Make the stand-in what servers that run in `folder` import."""
    package = folder / "checkpoint_engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "worker.py").write_text(CHECKPOINT_ENGINE)


def push_over_ipc(seed: Server, folder: Path, parts: Sequence[Tensors], **body: Any) -> httpx.Response:
    """One `/update_weights_from_ipc`, with `parts` handed over one after the other while the rank takes them."""
    handle = f"ipc://{folder / 'checkpoint'}"

    def hand_over() -> None:
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 60_000)
            socket.bind(handle)
            for part in (*(list(p.items()) for p in parts), None):
                socket.send_pyobj(part)
                if socket.recv():
                    return

    thread = threading.Thread(target=hand_over)
    thread.start()
    answer = request(seed, "/update_weights_from_ipc", zmq_handles={f"GPU-{platform.machine()}": handle}, **body)
    thread.join()
    return answer

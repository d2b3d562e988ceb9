"""Changing the weights of a running seed, and what it grants meanwhile."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import httpx
import torch

from rfork.binding import Binding
from rfork.fence import read_fence
from support.forking import status
from support.outside import fence_page, lease_on
from support.server import Server


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

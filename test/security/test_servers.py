"""Real servers of a fleet with a key: the fleet forks, a stranger does not, and the key is to be seen nowhere."""

from __future__ import annotations

import httpx
import pytest
from support.forking import ENV, SEED, fork_from, rfork_lines, serving, settled, start_seed, status, weights
from support.models import Models
from support.server import Fleet, Server

from rfork.tls import Tls
from rfork.wire.collective import INIT_PATH, SEND_PATH

from . import KEY
from .conftest import Authority
from .test_seed_door import ADDRESS

pytestmark = pytest.mark.server

STOCK = "/get_remote_instance_transfer_engine_info?rank=0"


def test_the_fleet_forks_a_stranger_loads_from_disk_and_nobody_sees_key_or_address(
    fleet: Fleet, models: Models
) -> None:
    """The seed has two HTTP workers, which hand tickets and proofs on."""
    keyed = {**ENV, "RFORK_KEY": KEY}
    model = models.path("llama")
    seed = start_seed(fleet, model, "--tokenizer-worker-num", "2", env=keyed)
    shown = seed.get("/rfork/v1/status")
    assert (shown.json()["ticket_wanted"], shown.json()["listener"]) == (True, None)
    assert not ADDRESS.search(shown.content)
    assert (seed.get(STOCK).status_code, seed.get(STOCK).json()["error"]["reason"]) == (403, "ticket_wanted")

    fork = settled(fleet.start(model, *fork_from(seed.port), env=keyed))
    assert weights(fork)["source"] == "seed"
    assert weights(fork)["seed"]["instance_id"] == status(seed)["instance_id"]
    assert weights(fork)["seed"]["address"] == ""
    assert fork.generate() == seed.generate()

    for path in (INIT_PATH, SEND_PATH):
        assert (seed.post(path).status_code, seed.post(path).json()["reason"]) == (401, "unauthorized")
    grouped = settled(fleet.start(model, *fork_from(seed.port, backend="nccl"), env=keyed))
    assert (weights(grouped)["source"], weights(grouped)["protocol"]) == ("seed", "gloo"), weights(grouped)
    assert grouped.generate() == seed.generate()
    grouped.kill()

    stranger = settled(fleet.start(model, *fork_from(seed.port), env=ENV))
    assert (weights(stranger)["source"], weights(stranger)["fallback_reason"]) == ("checkpoint", "unauthorized")
    assert any("set `key_file` (or `key`) here too" in line for line in rfork_lines(stranger))
    assert stranger.generate() == seed.generate()

    for server in (seed, fork):
        info = next(a for a in (server.get("/server_info"), server.get("/get_server_info")) if a.status_code == 200)
        argv = [word for process in server.processes() for word in process.cmdline()]
        assert KEY not in "".join([info.text, server.log(), *argv, server.get("/rfork/v1/status").text])


def test_one_command_line_with_https_on_every_port_starts_the_first_server_and_the_next(
    fleet: Fleet, models: Models, authority: Authority
) -> None:
    """SGLang's own --ssl flags on its port, rfork's certificate on the listener, one private authority, and a key."""
    shown = authority.issue("server", "IP:127.0.0.1")
    env = {
        **ENV,
        "RFORK_KEY": KEY,
        "RFORK_CA_FILE": authority.ca_file,
        "RFORK_TLS_CERT_FILE": shown.cert_file,
        "RFORK_TLS_KEY_FILE": shown.key_file,
    }
    ssl = ("--ssl-certfile", shown.cert_file, "--ssl-keyfile", shown.key_file, "--ssl-ca-certs", authority.ca_file)

    def start(*flags: str) -> Server:
        server = fleet.start(models.path("llama"), *ssl, *flags, env=env, wait=False)
        server.http.close()
        verify = Tls(authority.ca_file).context()
        server.http = httpx.Client(base_url=f"https://{server.address}", trust_env=False, verify=verify, timeout=60)
        return server.wait_until_ready()

    seed = settled(serving(start(SEED)))
    fork = settled(start(*fork_from(seed.port)))
    assert weights(fork)["source"] == "seed", weights(fork)
    assert any("at https://127.0.0.1:" in line for line in rfork_lines(fork))
    assert fork.generate() == seed.generate()

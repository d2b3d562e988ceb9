"""What an SGLang without R-Fork gets: exactly the stock body where it is right, else a status code and the reason."""

import gzip
import json

import pytest
from support.seed_node import until
from support.seed_rank import STOCK_TABLE, BufferShard

from rfork.identity import RankIdentity
from rfork.seed.stock import stock_reply


def reason(reply, status):
    code, headers, body = reply
    assert (code, headers["Content-Type"]) == (status, "application/json")
    error = json.loads(body)["error"]
    assert error["message"]
    return error["reason"]


def test_body_is_exactly_the_stock_one(serving):
    status, headers, body = stock_reply(serving.node, "0", False)
    session_id = serving.node.shard_of_rank(0).published.binding.endpoints[0].session_id
    table = {name: list(entry) for name, entry in STOCK_TABLE.items()}
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {"rank": 0, "remote_instance_transfer_engine_info": [session_id, table]}


def test_gzip_carries_the_same_body(serving):
    _, headers, body = stock_reply(serving.node, "0", True)
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == stock_reply(serving.node, "0", False)[2]


@pytest.mark.parametrize("text", [None, "", "-1", "x", "1.0", "0x1", "9" * 40, "٣", " 0", "0 "])
def test_what_is_no_rank_is_a_bad_request(serving, text):
    assert reason(stock_reply(serving.node, text, True), 400) == "bad_rank"


def test_unknown_rank_is_not_found(serving):
    assert reason(stock_reply(serving.node, "7", True), 404) == "unknown_rank"


def test_before_health_and_during_a_change_it_says_when_to_come_again(seed):
    agent = seed.start().add()
    reply = stock_reply(seed.node, "0", True)
    assert (reason(reply, 503), reply[1]["Retry-After"]) == ("not_ready", "2")
    seed.node.ready()
    seed.wait("serving")
    with agent.changing("update"):
        seed.wait("paused")
        assert reason(stock_reply(seed.node, "0", True), 503) == "paused"


def test_what_a_stock_client_would_misread_is_refused_with_the_reason(seed):
    why = "pipeline stages share rank numbers"
    seed.start().add(stock_table=lambda: why)
    seed.node.ready()
    seed.wait("serving")
    reply = stock_reply(seed.node, "0", True)
    assert reason(reply, 409) == "not_for_stock_clients"
    assert why in reply[2].decode()


def test_instance_that_is_no_seed_says_so(make_seed):
    seed = make_seed(seed="off")
    seed.node.start()
    assert reason(stock_reply(seed.node, "0", True), 409) == "not_a_seed"


def test_table_follows_the_weights_to_their_new_place(seed):
    seed.start()
    shard = BufferShard(RankIdentity())
    agent = seed.add(shard, stock_table=lambda: {"w": (shard.buffer.address, 64, 1)})
    seed.node.ready()
    seed.wait("serving")
    with agent.changing("update"):
        shard.move(seed=3)
    until(lambda: seed.node.status_reply().generation == 4 and seed.node.state.value == "serving")
    body = json.loads(stock_reply(seed.node, "0", False)[2])
    assert body["remote_instance_transfer_engine_info"][1]["w"][0] == shard.buffer.address

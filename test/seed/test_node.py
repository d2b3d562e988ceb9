"""The node over its real listener: who may read, who is refused, and with which words."""

from rfork.manifest import decode_manifest


def refusal(response, status, reason):
    assert response.status_code == status, response.text
    body = response.json()
    assert body["reason"] == reason
    assert body["message"]
    return body


def test_a_lease_hands_out_manifest_digests_and_binding(serving):
    reply = serving.lease()
    assert reply.status_code == 201
    body = reply.json()
    assert body["instance_id"] == serving.node.instance_id
    assert body["generation"] == 2 == body["binding"]["generation"]
    assert body["ttl_s"] == 30
    manifest = serving.http.get(body["manifest_path"])
    assert decode_manifest(manifest.content).digest == body["manifest_digest"]
    assert manifest.headers["content-encoding"] == "gzip"
    assert serving.http.get(body["digests_path"]).status_code == 200

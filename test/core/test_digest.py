"""Digests: pinned, sensitive to every byte and place, and equal on host and device."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.every_kind import CPU, holder, resolved

from rfork.digest import MIX64, XXH3, digest_chunks, digest_groups, first_difference, mix64_bytes
from rfork.errors import UnsupportedModel
from rfork.wire.seed import DigestTable

MASK = (1 << 64) - 1
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mix64_by_definition(data: bytes) -> int:
    """mix64-1 word by word, as its definition reads."""
    total = len(data) * 0xD6E8FEB86659FD93
    padded = data + bytes(-len(data) % 8)
    for i in range(0, len(padded), 8):
        x = int.from_bytes(padded[i : i + 8], "little") ^ ((i // 8 + 1) * 0x9E3779B97F4A7C15 & MASK)
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            x = x * factor & MASK
            x ^= x >> 32
        total += x
    return total & MASK


def test_both_algorithms_are_pinned() -> None:
    """A change of these values is a change of the protocol."""
    data = torch.arange(20, dtype=torch.uint8)
    spans = [(data.data_ptr(), 20)]
    assert [f"{v:016x}" for v in digest_chunks(spans, CPU, XXH3)] == ["287caa944e605ead"]
    assert [f"{v:016x}" for v in digest_chunks(spans, CPU, MIX64)] == ["64c9444f021eeeaf"]
    assert mix64_bytes(b"") == 0


@given(st.binary(max_size=100))
def test_the_fast_form_follows_the_definition(data: bytes) -> None:
    assert mix64_bytes(data) == mix64_by_definition(data)


def test_blocks_of_the_fast_form_join_seamlessly() -> None:
    data = torch.randint(0, 256, (8 * 65536 * 2 + 13,), dtype=torch.uint8).numpy().tobytes()
    assert mix64_bytes(data) == mix64_by_definition(data)


@pytest.mark.parametrize("algorithm", [XXH3, MIX64])
@given(data=st.binary(min_size=1, max_size=64), at=st.integers(0), by=st.integers(1, 255))
def test_any_changed_byte_shows(algorithm: str, data: bytes, at: int, by: int) -> None:
    changed = bytearray(data)
    changed[at % len(data)] ^= by
    one, two = (torch.frombuffer(bytearray(d), dtype=torch.uint8) for d in (data, changed))
    spans = [(t.data_ptr(), t.nbytes) for t in (one, two)]
    first, second = digest_chunks(spans, CPU, algorithm)
    assert first != second


@given(st.lists(st.integers(0, MASK), min_size=2, max_size=8, unique=True), st.randoms())
def test_moved_words_show(words: list[int], random) -> None:
    moved = words.copy()
    random.shuffle(moved)
    packed = [b"".join(w.to_bytes(8, "little") for w in ws) for ws in (words, moved)]
    assert (mix64_bytes(packed[0]) == mix64_bytes(packed[1])) == (words == moved)


def test_zeros_of_different_lengths_differ() -> None:
    assert len({mix64_bytes(bytes(n)) for n in range(200)}) == 200


def test_many_large_spans_are_digested_side_by_side_in_order() -> None:
    data = torch.randint(0, 256, (1 << 25,), dtype=torch.uint8)
    spans = [(data.data_ptr() + i * (1 << 22), 1 << 22) for i in range(8)]
    assert digest_chunks(spans, CPU) == [digest_chunks([s], CPU)[0] for s in spans]


def test_many_small_spans_are_digested_in_batches_in_order() -> None:
    data = torch.randint(0, 256, (1 << 25,), dtype=torch.uint8)
    spans = [(data.data_ptr() + i * 5000, 5000 - i % 3) for i in range(6700)]
    assert digest_chunks(spans, CPU) == [v for s in spans for v in digest_chunks([s], CPU)]


def test_groups_may_be_digested_as_they_arrive() -> None:
    shard = resolved(holder(**{f"w{i}": torch.arange(i * 3000 + 1) for i in range(5)}))
    whole = shard.digests(4096)
    digests = shard.begin_digests(4096)
    for groups in ([3, 1], [], [0], [2]):
        digests.feed(groups)
    assert digests.table().values == (*whole.values[:4], ())


def test_a_table_has_one_value_per_chunk_of_each_group() -> None:
    shard = resolved(holder(a=torch.ones(4096 + 1, dtype=torch.uint8), b=torch.zeros(8), empty=torch.empty(0)))
    table = shard.digests(4096)
    assert (table.algorithm, table.chunk_nbytes) == ("xxh3-64", 4096)
    assert [len(row) for row in table.values] == [2, 1]
    assert shard.digests(4096, groups=[1]).values == ((), table.values[1])


@pytest.mark.parametrize("chunk_nbytes", [0, -8, 4095, 4100])
def test_silly_chunk_sizes_are_refused(chunk_nbytes: int) -> None:
    with pytest.raises(ValueError, match="chunk_nbytes"):
        resolved(holder(a=torch.ones(1))).digests(chunk_nbytes)


def test_a_device_without_digests_says_so() -> None:
    with pytest.raises(UnsupportedModel, match="verify=off"):
        digest_chunks([(1, 1)], torch.device("meta"))
    with pytest.raises(UnsupportedModel, match="can't compute xxh3-64"):
        digest_chunks([(1, 1)], torch.device("cuda"), XXH3)


def test_equal_tables_have_no_difference() -> None:
    one, two = (resolved(holder(a=torch.arange(9), b=torch.ones(3))) for _ in range(2))
    assert first_difference(one.digests(), two.digests(), one.manifest) is None


def test_a_difference_names_tensor_and_chunk() -> None:
    one, two = (resolved(holder(a=torch.ones(3), w=torch.zeros(3000))) for _ in range(2))
    two.tensors["w"][2048] = 1
    text = first_difference(one.digests(4096), two.digests(4096), one.manifest)
    assert text is not None
    assert text.startswith("w (float32[3000]): chunk 3 of 3 (bytes 8192 to 12000) has digest ")
    assert first_difference(one.digests(4096), two.digests(4096), one.manifest, groups=[0]) is None


def test_a_difference_in_shared_memory_names_the_tensor_that_holds_the_bytes() -> None:
    def build() -> torch.nn.Module:
        storage = torch.zeros(3000)
        return holder(all=storage, tail=storage[2048:])

    one, two = resolved(build()), resolved(build())
    two.tensors["tail"][5] = 1
    text = first_difference(one.digests(4096), two.digests(4096), one.manifest)
    assert text is not None
    assert text.startswith("tail (float32[952]) and 1 that share its memory: chunk 3 of 3")


def test_what_is_not_proven_counts_as_different() -> None:
    shard = resolved(holder(a=torch.ones(3), b=torch.ones(3)))
    full = shard.digests()

    def against(**changes: object) -> str | None:
        fields = {"algorithm": full.algorithm, "chunk_nbytes": full.chunk_nbytes, "values": full.values} | changes
        return first_difference(full, DigestTable(**fields), shard.manifest)

    assert against() is None
    assert "can't be compared" in (against(algorithm="mix64-1") or "")
    assert "can't be compared" in (against(chunk_nbytes=4096) or "")
    assert "for a manifest of 2" in (against(values=full.values[:1]) or "")
    assert "b (float32[3]): 1 digests here and 0 there, 1 expected" in (against(values=(full.values[0], ())) or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself runs here, see the tests below")
def test_the_kernel_gives_what_the_definition_gives() -> None:
    """The device kernel, run by Triton's interpreter on host memory: unaligned starts, tails, many pieces."""
    pytest.importorskip("triton")
    script = """
        import numpy as np, torch
        from rfork.digest import device, host
        data = torch.randint(0, 256, (5000,), dtype=torch.uint8)
        cuts = [(0, 8), (0, 4096), (3, 1), (3, 7), (5, 8), (5, 9), (1, 1000), (7, 4001), (16, 4092), (1, 6), (0, 1)]
        spans = np.array([(data.data_ptr() + at, nbytes) for at, nbytes in cuts])
        for device._PIECE_WORDS in (64, 1 << 17):
            rows, starts = device.piece_table(spans)
            out = torch.zeros(len(rows), dtype=torch.int64)
            device.mix64_pieces[(len(rows),)](torch.from_numpy(rows), out, BLOCK=128)
            got = device.chunk_digests(out.numpy().view(np.uint64), starts, spans)
            assert got == [host.mix64(*s) for s in spans.tolist()], got
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment)


@cuda
def test_device_and_host_give_the_same_digests() -> None:
    device = torch.device("cuda:0")
    data = torch.randint(0, 256, ((64 << 20) + 77,), dtype=torch.uint8, device=device)
    cuts = [(0, data.nbytes), (0, 1), (3, 7), (5, 1 << 20), (9, (1 << 21) + 5), (8, 64 << 20), (1, 8), (64, 4096)]
    on_host = data.cpu()
    torch.cuda.synchronize()
    here = digest_chunks([(data.data_ptr() + at, n) for at, n in cuts], device)
    there = digest_chunks([(on_host.data_ptr() + at, n) for at, n in cuts], CPU, MIX64)
    assert here == there


@cuda
def test_device_digests_need_no_memory_of_the_weights_size() -> None:
    device = torch.device("cuda:0")
    weights = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    address = (weights.data_ptr(),)
    digest_groups(address, (weights.nbytes,), device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    digest_groups(address, (weights.nbytes,), device)
    assert torch.cuda.max_memory_allocated(device) - before < 1 << 20


@cuda
def test_device_digests_wait_for_the_current_stream_only() -> None:
    device = torch.device("cuda:0")
    weights, busy = torch.zeros(1 << 20, dtype=torch.uint8, device=device), torch.cuda.Stream(device)
    digest_groups((weights.data_ptr(),), (weights.nbytes,), device)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4_000_000_000)
    weights.fill_(1)
    table = digest_groups((weights.data_ptr(),), (weights.nbytes,), device)
    assert not busy.query()
    assert table.values == ((mix64_bytes(b"\1" * (1 << 20)),),)

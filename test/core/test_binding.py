"""Binding: every byte of the plan is read exactly once, into the right place, and no read crosses a region's edge."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.binding import Binding, Region, RegionIndex, Slice, bind
from rfork.manifest import TransferPlan


def plan_of(*group_nbytes: int) -> TransferPlan:
    return TransferPlan(group_nbytes=group_nbytes, set_states=(), set_inline=())


def binding(addresses: list[int], group_nbytes: list[int], regions: list[Region], fence: int = 1_000_000) -> Binding:
    return Binding(
        manifest_digest="d",
        generation=2,
        regions=(*regions, Region(fence, 64)),
        addresses=tuple(addresses),
        group_nbytes=tuple(group_nbytes),
        fence_address=fence,
        fence_nbytes=64,
    )


def test_neighbours_on_both_sides_are_read_at_once() -> None:
    ours = binding([100, 110], [10, 20], [Region(100, 30)])
    theirs = binding([500, 510], [10, 20], [Region(500, 30)])
    assert bind(plan_of(10, 20), ours, theirs, max_slice_nbytes=1000) == [Slice(100, 500, 30)]


def test_neighbours_on_one_side_only_are_read_apart() -> None:
    ours = binding([100, 120], [10, 10], [Region(100, 30)])
    theirs = binding([500, 510], [10, 10], [Region(500, 20)])
    assert bind(plan_of(10, 10), ours, theirs, max_slice_nbytes=1000) == [Slice(100, 500, 10), Slice(120, 510, 10)]


def test_neighbours_of_two_allocations_are_read_apart() -> None:
    ours = binding([100, 110], [10, 10], [Region(100, 20)])
    theirs = binding([500, 510], [10, 10], [Region(500, 10), Region(510, 10)])
    assert bind(plan_of(10, 10), ours, theirs, max_slice_nbytes=1000) == [Slice(100, 500, 10), Slice(110, 510, 10)]


def test_gaps_that_are_nobodys_are_read_over() -> None:
    """Allocators round sizes up: between two small tensors lie bytes that belong to neither, on both sides alike."""
    ours = binding([100, 116], [10, 10], [Region(100, 30)])
    theirs = binding([500, 516], [10, 10], [Region(500, 30)])
    assert bind(plan_of(10, 10), ours, theirs, max_slice_nbytes=99, slack=[6, 6]) == [Slice(100, 500, 26)]
    assert len(bind(plan_of(10, 10), ours, theirs, max_slice_nbytes=99, slack=[5, 6])) == 2


def test_gaps_that_differ_or_lie_between_regions_are_not_read_over() -> None:
    ours = binding([100, 116], [10, 10], [Region(100, 30)])
    wider = binding([500, 517], [10, 10], [Region(500, 30)])
    apart = binding([500, 516], [10, 10], [Region(500, 12), Region(512, 20)])
    for theirs in (wider, apart):
        slices = bind(plan_of(10, 10), ours, theirs, max_slice_nbytes=99, slack=[9, 9])
        assert [s.nbytes for s in slices] == [10, 10]


def test_a_group_over_several_regions_is_cut_at_the_edges_of_both_sides() -> None:
    ours = binding([100], [30], [Region(100, 12), Region(112, 18)])
    theirs = binding([500], [30], [Region(490, 15), Region(505, 100)])
    assert bind(plan_of(30), ours, theirs, max_slice_nbytes=1000) == [
        Slice(100, 500, 5),
        Slice(105, 505, 7),
        Slice(112, 512, 18),
    ]


def test_long_runs_are_cut_to_the_links_taste() -> None:
    ours, theirs = binding([100], [25], [Region(100, 25)]), binding([500], [25], [Region(500, 25)])
    assert bind(plan_of(25), ours, theirs, max_slice_nbytes=10) == [
        Slice(100, 500, 10),
        Slice(110, 510, 10),
        Slice(120, 520, 5),
    ]


def test_reads_come_in_the_order_of_the_seeds_memory() -> None:
    ours = binding([100, 200], [10, 10], [Region(100, 200)])
    theirs = binding([900, 500], [10, 10], [Region(500, 500)])
    assert [s.remote for s in bind(plan_of(10, 10), ours, theirs, max_slice_nbytes=10)] == [500, 900]


@st.composite
def layouts(draw: st.DrawFn, group_nbytes: list[int]) -> tuple[list[int], list[Region]]:
    """Groups somewhere in memory, in any order, with gaps or none, in regions cut anywhere."""
    order = draw(st.permutations(range(len(group_nbytes))))
    addresses, at, edges = [0] * len(group_nbytes), 1000, []
    starts = []
    for g in order:
        at += draw(st.sampled_from([0, 0, 1, 7]))
        addresses[g] = at
        starts.append(at)
        at += group_nbytes[g]
    cuts = draw(st.sets(st.integers(1000, at), max_size=6)) | {1000, at}
    edges = sorted(cuts)
    return addresses, [Region(a, b - a) for a, b in itertools.pairwise(edges)]


@given(st.data(), st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50))
def test_every_byte_is_read_exactly_once_into_the_right_place(
    data: st.DataObject, sizes: list[int], limit: int
) -> None:
    local, local_regions = data.draw(layouts(sizes))
    remote, remote_regions = data.draw(layouts(sizes))
    ours, theirs = binding(local, sizes, local_regions), binding(remote, sizes, remote_regions)

    slices = bind(plan_of(*sizes), ours, theirs, max_slice_nbytes=limit)

    reads = Counter((s.local + i, s.remote + i) for s in slices for i in range(s.nbytes))
    expected = Counter(
        (here + i, there + i) for here, there, n in zip(local, remote, sizes, strict=True) for i in range(n)
    )
    assert reads == expected
    for part in slices:
        assert 0 < part.nbytes <= limit
        RegionIndex(ours.regions).find(part.local, part.nbytes)
        RegionIndex(theirs.regions).find(part.remote, part.nbytes)


@given(st.data(), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_without_a_limit_no_two_reads_could_be_one(data: st.DataObject, sizes: list[int]) -> None:
    local, local_regions = data.draw(layouts(sizes))
    remote, remote_regions = data.draw(layouts(sizes))
    ours, theirs = binding(local, sizes, local_regions), binding(remote, sizes, remote_regions)
    slices = bind(plan_of(*sizes), ours, theirs, max_slice_nbytes=1 << 30)
    edges = {r.base for r in (*local_regions, *remote_regions)}
    for left, right in itertools.pairwise(slices):
        joined = left.remote + left.nbytes == right.remote and left.local + left.nbytes == right.local
        assert not joined or edges & {right.local, right.remote}


def test_bytes_outside_every_region_are_refused_at_birth() -> None:
    for regions in ([Region(100, 9)], [Region(101, 20)], [Region(100, 5), Region(106, 10)]):
        with pytest.raises(ValueError, match="in no registered region"):
            binding([100], [10], regions)


def test_a_fence_outside_every_region_is_refused_at_birth() -> None:
    with pytest.raises(ValueError, match="in no registered region"):
        Binding("d", 2, (Region(100, 10),), (100,), (10,), fence_address=200, fence_nbytes=64)


def test_overlapping_regions_groups_or_fences_are_refused_at_birth() -> None:
    with pytest.raises(ValueError, match="regions overlap"):
        binding([100], [10], [Region(100, 10), Region(105, 10)])
    with pytest.raises(ValueError, match="bytes at 0x64"):
        binding([100, 105], [10, 10], [Region(100, 30)])
    with pytest.raises(ValueError, match="overlap"):
        Binding("d", 2, (Region(100, 99),), (100,), (10,), fence_address=105, fence_nbytes=64)


@pytest.mark.parametrize(("address", "nbytes"), [(1 << 62, 1), (1 << 70, 1), (100, 1 << 63), (-1, 4), (100, -4)])
def test_numbers_that_no_memory_has_are_refused_at_birth(address: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"0 and 2\*\*62"):
        binding([address], [nbytes], [Region(100, 1 << 40)])


def test_a_group_without_an_address_is_refused_at_birth() -> None:
    with pytest.raises(ValueError, match="2 groups but 1 addresses"):
        binding([100], [10, 10], [Region(100, 30)])


@pytest.mark.parametrize(("base", "nbytes"), [(0, 1), (-1, 1), (1, 0), (1, -1)])
def test_an_empty_or_null_region_is_refused(base: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="positive base and size"):
        Region(base, nbytes)


def test_a_plan_of_other_groups_is_not_bound() -> None:
    one = binding([100], [10], [Region(100, 10)])
    with pytest.raises(ValueError, match="same groups"):
        bind(plan_of(11), one, one, max_slice_nbytes=10)
    with pytest.raises(ValueError, match="max_slice_nbytes"):
        bind(plan_of(10), one, one, max_slice_nbytes=0)

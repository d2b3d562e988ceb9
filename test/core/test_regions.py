"""Regions cover every wanted byte, never join two allocations, and are registered once."""

import itertools

import pytest
import torch
from support.every_kind import holder, resolved

from rfork.binding import Region, RegionIndex
from rfork.errors import UnsupportedModel
from rfork.regions import Span, host_regions, segment_regions, span_of

KIB = 1024


def test_tensors_of_one_storage_are_one_region() -> None:
    storage = torch.zeros(1000, dtype=torch.uint8)
    shard = resolved(holder(a=storage[10:20], b=storage[500:600]))
    assert shard.regions == (Region(storage.data_ptr() + 10, 590),)


def test_two_storages_stay_two_regions_even_if_they_touch() -> None:
    assert host_regions([Span(100, 200, 100, "a"), Span(200, 300, 200, "b")]) == (Region(100, 100), Region(200, 100))


def test_storages_over_the_same_memory_are_one_region() -> None:
    assert host_regions([Span(100, 200, 100, "a"), Span(150, 300, 150, "b")]) == (Region(100, 200),)


def test_bytes_behind_a_tensor_in_host_memory_are_never_taken_for_nobodys() -> None:
    """Only CUDA's caching allocator is known to keep whole blocks for one storage."""
    assert span_of("w", torch.ones(3)).slack == 0


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 6).t(), torch.ones(4, 6)[:, 1:3], torch.ones(3, 1, 2).expand(3, 5, 2)]
)
def test_a_span_reaches_from_the_first_byte_to_the_last_that_strides_reach(tensor: torch.Tensor) -> None:
    offsets = [
        sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*(range(n) for n in tensor.shape))
    ]
    span = span_of("w", tensor)
    assert (span.start, span.end - span.start) == (tensor.data_ptr(), 4 * (max(offsets) + 1))


def test_regions_include_the_fence_page() -> None:
    page = torch.zeros(4096, dtype=torch.uint8)
    shard = resolved(holder(a=torch.ones(1)))
    RegionIndex(shard.regions_for([page])).find(page.data_ptr(), 4096)


def segment(address: int, nbytes: int, **more: object) -> dict[str, object]:
    return {"address": address, "total_size": nbytes, "device": 0, "is_expandable": False, **more}


def test_a_segment_is_registered_from_its_base_to_the_last_wanted_byte() -> None:
    spans = [Span(4608, 5000, 0, "a"), Span(4096 + 512, 4096 + 900, 0, "b"), Span(9000, 9100, 0, "c")]
    segments = [segment(8192, 4096), segment(4096, 4096)]
    assert segment_regions(spans, segments) == (Region(4096, 5000 - 4096), Region(8192, 9100 - 8192))


def test_a_segment_without_wanted_bytes_is_not_registered() -> None:
    assert segment_regions([], [segment(4096, 4096)]) == ()


@pytest.mark.parametrize("span", [Span(100, 200, 0, "w"), Span(8000, 8200, 0, "w"), Span(9000, 9001, 0, "w")])
def test_bytes_outside_the_allocator_are_refused_by_name_and_setting(span: Span) -> None:
    with pytest.raises(UnsupportedModel, match=r"w at .* lies in no segment(.|\n)*cudaMallocAsync"):
        segment_regions([span], [segment(4096, 4096)])


def test_expandable_segments_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(UnsupportedModel, match=r"w lies in an expandable segment.*unset expandable_segments:True"):
        segment_regions([Span(4096, 4097, 0, "w")], [segment(4096, 4096, is_expandable=True)])

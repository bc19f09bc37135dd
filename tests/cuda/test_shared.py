"""Fields of shared memory: where they lie, and what a block needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_impl.cuda.shared import BARRIER, Field, Layout

sizes = st.integers(1, 9)
fields = st.tuples(
    st.lists(sizes, min_size=1, max_size=3).map(tuple),
    st.sampled_from([np.uint8, np.float16, np.float32, np.int32, BARRIER]),
    st.sampled_from([1, 2, 4, 8, 16, 128]),
)


def test_places():
    """The second begins at its alignment, the third at its element's size; the end is that of the last."""
    layout = Layout(
        Field("halves", (3, 5), np.float16),
        Field("row", (2, 4), np.float32, align=16),
        Field("byte", (1,), np.uint8),
        Field("barriers", (2,), BARRIER),
    )
    places = layout.places
    assert places._fields == ("halves", "row", "byte", "barriers")
    assert (places.halves.at, places.halves.step, places.halves.size) == (0, 10, 30)
    assert (places.row.at, places.row.step, places.row.size) == (32, 16, 32)
    assert (places.byte.at, places.byte.step, places.byte.size) == (64, 1, 1)
    assert (places.barriers.at, places.barriers.step, places.barriers.size) == (72, 8, 16)
    assert layout.bytes == 88


@given(st.lists(fields, min_size=1, max_size=8))
def test_fields_are_aligned_and_apart(drawn):
    declared = [Field(f"field{i}", *field) for i, field in enumerate(drawn)]
    layout = Layout(*declared)
    end = 0
    for field, place in zip(declared, layout.places, strict=True):
        assert place.at % field.align == place.at % np.dtype(field.dtype).itemsize == 0
        assert end <= place.at < end + max(field.align, np.dtype(field.dtype).itemsize), "overlaps, or leaves a gap without need"
        assert place.size == np.zeros(field.shape, field.dtype).nbytes
        assert place.step * field.shape[0] == place.size
        end = place.at + place.size
    assert layout.bytes == end


def test_two_fields_have_two_names():
    layout = Layout(Field("a", (1,), np.int32), Field("a", (1,), np.int32))
    with pytest.raises(ValueError, match="duplicate"):
        _ = layout.places

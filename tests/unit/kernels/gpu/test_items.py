"""Work lists and block tables of the GPU kernels, which need no GPU to be made."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.kernels.gpu.work_list import ALIGN, ITEM_BITS, align, cut_pieces, lay_out_pages, pack

LENGTHS = st.lists(st.integers(0, 5000), min_size=1, max_size=30)


@given(LENGTHS, st.sampled_from([128, 512, 1024]))
def test_pieces_cover_every_key_once_and_come_longest_first(lengths, piece_tokens):
    first_B, item_I = cut_pieces(np.array(lengths), piece_tokens)
    place_I, piece_I = item_I >> ITEM_BITS, item_I & (1 << ITEM_BITS) - 1
    keys = [
        (place, key)
        for place, piece in zip(place_I.tolist(), piece_I.tolist(), strict=True)
        for key in range(piece * piece_tokens, min((piece + 1) * piece_tokens, lengths[place]))
    ]
    assert sorted(keys) == [
        (place, key) for place, length in enumerate(lengths) for key in range(length)
    ]
    tokens_I = np.minimum(np.array(lengths)[place_I] - piece_I * piece_tokens, piece_tokens)
    assert (np.diff(tokens_I) <= 0).all() and (tokens_I > 0).all()
    assert sorted((first_B[place_I] + piece_I).tolist()) == list(range(len(item_I))), (
        "a place in the scratch each"
    )


@given(LENGTHS, st.sampled_from([16, 64, 128]))
def test_every_token_has_a_slot_of_its_own(lengths, page_tokens):
    table_SP, num_pages = lay_out_pages(np.array(lengths), page_tokens)
    slots = [
        (int(table_SP[s, at // page_tokens]), at % page_tokens)
        for s, length in enumerate(lengths)
        for at in range(length)
    ]
    assert len(set(slots)) == len(slots) and all(page < num_pages for page, _ in slots)
    assert num_pages * page_tokens < sum(lengths) + len(lengths) * page_tokens or not num_pages
    assert (table_SP >= 0).all() and (table_SP < max(1, num_pages)).all()


@given(st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9), max_size=6))
def test_arrays_sent_together_are_whole_and_each_begins_on_16_bytes(values):
    flat, spans = pack([np.array(array, dtype=np.int64) for array in values])
    assert flat.dtype == np.int32 and [flat[span].tolist() for span in spans] == values
    assert all(span.start * flat.itemsize % 16 == 0 for span in spans)
    assert len(flat) <= sum(len(array) + ALIGN - 1 for array in values)
    assert all(
        align(len(array)) % ALIGN == 0 and align(len(array)) - len(array) in range(ALIGN)
        for array in values
    )

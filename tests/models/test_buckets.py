"""Texts that share a pass: none is lost, none sees another, and each begins at position 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmill.models.buckets import apart, arrays, bucket_for, columns, encoder_mask, packed_texts

from . import tiny_encoders


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 60))
def test_every_text_has_a_pass_with_room_for_it(counts: list[int], longest: int) -> None:
    passes = packed_texts(counts, longest)
    assert sorted(i for one in passes for i in one) == list(range(len(counts)))
    sizes = [sum(counts[i] for i in one) for one in passes]
    assert all(0 < size <= longest for size in sizes)
    assert sum(size * 2 <= longest for size in sizes) <= 1  # two half-empty passes would have been one


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([None, 1, 3]))
def test_a_token_sees_its_own_text_only(counts: list[int], band: int | None) -> None:
    bucket = 24
    mask = encoder_mask(bucket, counts, band)[0, 0]
    texts = [text for text, count in enumerate(counts) for _ in range(count)]
    for t, mine in enumerate(texts):
        seen = [s for s, other in enumerate(texts) if other == mine and (band is None or abs(s - t) <= band)]
        assert np.flatnonzero(mask[t] == 0).tolist() == seen
    assert (mask == 0).any(-1).all()  # a row of nothing would divide by zero


def test_every_text_begins_at_position_0() -> None:
    table = {"inv_freq": [1.0, 0.5], "scale": 1.0}
    found = arrays({"rope": {"rope": table}, "band": None}, 8, [3, 2])["rope_sin"]
    assert np.allclose(found[:5, 0], np.sin([0, 1, 2, 0, 1]), atol=1e-6)


def test_rows_come_back_to_their_texts() -> None:
    texts = [np.full((n, 2), n, np.float32) for n in (3, 1, 2)]
    x = columns(texts, 8)
    assert x.shape == (1, 2, 8, 1) and not x[:, :, 6:].any()
    assert all(np.array_equal(a, b) for a, b in zip(apart(x[0, :, :, 0].T, [3, 1, 2]), texts, strict=True))


def test_too_many_tokens_have_no_bucket() -> None:
    assert bucket_for([32, 128], 33) == 128
    with pytest.raises(ValueError, match="129 tokens"):
        bucket_for([32, 128], 129)


@pytest.mark.parametrize("model_type", sorted(tiny_encoders.TINY))
def test_texts_that_share_a_pass_are_what_transformers_makes_of_each(model_type: str) -> None:
    model = tiny_encoders.tiny_model(model_type)
    blocks = tiny_encoders.Blocks(tiny_encoders.described(model), dict(model.state_dict()))
    text = tiny_encoders.tiny_text(30)
    texts = [text[:11], text[11:12], text[12:]]
    for found, tokens in zip(blocks.run_together(texts, 48), texts, strict=True):
        expected = torch.from_numpy(tiny_encoders.expected(model, tokens))
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)

"""What a producer declares about a prompt, and what a consumer may register."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from zfabric.errors import ConfigError
from zfabric.shapes import (
    COMPONENTS_MAX,
    TOKENS_MAX,
    Contract,
    Shape,
    check_name,
    component_hash,
    round_up_tokens,
    signature_of,
)


@given(st.integers(0, TOKENS_MAX))
def test_rounding_up_is_the_least_multiple_of_eight(length: int) -> None:
    rounded = round_up_tokens(length)
    assert rounded % 8 == 0
    assert rounded - 8 < length <= rounded


@given(st.lists(st.integers(0, 2**64 - 1), max_size=5))
def test_signature_hashes_the_words_in_order(hashes: list[int]) -> None:
    packed = b"".join(struct.pack("<Q", value) for value in hashes)
    assert signature_of(hashes) == xxhash.xxh3_64_intdigest(packed)


def test_same_components_in_another_order_are_another_shape() -> None:
    assert Shape.of("m", "a", "b").signature != Shape.of("m", "b", "a").signature


def test_joined_components_are_another_shape() -> None:
    assert Shape.of("m", "ab").signature != Shape.of("m", "a", "b").signature


def test_text_and_its_utf8_bytes_are_the_same_component() -> None:
    assert component_hash("é") == component_hash("é".encode())


def test_token_counts_take_no_part_in_the_signature() -> None:
    assert Shape.of("m", "a", tokens=[7]).signature == Shape.of("m", "a").signature


def test_prefix_is_unknown_as_soon_as_one_component_is() -> None:
    assert Shape.of("m", "a", "b", tokens=[7, 5]).prefix_tokens == 12
    assert Shape.of("m", "a", "b", tokens=[7, None]).prefix_tokens is None
    assert Shape.of("m", "a").prefix_tokens is None
    assert Shape("m").prefix_tokens == 0


def test_shape_with_too_many_components_or_too_few_counts_is_refused() -> None:
    Shape("m", tuple(range(COMPONENTS_MAX)))
    with pytest.raises(ConfigError):
        Shape("m", tuple(range(COMPONENTS_MAX + 1)))
    with pytest.raises(ConfigError):
        Shape("m", (1, 2), (5,))


@pytest.mark.parametrize("count", [-1, 2**31, 1.0, "7", True])
def test_token_count_that_cannot_travel_is_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match="token count"):
        Shape.of("m", "a", tokens=[count])


def test_lists_make_the_same_shape_as_tuples() -> None:
    given: Any = [1, 2]
    assert hash(Shape("m", given, given)) == hash(Shape("m", (1, 2), (1, 2)))


@pytest.mark.parametrize("name", ["", "a\nb", "a\x00", "x" * 256, "é" * 128, "\ud800"])
def test_name_that_cannot_be_a_label_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name, "model name")


@pytest.mark.parametrize("name", ["m", "x" * 255, "Qwen/Qwen3-0.6B", "modèle 1"])
def test_printable_name_passes_unchanged(name: str) -> None:
    assert check_name(name, "model name") == name


@pytest.mark.parametrize(
    "numbers",
    [(0, 100, 8), (1, 0, 8), (1, 100, 0), (65_537, 100, 8), (True, 100, 8), (1, 1.5, 8)],
)
def test_contract_number_out_of_range_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        Contract(*numbers)


def test_contract_must_hold_its_longest_input_padded() -> None:
    Contract(1, 104, 97)
    with pytest.raises(ConfigError):
        Contract(1, 103, 97)

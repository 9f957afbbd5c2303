"""Windows, soft-capping and sinks: the CPU's attention against the numpy oracle, and bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_rig import CacheRig, relative_error
from kvq.layout import KVLayout
from kvq.schedules.attention_variant import AttentionVariant

P = 32
#: One of each scheme; a window before, on and after the end of a page, and one that ends in the row's own.
CASES = [
    (KVLayout(2, 1, 64, 4, 4, P), 2, AttentionVariant(window=2 * P)),
    (KVLayout(2, 2, 64, 3, 3, P), 3, AttentionVariant(window=P + 1, softcap=4.0)),
    (KVLayout(1, 2, 64, None, None, P), 1, AttentionVariant(window=P - 1, sinks=True)),
    (KVLayout(1, 1, 64, None, None, P, row_dtype="float32"), 4, AttentionVariant(window=1)),
    (KVLayout(1, 1, 64, None, None, P), 2, AttentionVariant(softcap=4.0, sinks=True)),
]
WINDOWED, GROUP, WINDOW = CASES[0]


@pytest.mark.parametrize(("layout", "group", "variant"), CASES, ids=[variant.suffix for *_, variant in CASES])
def test_attention_of_every_variant(layout: KVLayout, group: int, variant: AttentionVariant) -> None:
    """A ragged batch whose rows come to every place of a page; scores are wide enough for a cap to matter."""
    rig = CacheRig(layout, group, layer=layout.num_layers - 1, variant=variant, query_gain=4.0)
    for requests in (
        [("a", 150)],
        [("a", 70), ("b", 40)],
        [("b", 1), ("a", 61)],
        *[[("a", 1), ("b", 1)]] * 3,
    ):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


def run(chunks: list[int], length: int, **options: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one sequence in chunks, all but the last from the list; their outputs and the sealed words."""
    rig = CacheRig(WINDOWED, GROUP, variant=WINDOW, seed=5, **options)
    qkv = rig.random_rows(length)
    rig.cache.add_sequence("a")
    rig.cache.add_sequence("b")
    outputs, start = [], 0
    while start < length:
        count = min(chunks.pop(0) if chunks else length, length - start)
        company = [("b", 3)] if count > 1 else []
        rows = np.concatenate([rig.random_rows(3 * len(company)), qkv[start : start + count]])
        outputs.append(rig.step([*company, ("a", count)], rows)[-count:])
        start += count
    return np.concatenate(outputs), rig.pool[list(rig.cache.sequence("a").pages), 0]


def test_same_bits_for_any_chunking_batch_split_and_thread_count() -> None:
    length = 380  # the last rows have splits that lie before the window, in part and whole
    whole, words = run([], length, threads=1)
    for chunks, threads, slots in (
        ([7] * 20, 2, 64),
        ([64, 33, 190], 4, 64),
        ([360] + [1] * 20, 8, 64),
        ([360] + [1] * 20, 8, 1),
    ):
        outputs, sealed = run(list(chunks), length, threads=threads, slots=slots)
        np.testing.assert_array_equal(outputs, whole)
        np.testing.assert_array_equal(sealed, words)


def test_released_pages_are_not_read() -> None:
    """Pages before the window are given back and overwritten; later rows are the same, to the bit."""
    outputs = []
    for release in (False, True):
        rig = CacheRig(WINDOWED, GROUP, variant=WINDOW, seed=6)
        qkv = rig.random_rows(420)
        rig.cache.add_sequence("a")
        rig.step([("a", 300)], qkv[:300])
        if release:
            before = list(rig.cache.sequence("a").pages)
            assert rig.cache.release_unseen("a") == (300 + 1 - 2 * P) // P == 7
            rig.pool[before[:7]] = 0x7E007E00  # NaN as two halves, and as scales
        outputs.append([rig.step([("a", n)], qkv[at : at + n]) for at, n in ((300, 90), (390, 1), (391, 29))])
        assert rig.cache.sequence("a").first_page == 7 * release
    for kept, released in zip(*outputs, strict=True):
        np.testing.assert_array_equal(kept, released)

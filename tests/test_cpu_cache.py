"""The CPU's cache kernels: plain code, and the same bits however steps are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_backends import CpuBackend
from kernel_rig import CacheRig, relative_error
from kvq.layout import KVLayout


def test_plain_kernels_for_any_cpu():
    rig = CacheRig(KVLayout(1, 2, 64, 4, 3), 2, backend=CpuBackend("O0"))
    for requests in ([("a", 140)], [("a", 1)]):
        out, expected = rig.append(requests)
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(("k_bits", "v_bits"), [(None, None), (4, 4), (3, 2)])
def test_same_bits_for_any_chunking_batch_and_thread_count(k_bits, v_bits):
    """A row's output and the sealed words do not depend on the step it came in, or on its company."""
    length, layout = 700, KVLayout(1, 1, 64, k_bits, v_bits)
    qkv = CacheRig(layout, 2, seed=5).random_rows(length)
    results = []
    for chunks, company, threads in (
        ([length], 0, 1),
        ([1], 0, 8),
        ([7], 0, 2),
        ([64], 5, 2),
        ([500], 30, 4),
    ):
        rig = CacheRig(layout, 2, threads=threads)
        outputs, start, turn = [], 0, 0
        rig.cache.add_sequence("a")
        if company:
            rig.cache.add_sequence("b")
        while start < length and (chunks != [1] or start < 140 or length - start < 3):
            count = min(chunks[turn % len(chunks)], length - start)
            rows = qkv[start : start + count]
            requests = [("a", count)]
            if company and start + count < 600:
                requests = [("b", company), *requests]
                rows = np.concatenate([rig.random_rows(company), rows])
            outputs.append(rig.step(requests, rows)[-count:])
            start, turn = start + count, turn + 1
        pages = list(rig.cache.sequence("a").pages)
        results.append((np.concatenate(outputs), rig.pool[pages]))
    whole, words = results[0]
    for output, sealed in results[1:]:
        np.testing.assert_array_equal(output, whole[: len(output)])
        np.testing.assert_array_equal(sealed, words[: len(sealed)])


def test_split_rows_have_the_bits_of_whole_ones():
    """Decode over many pages is cut into splits where there is room for their results."""
    qkv = CacheRig(KVLayout(1, 1, 64, 4, 4), 2, seed=6).random_rows(901)
    outputs = []
    for slots in (1, 64):
        rig = CacheRig(KVLayout(1, 1, 64, 4, 4), 2, slots=slots)
        rig.cache.add_sequence("a")
        rig.step([("a", 500)], qkv[:500])
        rig.step([("a", 400)], qkv[500:900])
        outputs.append(rig.step([("a", 1)], qkv[900:]))
        assert rig.plan.plan_counts[3] == (slots > 1)
    np.testing.assert_array_equal(outputs[0], outputs[1])

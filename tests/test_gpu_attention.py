"""How the portable attention shares its work; what it computes is in ``test_kernels_cache``."""

from __future__ import annotations

import pytest

from kvq.errors import CompileError, ConfigError
from kvq.layout import KVLayout
from kvq.schedules.gpu.attention_tile import make_tile
from kvq.schedules.gpu.decode_tile import DecodeTile, decode_tile
from kvq.schedules.gpu.limits import GpuLimits

LEAST = GpuLimits(threads=256, shared_bytes=16384)


def layouts():
    for dim in range(64, 257, 8):
        for page in (32, 64, 128):
            for k_bits, v_bits in ((4, 4), (8, 2), (None, None)):
                try:
                    yield KVLayout(1, 1, dim, k_bits, v_bits, page)
                except ConfigError:
                    assert dim * page % 512, "only what fills no chunk is refused"


def test_every_geometry_fits_the_least_gpu():
    for layout in layouts():
        for group in range(1, 17):
            tile = make_tile(layout, group, LEAST)
            assert tile.shared_bytes <= LEAST.shared_bytes
            assert tile.rows >= 1 and tile.rows * group <= tile.states
            # what a thread holds stays in registers
            assert tile.tokens * tile.team_states <= 16


def test_decode_has_a_tile_of_its_own_wherever_one_fits():
    for layout in layouts():
        for group in range(1, 17):
            tile = decode_tile(layout, group, LEAST)
            if tile is None:  # the general kernel decodes
                assert group > 4
                continue
            assert tile.shared_bytes <= LEAST.shared_bytes
            assert tile.blocks * tile.heads >= group and tile.pages * tile.blocks <= tile.crews
            assert layout.page_size // 16 * tile.heads <= 16
    assert decode_tile(KVLayout(1, 8, 128), 32, LEAST) == DecodeTile(KVLayout(1, 8, 128), 4, 4, 4)


@pytest.mark.parametrize(
    ("limits", "group", "message"),
    [
        (GpuLimits(128, 16384), 4, "workgroups of 256 threads: the GPU has 128"),
        (GpuLimits(256, 8192), 4, "bytes of shared memory: the GPU has 8192"),
        (LEAST, 33, "33 query heads a KV head is not supported with pages of 64: at most 32"),
    ],
)
def test_what_does_not_fit_is_refused(limits, group, message):
    with pytest.raises(CompileError, match=message):
        make_tile(KVLayout(1, 1, 128), group, limits)

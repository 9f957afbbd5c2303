"""Where a sealed page stores its key channels, and their scales, from its header: one warp, no memory.

Channels are stored in RoPE pairs, sorted by the width of their codes (:mod:`kvq.quantization.fragments`).
Lane ``l`` answers for the pairs ``n l .. n l + n - 1``: it reads their bits of the header, and ballots tell
it how many pairs of each width come before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kvq.layout import BASE_BITS, SCALE_BIAS, KVLayout
from kvq.schedules.statements import put

from .fragments import UNIT_EXPONENT, Codes
from .mma import WARP, ballot, bytes_of, count_bits, load_shared, u32

#: ``scale code * 64 + this`` is the scale as an fp16 number, times 2**-14, in both halves of a word.
_ONE_EXPONENT = 0x04000400


@dataclass(frozen=True)
class HeaderWords:
    """What a lane read of a page: bits of wider and of narrower pairs, the base, its pairs' scale codes."""

    kinds: list
    base: tuple
    codes: Any


class KeyPairs:
    """Statements for pages of quantized keys that stand in shared memory.

    Parameters
    ----------
    layout : KVLayout
    scale_at, v_scale_at : int
        Bytes from the start of a page to its K scales, and to its V scales and what follows them.
    lane : expression
        int32.

    Attributes
    ----------
    per_lane, lanes : int
        Pairs of a lane, and lanes that have any.
    """

    def __init__(self, layout: KVLayout, scale_at: int, v_scale_at: int, lane) -> None:
        self.layout, self.codes = layout, Codes.keys(layout)
        self.scale_at, self.v_scale_at = scale_at, v_scale_at
        self.half = layout.head_dim // 2
        self.per_lane = pairs_per_lane(layout)
        self.lanes = self.half // self.per_lane
        self.lane = T.bind(T.min(lane, self.lanes - 1)) if self.lanes < WARP else lane
        self.inside = lane < self.lanes
        self.before = T.bind(T.shift_left(u32(1), T.cast(lane, "uint32")) - u32(1))
        self.bytes_before = T.bind(T.cast(self.lane * self.per_lane, "uint32"))

    def key_factor(self, base):
        """Power of two that turns products of codes and scaled queries into scores, from a page's base."""
        exponent = 127 - SCALE_BIAS + 14 - self.codes.largest_offset - UNIT_EXPONENT
        return T.bind(T.reinterpret("float32", T.shift_left(base + u32(exponent), u32(23))))

    def load(self, stage) -> HeaderWords:
        """Ask for what :meth:`places` and :meth:`scales` take; they come later, behind other loads."""
        layout, loaded = self.layout, {}
        codes = T.alloc_local([2], "uint32")
        kinds = [
            self._load_bits(stage, kind * self.half, self.per_lane, self.lane, self.lanes, loaded)
            for kind in range(2 if len(layout.k_classes) > 1 else 0)
        ]
        first = layout.k_header_bits - BASE_BITS
        base = self._load_bits(stage, first, 1, T.bitwise_and(self.lane, 7), 8, loaded)
        address = T.bind(stage + self.bytes_before)
        for part in range(2):
            at = self.scale_at + part * self.half
            load_shared(codes, part, 1, address, at, f"u{8 * self.per_lane}")
        return HeaderWords(kinds, base, codes)

    def _load_bits(self, stage, first: int, count: int, lane, lanes: int, loaded: dict):
        """Ask for header bits ``first + count lane + j``, ``j < count``: words, and the first one's place."""
        layout, page = self.layout, self.layout.page_size
        index = first + lane * count
        words = T.alloc_local([max(1, count // 2)], "uint32")
        if not layout.header_in_v_scales:
            own = 4 * (layout.k_header_offset - layout.v_scale_offset)
            address = stage + T.cast(T.shift_right(index, 5) * 4, "uint32")
            load_shared(words, 0, 1, T.bind(address), self.v_scale_at + own)
            return words, T.bind(T.cast(T.bitwise_and(index, 31), "uint32"))
        if first // page == (first + count * lanes - 1) // page:
            token, bit = lane * count + first % page, u32(first // page)
            known = (first % page, count, lanes)
        else:
            token, bit = T.truncmod(index, page), T.bind(T.cast(T.truncdiv(index, page), "uint32"))
            known = (first, count, lanes)
        if known in loaded:
            return loaded[known], bit
        loaded[known] = words
        address = T.bind(stage + T.cast(token * 2, "uint32"))
        if count == 1:
            load_shared(words, 0, 1, address, self.v_scale_at, "u16")
        else:
            load_shared(words, 0, count // 2, address, self.v_scale_at)
        return words, bit

    def _flags(self, found, count: int) -> list:
        """The bits asked for, as 0 or 1."""
        words, bit = found
        step = 16 if self.layout.header_in_v_scales else 1
        per_word = 2 if step == 16 else count
        return [
            T.bind(T.bitwise_and(T.shift_right(words[j // per_word], bit + u32(j % per_word * step)), u32(1)))
            for j in range(count)
        ]

    def places(self, header: HeaderWords):
        """The page's base, and ``(stored position, bits)`` of each of the lane's pairs, uint32."""
        layout, n = self.layout, self.per_lane
        base = T.bind(T.bitwise_and(ballot(self._flags(header.base, 1)[0]), u32(2**BASE_BITS - 1)))
        number = [self.bytes_before + u32(j) for j in range(n)]
        if len(layout.k_classes) == 1:
            return base, [(place, u32(layout.k_bits)) for place in number]
        wide, narrow = (channels // 2 for _, channels in (layout.k_classes[0], layout.k_classes[2]))
        flags = [self._flags(kind, n) for kind in header.kinds]
        if self.lanes < WARP:
            flags = [[T.bind(T.Select(self.inside, flag, u32(0))) for flag in kind] for kind in flags]
        counts = []
        for kind in flags:
            count = u32(0)
            for flag in kind:
                count = count + count_bits(T.bitwise_and(ballot(flag), self.before))
            counts.append(T.bind(count))
        wider, narrower = counts
        places = []
        for j in range(n):
            w, s = flags[0][j], flags[1][j]
            middle = number[j] - wider - narrower + u32(wide)
            place = T.Select(
                w != u32(0), wider, T.Select(s != u32(0), narrower + u32(self.half - narrow), middle)
            )
            # a page that nobody sealed must not lead beyond the places there are
            place = T.bind(T.min(place, u32(self.half - 1)))
            places.append((place, T.bind(u32(layout.k_bits) + w - s)))
            wider, narrower = T.bind(wider + w), T.bind(narrower + s)
        return base, places

    def scales(self, header: HeaderWords, places):
        """Scales of the lane's pairs, a half for each channel, the factor of odd pairs taken out: words."""
        n, codes = self.per_lane, header.codes
        scales = T.alloc_local([n], "uint32")
        for j, (place, bits) in enumerate(places):
            zero = n if n < 4 else j  # a byte of the first word that is zero, if there is one
            bytes_of(scales, j, codes[0], codes[1], j | zero << 4 | (4 + j) << 8 | zero << 12)
            if n == 4:
                put(scales, T.bitwise_and(scales[j], u32(0x00FF00FF)), j)
            exponent = u32(1 + self.codes.largest_offset)
            if self.codes.largest_offset:
                odd = T.bitwise_and(T.shift_right(place, u32(2)), u32(1))
                exponent = exponent - odd * bits
            put(scales, scales[j] * u32(64) + exponent * u32(_ONE_EXPONENT), j)
        return scales


def pairs_per_lane(layout: KVLayout) -> int:
    """Pairs of channels that a lane answers for."""
    return next(n for n in (1, 2, 4) if n * WARP >= layout.head_dim // 2)

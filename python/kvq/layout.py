"""KVLayout: the one place that knows how the KV cache is laid out, to the bit.

A *page* holds ``page_size`` consecutive tokens of one sequence, for all layers and KV heads. A
sealed page of one layer and head is one contiguous *unit* of 32-bit words::

    [ K codes | K scale codes | K minimums | V codes | V scales | (K header) ]

``K codes``       word ``[chunk, b, lane]``: lane ``l`` of 16 carries tokens ``16 q + l``; its codes,
                  ordered by channel then ``q``, are packed 32 at a time into ``b`` words. Where widths
                  are mixed, the channels of one width lie together, widest first.
``K scale codes`` one byte a channel: 4 exponent bits, 4 mantissa bits.
``K minimums``    one fp16 a channel.
``V codes``       word ``[chunk, b, channel]``: 32 consecutive tokens of one channel in ``b`` words.
``V scales``      one signed fp16 a token; their lowest bits are the *K header*.
``K header``      where widths are mixed, a bit for each pair of channels that is wider than ``k_bits`` and
                  one for each that is narrower; last the base of the K scales (8 bits). Bit ``i`` is bit
                  ``i // P`` of the V scale of token ``i % P``. It has words of its own where V has no
                  scales to carry it.

A K scale is ``(1 + m/16) * 2**(e + base - SCALE_BIAS)`` for the code ``16 e + m``.

Rows that are not sealed live in *row pages* (the open pages and the step's workspace): K as
``[head_dim, page_size]``, V as ``[page_size, head_dim]``. An unquantized component of a sealed page
is stored just so.

That is the order ``lanes``, for vector units. In the order ``fragments``, for tensor cores, scales and
minimums stand as above and codes in the order of :mod:`kvq.quantization.fragments`, fp16 components
too; row pages hold K as ``[page_size, head_dim]``, as V; and every section is a multiple of 16 bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import gcd

from kvq.errors import ConfigError

#: Tokens side by side in the lanes of a vector of K.
K_LANES = 16
#: Codes that are packed together: 32 codes of b bits fill exactly b words.
CODES_PER_CHUNK = 32
#: Tokens and channels of a tile of the order ``fragments``: operand A of mma.m16n8k16.
FRAGMENT_TILE = 16
#: Bits of the K base.
BASE_BITS = 8
#: Most bits of the K header in one V scale: the scale is then at most 3% larger than it would be.
MAX_CARRIED_BITS = 5
#: Exponent bias of a K scale.
SCALE_BIAS = 80
#: Smallest exponent of the largest K scale of a page: keeps every scale finite and non-zero.
SCALE_MIN_EXPONENT = -40

_ITEMSIZE = {"float16": 2, "float32": 4}


def _block_tokens(head_dim: int, outer: int) -> int:
    """Tokens whose tiles of ``outer`` channels, and of all, are a multiple of 4, the tiles of a chunk."""
    return FRAGMENT_TILE * 4 // gcd(4, outer // FRAGMENT_TILE, head_dim // FRAGMENT_TILE)


@dataclass(frozen=True)
class KVLayout:
    """Geometry and storage of a paged KV cache.

    Attributes
    ----------
    num_layers, num_kv_heads, head_dim : int
        Geometry of the model's attention.
    k_bits, v_bits : int or None
        Width of a code (8, 4, 3 or 2); None keeps the component's rows in ``row_dtype``.
    page_size : int
        Tokens in a page: 32, 64 or 128.
    row_dtype : str
        ``float16`` or ``float32``: dtype of rows that are not sealed, and of unquantized pages.
    order : str
        ``lanes`` (CPU) or ``fragments`` (tensor cores): where a code lies within its page.
    mixed_keys : bool
        Give a quarter of a page's channels one bit more than ``k_bits`` and a quarter one bit less, where
        codes have 2 to 4 bits. Channels ``c`` and ``c + head_dim / 2``, a RoPE pair, have one width.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    k_bits: int | None = 4
    v_bits: int | None = 4
    page_size: int = 64
    row_dtype: str = "float16"
    order: str = "lanes"
    mixed_keys: bool = True

    def __post_init__(self) -> None:
        if self.page_size not in (32, 64, 128):
            raise ConfigError(f"page size {self.page_size} is not supported: use 32, 64 or 128")
        if self.head_dim % 8 or self.head_dim > 256:
            raise ConfigError(
                f"head_dim {self.head_dim} is not supported: it must be a multiple of 8, at most 256"
            )
        if self.order not in ("lanes", "fragments"):
            raise ConfigError(f"order {self.order!r} is not supported: use lanes or fragments")
        if self.order == "fragments" and self.head_dim % FRAGMENT_TILE:
            raise ConfigError(
                f"head_dim {self.head_dim} is not supported on tensor cores: it must be a multiple of 16"
            )
        if (self.k_bits or self.order == "fragments") and self.head_dim * self.page_size % self._chunk_values:
            raise ConfigError(
                f"head_dim {self.head_dim} needs a page size of 64 or 128, not {self.page_size}"
            )
        if self.row_dtype not in _ITEMSIZE:
            raise ConfigError(f"row dtype {self.row_dtype!r} is not supported: use float16 or float32")
        if self.row_dtype != "float16" and (self.k_bits or self.v_bits):
            raise ConfigError("a quantized cache keeps its open rows in float16")

    @property
    def _chunk_values(self) -> int:
        """Values whose codes are packed by one vector, or one warp, at once."""
        return (K_LANES if self.order == "lanes" else 32) * CODES_PER_CHUNK

    # ---- the unit: one sealed page of one layer and one KV head --------------------------------
    @property
    def values_per_unit(self) -> int:
        """Values of K (or of V) in one unit."""
        return self.page_size * self.head_dim

    def _component_words(self, bits: int | None) -> int:
        if bits is None:
            return self.values_per_unit * _ITEMSIZE[self.row_dtype] // 4
        return self.values_per_unit * bits // 32

    @property
    def k_code_words(self) -> int:
        """Words of K codes (or raw K rows) in a unit."""
        return self._component_words(self.k_bits)

    @property
    def k_classes(self) -> tuple[tuple[int, int], ...]:
        """(bits, channels) of the widths of K codes, in the order in which they are stored."""
        bits, dim = self.k_bits or 0, self.head_dim
        step = FRAGMENT_TILE if self.order == "fragments" else self._chunk_values // self.page_size
        outer = dim // (4 * step) * step if self.mixed_keys and bits in (2, 3, 4) else 0
        while outer and self.order == "fragments" and _block_tokens(dim, outer) > self.page_size:
            outer -= step
        if not outer:
            return ((bits, dim),)
        return ((bits + 1, outer), (bits, dim - 2 * outer), (bits - 1, outer))

    @property
    def k_block_tokens(self) -> int:
        """Tokens whose key codes of every width fill whole words in the order ``fragments``."""
        outer = self.k_classes[0][1] if len(self.k_classes) > 1 else 0
        return min(_block_tokens(self.head_dim, outer), self.page_size)

    @property
    def v_code_words(self) -> int:
        """Words of V codes (or raw V rows) in a unit."""
        return self._component_words(self.v_bits)

    @property
    def k_scale_offset(self) -> int:
        """Word at which the K scale codes start (one byte a channel)."""
        return self.k_code_words

    @property
    def k_min_offset(self) -> int:
        """Word at which the K minimums start (one fp16 a channel)."""
        return self.k_scale_offset + (self.head_dim // 4 if self.k_bits else 0)

    @property
    def v_offset(self) -> int:
        """Word at which the V codes (or raw V rows) start."""
        return self.k_min_offset + (self.head_dim // 2 if self.k_bits else 0)

    @property
    def v_scale_offset(self) -> int:
        """Word at which the V scales start (one signed fp16 a token)."""
        return self.v_offset + self.v_code_words

    @property
    def k_header_bits(self) -> int:
        """Bits of the K header."""
        if self.k_bits is None:
            return 0
        return BASE_BITS + (self.head_dim if len(self.k_classes) > 1 else 0)

    @property
    def header_in_v_scales(self) -> bool:
        """Whether the K header is carried by the lowest bits of the V scales."""
        room = MAX_CARRIED_BITS * self.page_size if self.v_bits else 0
        return 0 < self.k_header_bits <= room

    @property
    def k_header_offset(self) -> int:
        """Word at which the K header starts where it has words of its own."""
        return self.v_scale_offset + (self.page_size // 2 if self.v_bits else 0)

    @property
    def unit_words(self) -> int:
        """32-bit words of one unit."""
        own = 0 if self.header_in_v_scales else -(-self.k_header_bits // 32)
        return self.k_header_offset + (own if self.order == "lanes" else -(-own // 4) * 4)

    @property
    def bits_per_value(self) -> float:
        """Bits stored per cached value in sealed pages, everything included."""
        return self.unit_words * 32 / (2 * self.values_per_unit)

    # ---- shapes and bytes of what is allocated -------------------------------------------------
    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of the pool of sealed pages, uint32."""
        return (num_pages, self.num_layers, self.num_kv_heads, self.unit_words)

    def open_shape(self, num_open: int) -> tuple[int, ...]:
        """Shape of the open pages, ``row_dtype``; axis 3 is (K, V)."""
        return (num_open, self.num_layers, self.num_kv_heads, 2, self.values_per_unit)

    def workspace_shape(self, num_workspace: int) -> tuple[int, ...]:
        """Shape of the step's workspace of row pages, shared by all layers, ``row_dtype``."""
        return (num_workspace, self.num_kv_heads, 2, self.values_per_unit)

    @property
    def page_bytes(self) -> int:
        """Bytes of one sealed page: all layers, all heads, K and V."""
        return self.num_layers * self.num_kv_heads * self.unit_words * 4

    @property
    def workspace_page_bytes(self) -> int:
        """Bytes of one row page of the workspace (one layer)."""
        return self.num_kv_heads * 2 * self.values_per_unit * _ITEMSIZE[self.row_dtype]

    @property
    def open_page_bytes(self) -> int:
        """Bytes of one open page (all layers)."""
        return self.num_layers * self.workspace_page_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Sealed pages needed by a sequence of ``num_tokens``: its full pages."""
        return num_tokens // self.page_size

    def workspace_pages_for(self, num_rows: int) -> int:
        """Workspace pages that ``num_rows`` consecutive new rows of one sequence may need.

        The rows of the first page they touch stand in the sequence's open page.
        """
        return max(0, -(-(num_rows - 1) // self.page_size))

    def to_dict(self) -> dict[str, int | str | None]:
        """A JSON-ready description; the inverse of ``KVLayout(**d)``."""
        return asdict(self)

"""Vocabulary of the tensor-core kernels: the PTX they use, as statements that plain functions emit.

A warp's lane is ``4 g + c``. Operand A of ``mma.m16n8k16`` lies in four registers of two halves (rows g and
g + 8, columns 2c and 2c + 8, with their right neighbours), B in two (rows 2c and 2c + 8 and the ones below,
column g), the fp32 result in four (rows g and g + 8, columns 2c and 2c + 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

#: Lanes of a warp.
WARP = 32
LOG2E = 1.4426950408889634

_ALL = 0xFFFFFFFF
#: ``(a & b) | c`` as the table of lop3.
_AND_OR = 0xEA
#: What PTX calls the types of operands that tensor cores multiply into fp32 sums.
PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}
_COPY = "cp.async.cg.shared.global.L2::128B"


def emit(call):
    """Make a statement of a call."""
    T.evaluate(call)


def u32(value):
    """A uint32 constant."""
    return T.uint32(value)


def mma(acc, at: int, a: Sequence, b: Sequence, fresh: bool = False, dtype: str = "float16"):
    """``acc[at : at + 4] (+)= A B`` of operands in ``dtype``; ``fresh`` starts from zero."""
    registers, kind = [acc[at + i] for i in range(4)], PTX_TYPES[dtype]
    name = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    emit(T.ptx[name](*registers, *a, *b, *([T.float32(0)] * 4 if fresh else registers)))


def transpose(dst, at: int, word):
    """``dst[at]``: the 8x8 matrix of halves whose rows the lanes hold in ``word``, by columns."""
    emit(T.ptx["movmatrix.sync.aligned.m8n8.trans.b16"](dst[at], word))


def exp2(dst, at: int, x):
    """``dst[at] = 2**x``; 0 for -inf."""
    emit(T.ptx["ex2.approx.ftz.f32"](dst[at], x))


def half2(dst, at: int, low, high):
    """``dst[at]``: two float32 as halves."""
    emit(T.ptx["cvt.rn.f16x2.f32"](dst[at], high, low))


def mul_half2(dst, at: int, a, b):
    """``dst[at] = a * b`` for two halves in each word."""
    emit(T.ptx["mul.rn.f16x2"](dst[at], a, b))


def bytes_of(dst, at: int, a, b, selector):
    """``dst[at]``: four bytes picked from ``a`` (0-3) and ``b`` (4-7), the lowest nibble first."""
    selector = u32(selector) if isinstance(selector, int) else selector
    emit(T.ptx["prmt.b32"](dst[at], a, b, selector))


def bits_or(dst, at: int, word, mask: int, added):
    """``dst[at] = word & mask | added`` in one instruction, for ``added`` in a register."""
    emit(T.ptx["lop3.b32"](dst[at], word, u32(mask), added, _AND_OR))


def _vector(prefix: str, count: int, kind: str) -> str:
    return f"{prefix}.{kind}" if count == 1 else f"{prefix}.v{count}.{kind}"


def load_shared(dst, at: int, count: int, address, offset: int = 0, kind: str = "u32"):
    """``dst[at : at + count]`` from shared memory at byte ``address + offset``."""
    registers = [dst[at + i] for i in range(count)]
    emit(T.ptx[_vector("ld.shared", count, kind)](*registers, T.ptx.addr(address, offset)))


def load_matrices(dst, at: int, address, offset: int = 0):
    """``dst[at : at + 4]``: four 8x8 matrices of halves, operand B of two products; a lane names a row."""
    registers = [dst[at + i] for i in range(4)]
    emit(T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](*registers, T.ptx.addr(address, offset)))


def load_global(dst, at: int, count: int, pointer, offset: int = 0, kind: str = "u32", cache: str = ""):
    """``dst[at : at + count]`` from memory at byte ``pointer + offset``; ``cache`` such as ``.cg``."""
    registers = [dst[at + i] for i in range(count)]
    emit(T.ptx[_vector(f"ld.global{cache}", count, kind)](*registers, T.ptx.addr(pointer, offset)))


def store_shared(address, offset: int, values: Sequence, kind: str = "f32"):
    """Store consecutive values in shared memory at byte ``address + offset``."""
    emit(T.ptx[_vector("st.shared", len(values), kind)](T.ptx.addr(address, offset), *values))


def store_global(pointer, offset: int, values: Sequence, kind: str = "f32"):
    """Store consecutive values at byte ``pointer + offset``."""
    emit(T.ptx[_vector("st.global", len(values), kind)](T.ptx.addr(pointer, offset), *values))


def copy_async(address, offset: int, pointer, source_offset: int):
    """Start copying 16 bytes from memory to shared memory."""
    emit(T.ptx[_COPY](T.ptx.addr(address, offset), T.ptx.addr(pointer, source_offset), 16))


def copies_commit():
    """Close the group of copies started so far."""
    emit(T.ptx["cp.async.commit_group"]())


def copies_wait(pending: int):
    """Wait until at most ``pending`` groups of this thread are under way."""
    emit(T.ptx["cp.async.wait_group"](pending))


def shuffle_xor(value, mask: int):
    """The value of lane ``lane ^ mask``."""
    return T.tvm_warp_shuffle_xor(u32(_ALL), value, mask, WARP, WARP)


def shuffle(value, lane):
    """The value of ``lane``."""
    return T.tvm_warp_shuffle(u32(_ALL), value, lane, WARP, WARP)


def ballot(flag):
    """A bit for each lane: whether its ``flag`` is not 0."""
    return T.bind(T.call_extern("uint32", "__ballot_sync", u32(_ALL), T.cast(flag, "int32")))


def count_bits(word):
    """How many bits of a uint32 are set, uint32."""
    return T.cast(T.call_extern("int32", "__popc", word), "uint32")


def any_lane(condition):
    """Whether ``condition`` holds in any lane."""
    return T.cuda.any_sync(u32(_ALL), T.if_then_else(condition, 1, 0)) != 0


def warp_sync():
    """Order the shared memory accesses of the warp's lanes."""
    emit(T.cuda.warp_sync())


def block_sync():
    """Order the shared memory accesses of the block's threads."""
    emit(T.cuda.cta_sync())

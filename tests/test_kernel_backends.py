"""The backends of the kernel tests themselves: arguments, launches, barriers, and what they must notice."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as builder

from kernel_backends import BACKENDS, present
from kvq.schedules.gpu.block import ATTRIBUTES, launch, shared, sync
from kvq.schedules.statements import put, run, when

_THREADS, _WIDTH = 32, 64
_GPUS = [pytest.param(b, id=b.name) for b in BACKENDS if b.name != "cpu"]
#: Those whose host code the tests run themselves: TVM's own checks arguments otherwise.
_EMULATED = [gpu for gpu in _GPUS if gpu.id != "vulkan"]


def reverse_and_scale(reach: int = _WIDTH):
    """Rows reversed through shared memory and scaled, where there are three rows or more; then one added."""
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        n = IRBuilder.name("n", T.int64())
        x = builder.arg("x", T.Buffer((n, _WIDTH), "float16"))
        layer = builder.arg("layer", T.int64())
        scale = builder.arg("scale", T.float32())
        out = builder.arg("out", T.Buffer((n, 2, _WIDTH), "float32"))
        rows = T.bind(T.cast(n, "int32"))

        def reverse():
            with launch([2, rows], _THREADS) as (half, row, thread):
                values = shared((_THREADS,), "float32")
                put(values, T.cast(x[row, half * _THREADS + thread], "float32"), thread)
                sync()
                place = T.bind(half * _THREADS + thread)
                put(out, values[_THREADS - 1 - thread] * scale, row, T.cast(layer, "int32"), place)

        def add():
            with launch([rows], _WIDTH // 4) as (row, thread):
                for which in range(2):
                    at = run(thread * 4 + (reach - _WIDTH), 4)
                    T.buffer_store(out, out[row, which, at] + T.broadcast(T.float32(1), 4), [row, which, at])

        when(rows >= 3, reverse)
        add()
    return script.get()


@pytest.mark.parametrize("gpu", _GPUS)
def test_several_launches_under_conditions(gpu):
    kernel = present(gpu).build(reverse_and_scale())
    rng = np.random.default_rng(0)
    for n in (2, 5):
        x = rng.random((n, _WIDTH)).astype(np.float16)
        out = rng.random((n, 2, _WIDTH)).astype(np.float32)
        expected = out + 1
        if n >= 3:
            halves = x.astype(np.float32).reshape(n, 2, _THREADS)[..., ::-1]
            expected[:, 1] = halves.reshape(n, _WIDTH) * np.float32(2.5) + 1
        kernel(x, 1, 2.5, out)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("gpu", _EMULATED)
def test_arguments_that_do_not_fit(gpu):
    kernel = present(gpu).build(reverse_and_scale())
    x, out = np.zeros((3, _WIDTH), np.float16), np.zeros((3, 2, _WIDTH), np.float32)
    for arguments, message in (
        ((x.astype(np.float32), 0, 1.0, out), "float16"),
        ((x[:, ::2], 0, 1.0, out), "contiguous"),
        ((x[:2], 0, 1.0, out), "shape"),
        ((x, 0, out), "3 arguments"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel(*arguments)


def test_an_access_beyond_an_array_is_an_error_in_msl():
    msl = next(b for b in BACKENDS if b.name == "msl")
    kernel = present(msl).build(reverse_and_scale(reach=_WIDTH + 4))
    x, out = np.zeros((3, _WIDTH), np.float16), np.zeros((3, 2, _WIDTH), np.float32)
    with pytest.raises(RuntimeError, match="heap-buffer-overflow"):
        kernel(x, 1, 1.0, out)

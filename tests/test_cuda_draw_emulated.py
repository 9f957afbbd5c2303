"""The CUDA kernel that draws tokens, on the CPU: the host's draws from the same weights."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cuda_emulator import compiler, run
from kvq.runtime.philox import uniform
from kvq.runtime.sampler import DRAW_FIELDS, Sampler, SamplingParams, draw
from kvq.schedules.cuda.draw import NOT_FINITE
from kvq.schedules.cuda.draw import draw as draw_kernel
from kvq.schedules.cuda.draw_row import THREADS
from test_cuda_linear_emulated import program

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

#: More ids than threads, and no multiple of anything.
VOCAB, DRAWABLE = 1500, 1437


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Tokens of rows of logits, drawn by the kernel."""
    made = program(draw_kernel(VOCAB, DRAWABLE), tmp_path_factory.mktemp("draw") / "kernel", 16, THREADS)

    def call(logits: np.ndarray, fields: list[np.ndarray]) -> np.ndarray:
        rows = len(logits)
        arguments = {
            "logits_ptr": logits,
            "draws_ptr": np.stack(fields),
            "out_ptr": np.full(rows, -7, np.int32),
            "n": rows,
        }
        return run(made, arguments, [(row, 0) for row in range(rows)])["out_ptr"]

    return call


def weights_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    """The weights as the emulated kernel computes them, with the C library's ``expf``."""
    expf = ctypes.CDLL(None).expf
    expf.restype, expf.argtypes = ctypes.c_float, [ctypes.c_float]
    scaled = (logits - logits.max()) / np.float32(temperature)
    return np.array([expf(x) for x in scaled], np.float32)


def test_the_kernel_draws_what_the_host_draws(drawn):
    rng = np.random.default_rng(0)
    sharp = (rng.standard_normal(VOCAB) * 3).astype(np.float32)
    flat = (rng.standard_normal(VOCAB) * 0.01).astype(np.float32)
    equal = np.repeat(np.float32([2, 1, 1, 0.5]), VOCAB // 4)  # limits fall among equal weights
    limits = (
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05},
        {"top_k": 500, "top_p": 0.6, "min_p": 0.01},
        {"top_k": 30, "top_p": 0.999999},
        {"top_k": 5000, "top_p": 1e-9},
    )
    cases = [
        (logits, SamplingParams(temperature=temperature, seed=seed, **limit))
        for seed, limit in enumerate(limits)
        for logits, temperature in ((sharp, 1.0), (equal, 0.7))
    ]
    cases += [(flat, SamplingParams(seed=9, top_p=0.5)), (sharp, SamplingParams(seed=8, temperature=0.2))]
    samplers = [Sampler(params, (), DRAWABLE, at) for at, (_, params) in enumerate(cases)]
    fields = [sampler.device_draw(900 + at) for at, sampler in enumerate(samplers)]
    found = drawn(np.stack([logits for logits, _ in cases]), fields)
    expected = [
        draw(weights_of(logits[:DRAWABLE], params.temperature), params, uniform(params.seed, at, 900 + at))
        for at, (logits, params) in enumerate(cases)
    ]
    assert found.tolist() == expected
    assert len(set(expected)) > len(cases) // 2


def test_rows_of_other_kinds(drawn):
    logits = np.random.default_rng(5).standard_normal((6, VOCAB)).astype(np.float32)
    logits[1, [40, 900, 1100]] = 9  # the first of equals
    logits[2, DRAWABLE:] = 99  # ids that pad the vocabulary
    logits[3, 77] = np.nan
    logits[4, DRAWABLE - 1] = -np.inf
    logits[5, DRAWABLE:] = np.nan
    logits[5, :DRAWABLE] = 0  # every mass is that of the likeliest
    likeliest = np.zeros(DRAW_FIELDS, np.int32)
    sampler = Sampler(SamplingParams(seed=2**64 - 1, top_p=0.5), (), DRAWABLE)
    found = drawn(logits, [*[likeliest] * 3, sampler.device_draw(0), likeliest, sampler.device_draw(1)])
    expected = logits[:, :DRAWABLE].argmax(axis=1)
    np.testing.assert_array_equal(found[:5], [*expected[:3], NOT_FINITE, NOT_FINITE])
    assert found[1] == 40
    half = (DRAWABLE + 1) // 2
    assert found[5] == int(uniform(2**64 - 1, 0, 1) * half)

"""Decode attention on a GPU against numpy over the dequantized cache: ``scripts/gpu_bench.sh`` runs these."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from cuda_attention import GEOMETRIES

pytestmark = pytest.mark.gpu

#: Sequences of a step, and multiprocessors that the plan believes in.
STEPS = {
    "one token": ([1], 132),
    "around a page": ([17, 63, 64, 65, 128, 129], 132),
    "ragged": ([int(n) for n in np.random.default_rng(1).integers(1, 1500, 35)], 132),
    "more blocks than fit": ([int(n) for n in np.random.default_rng(2).integers(1, 900, 70)], 2000),
    "one long sequence in parts": ([20000], 132),
    "long and short": ([9000, 3, 700], 132),
    "batch of 256": ([int(n) for n in np.random.default_rng(3).integers(1, 200, 256)], 132),
}


@pytest.fixture(scope="module")
def device():
    from kvq.errors import LibraryError
    from kvq.runtime.device import Device

    try:
        return Device.open("cuda")
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=GEOMETRIES, ids=lambda name: name.replace(" ", "-"))
def kernel(request, device, tmp_path_factory):
    from kvq.bench.attention import load_kernel

    layout, group = GEOMETRIES[request.param]
    directory = Path(os.environ.get("KVQ_KERNELS") or tmp_path_factory.getbasetemp() / "kernels")
    return load_kernel(directory, layout, group * layout.num_kv_heads)


def make_run(kernel, device, lengths, multiprocessors, seed=0, **options):
    from kvq.bench.attention import AttentionRun
    from kvq.bench.attention_case import AttentionCase

    plan = kernel.device(multiprocessors)
    return AttentionRun(
        kernel, AttentionCase(kernel.layout, kernel.num_heads, lengths, plan, seed, **options), device
    )


@pytest.mark.parametrize("step", STEPS, ids=lambda name: name.replace(" ", "-"))
def test_equals_numpy(kernel, device, step):
    lengths, multiprocessors = STEPS[step]
    run = make_run(kernel, device, lengths, multiprocessors)
    error = run.case.error(run.output(), samples=16)
    assert error <= 5e-3


@pytest.mark.parametrize("value_size", [20000.0, 2e-3])
def test_large_and_small_values(kernel, device, value_size):
    """Value scales up to the largest there are, and far below 1: products with weights are fp16."""
    run = make_run(kernel, device, [300, 2000, 129], 132, seed=6, value_size=value_size)
    assert run.case.error(run.output(), samples=12) <= 5e-3


def test_every_launch_gives_the_same_bits(kernel, device):
    """Parts arrive in any order, and the next launch may start while this one runs: neither shows."""
    run = make_run(kernel, device, [5000, 80, 1200, 64], 450, seed=5)
    assert len(run.case.tasks) > 4
    first = run.output()
    assert run.case.error(first, samples=8) <= 5e-3
    for _ in range(20):
        for _ in range(20):
            run.launch()
        np.testing.assert_array_equal(run.output().view(np.uint16), first.view(np.uint16))

"""What inspection reports: errors of the right size, told apart, and everything in the dump."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from kvq.errors import ConfigError
from kvq.inspect_cache import Inspection, inspect_prompt, relative_error, through_format
from kvq.layout import KVLayout
from kvq.quantization.kv_codec import unpack_unit


def rows(*lead: int, dim: int = 64) -> np.ndarray:
    """Exact rows ``[*lead, 64, dim]`` that float16 holds exactly."""
    values = np.random.RandomState(0).standard_normal((*lead, 64, dim)) * 3 + 1
    return values.astype(np.float16).astype(np.float32)


def test_relative_error() -> None:
    exact = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], np.float32)
    found = np.array([[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    assert relative_error(found, exact, (1,)).tolist() == [0.2, 0.0, 1.0]


@pytest.mark.parametrize("dim", [64, 80, 96])
def test_the_format_error_falls_with_the_bits(dim: int) -> None:
    k, v = rows(2, 1, 3, dim=dim), rows(2, 1, 3, dim=dim)
    errors = []
    for bits in (3, 4, 8):
        layout = KVLayout(1, 3, dim, k_bits=bits, v_bits=bits)
        found_k, found_v = through_format(k, v, layout)
        errors.append(
            (
                relative_error(found_k, k, (0, 1, 2, 3, 4)).item(),
                relative_error(found_v, v, (0, 1, 2, 3, 4)).item(),
            )
        )
    for coarse, fine in itertools.pairwise(errors):
        assert coarse[0] > 1.5 * fine[0]
        assert coarse[1] > 1.5 * fine[1]
    assert errors[0][0] < 0.25
    assert max(errors[-1]) < 0.02


def test_an_unquantized_component_comes_back_exactly() -> None:
    k, v = rows(1, 1, 1), rows(1, 1, 1)
    found_k, found_v = through_format(k, v, KVLayout(1, 1, 64, k_bits=None, v_bits=4))
    assert np.array_equal(found_k, k)
    assert not np.array_equal(found_v, v)
    found_k, found_v = through_format(k, v, KVLayout(1, 1, 64, k_bits=4, v_bits=None))
    assert np.array_equal(found_v, v)
    assert not np.array_equal(found_k, k)


def inspection() -> Inspection:
    from kvq.quantization.kv_codec import hadamard, sanitize, seal_unit

    layout = KVLayout(1, 1, 64)
    k, v = rows(1, 1, 1), rows(1, 1, 1)
    words = seal_unit(k.astype(np.float16), sanitize(v @ hadamard(64)), layout)
    format_k, format_v = through_format(k, v, layout)
    return Inspection(
        layout,
        np.arange(64, dtype=np.int32),
        10,
        unpack_unit(words, layout),
        k,
        v,
        format_k,
        format_v,
        (None,),
    )


def test_where_keys_are_exact_served_is_the_format() -> None:
    found = inspection()
    assert np.array_equal(found.served_k, found.format_k)
    assert np.array_equal(found.served_v, found.format_v)


def test_the_dump_holds_what_makes_the_values(tmp_path: Path) -> None:
    found = inspection()
    found.dump(tmp_path / "cache.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["cache.npz"]
    dump = np.load(tmp_path / "cache.npz")
    rebuilt = dump["k_codes"] * dump["k_scale"][..., None, :] + dump["k_min"].astype(np.float32)[..., None, :]
    assert np.allclose(rebuilt, dump["k"], atol=1e-6)
    assert np.array_equal(dump["exact_v"], found.exact_v)
    rotated = (dump["v_codes"].astype(np.float32) - 8) * dump["v_scale"].astype(np.float32)[..., None]
    assert np.allclose(rotated, dump["v"])


def test_a_dump_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dump"):
        inspection().dump(tmp_path / "absent" / "cache.npz")


def test_an_unquantized_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="--kv none"):
        inspect_prompt("smollm2", "text", kv="none")

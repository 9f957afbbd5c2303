"""Products on tensor cores against numpy, on a GPU: every kind that a library has, for few rows and many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cuda_rig import gpu, kernel, prepared, tensor
from kernel_rig import gated, in_operand_order, random_rows, relative_error
from kvq.quantization.storage import pack_codes
from kvq.schedules.backend import ROUNDED, RowSource

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu() is None, reason="no CUDA device")]

EPS = 1e-2
ROUNDS, NORM = RowSource(rounded=False), RowSource(rounded=False, eps=EPS)
#: The backend's limits of rows, and numbers of rows within.
STEPS = {4: (1, 3, 4), 16: (1, 13, 16), 128: (17, 64, 100), None: (129, 200)}
#: Outputs that are no whole number of blocks, units of inputs that warps cannot share evenly.
SHAPE = (1040, 1088)
#: Products to gate, whose halves are inputs of others; a wide one.
GATED, WIDE = (1152, 576), (16512, 576)
OPERANDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Product:
    """A kernel: of a weight, for so many rows, with what is part of it."""

    shape: tuple[int, int]
    storage: str
    activations: str
    most_rows: int | None
    rows: RowSource = ROUNDED
    residual: bool = False
    gate: bool = False

    @property
    def order(self) -> str:
        """How rounded rows lie, in and out."""
        return "" if self.most_rows in (4, 16) else "operand"

    @property
    def kernel(self) -> tuple[Any, ...]:
        """What :func:`cuda_rig.kernel` takes."""
        method = f"{self.activations}.rounded."
        if self.gate:
            what = *self.shape, self.storage, "silu", self.order, self.most_rows, self.rows
            return f"{method}gated_linear", *what
        return f"{method}linear", *self.shape, self.storage, self.residual, self.most_rows, self.rows

    @property
    def preparations(self) -> list[tuple[Any, ...]]:
        """The same for the tensors of the weight, as :func:`cuda_rig.prepared` takes it."""
        (n, k), dtype = self.shape, self.activations
        if self.storage == "float16":
            return [(f"{dtype}.prepare_matrix", n, k, "float16", "float16")]
        scales = f"{dtype}.prepare_matrix", n, k // 32, "float16", "int4"
        return [(f"{dtype}.prepare_codes", n, k, "int4"), scales]


PRODUCTS = [
    product
    for storage in ("int4", "float16")
    for dtype in OPERANDS
    for product in (
        *(Product(SHAPE, storage, dtype, most, residual=True) for most in STEPS),
        Product(GATED, storage, dtype, 4, NORM),
        Product(GATED, storage, dtype, 4, ROUNDS, residual=True),
        Product(GATED, storage, dtype, 4, NORM, gate=True),
        Product(WIDE, storage, dtype, 128, gate=True),
        Product(GATED, storage, dtype, None, gate=True),
    )
]
#: Everything that the tests build: the backend's method and its arguments.
NEEDED = [what for product in PRODUCTS for what in (product.kernel, *product.preparations)]


def make_weight(product: Product) -> tuple[list[Any], np.ndarray]:
    """The tensors of a weight as the kernel reads them, and what they stand for."""
    (n, k), operand = product.shape, OPERANDS[product.activations]
    if product.storage == "float16":
        weight = (np.random.default_rng(n).standard_normal((n, k)) / k**0.5).astype(np.float16)
        raw, values = [weight], weight.astype(operand).astype(np.float32)
    else:
        rows = random_rows(n, k, "int4")
        raw = [pack_codes(rows.codes, 4), rows.scale]
        values = replace(rows, scale=rows.scale.astype(operand)).dequantized()
    tensors = [
        prepared(name, array, *arguments)
        for array, (name, *arguments) in zip(raw, product.preparations, strict=True)
    ]
    return tensors, values


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_product(product: Product) -> None:
    (n, k), operand = product.shape, OPERANDS[product.activations]
    weight, values = make_weight(product)
    rng = np.random.default_rng(k)
    counts = STEPS[product.most_rows]
    x = rng.standard_normal((counts[-1], k)).astype(np.float32)
    if product.activations == "bfloat16":
        x[1::2] *= 1e6  # beyond fp16
    gain = rng.standard_normal(k).astype(np.float32)
    residual = rng.standard_normal((counts[-1], n)).astype(np.float32)
    given, plain = x, x
    if product.rows.rounded:
        given = x.astype(operand)
        plain = given
        if product.order:
            given = in_operand_order(given)
    elif product.rows.eps is not None:
        plain = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * gain
    expected = plain.astype(operand).astype(np.float32) @ values.T
    if product.residual:
        expected += residual
    if product.gate:
        expected = gated(expected, "silu")
        if product.order:
            expected = in_operand_order(expected)
    made = kernel(*product.kernel)
    found = {}
    for count in counts:
        shape, dtype = (expected[:count].shape, operand if product.gate else np.float32)
        out = tensor(np.full(shape, np.nan, dtype))
        more = [tensor(gain)] if product.rows.eps is not None else []
        added = [tensor(residual[:count])] if product.residual else []
        made(tensor(given[:count]), *more, *weight, *added, out)
        found[count] = out.numpy().astype(np.float32)
    # a code times its scale is rounded once, gated results and their product with another once more
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3}[product.activations]
    if product.storage == "float16" and not product.gate and product.rows.eps is None:
        tolerance = 2e-5
    for row, wanted in zip(found[counts[-1]], expected, strict=True):
        assert relative_error(row, wanted) < tolerance
    for count, rows in found.items():
        np.testing.assert_array_equal(rows, found[counts[-1]][:count])  # whoever shares the step

"""The names of kernels that multiply rounded activations: written by one pass, read by another."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kvq.schedules.backend import ROUNDED, RowSource


def float_name(value: float) -> str:
    """A number as a part of a kernel's name."""
    return f"{value:g}".replace("-", "m").replace(".", "_")


def rounding_name(k: int, order: str) -> str:
    """Name of the kernel that rounds rows of ``k`` activations into an order."""
    return f"quantize_rows_{k}" + (f"_{order}" if order else "")


def rounding_order(name: str) -> str:
    """The order in a name that :func:`rounding_name` made."""
    return name.removeprefix("quantize_rows_").lstrip("0123456789").removeprefix("_")


@dataclass(frozen=True)
class RoundedProduct:
    """A product of rounded activations with a weight.

    Attributes
    ----------
    precision : str
        ``RoundedKernels.name``.
    storage : str
        How the weight is stored.
    n, k : int
        Outputs and inputs.
    most_rows : int or None
        Rows that the kernel is for; None for any number.
    residual : bool
        Whether it adds one.
    rows : RowSource
        What its rows are.
    """

    precision: str
    storage: str
    n: int
    k: int
    most_rows: int | None = None
    residual: bool = False
    rows: RowSource = ROUNDED

    def kernel_name(self) -> str:
        """The kernel's name in a module."""
        rows = f"_rows{self.most_rows}" if self.most_rows else ""
        added = "add_" if self.residual else ""
        source = "" if self.rows.rounded else "rounding_"
        if self.rows.eps is not None:
            source = f"norm_{float_name(self.rows.eps)}_"
        return f"{source}linear_{self.precision}_{added}{self.storage}_{self.n}x{self.k}{rows}"

    @classmethod
    def parse(cls, name: str, precision: str) -> RoundedProduct | None:
        """The product of rounded rows that a kernel's name stands for; None if it is none."""
        found = re.fullmatch(rf"linear_{precision}_(?!add_)(\w+)_(\d+)x(\d+?)(?:_rows(\d+))?", name)
        if found is None:
            return None
        storage, n, k, rows = found.groups()
        return cls(precision, storage, int(n), int(k), int(rows) if rows else None)

    def with_rows(self, rows: RowSource) -> RoundedProduct:
        """The same product, of other rows."""
        return replace(self, rows=rows)

    def with_residual(self) -> RoundedProduct:
        """The same product, with a residual."""
        return replace(self, residual=True)

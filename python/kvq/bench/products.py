"""``kvq bench products``: the products of a decode step on a GPU, alone and within the step.

Kernels are a compiled library's own (:mod:`kvq.bench.step_kernels`): a product does itself what the compiler
made part of it, a norm or a gate. *Alone*, a CUDA graph launches one product over and over, with the weights
of all layers in turn. *In the step* is by how much a graph of all kernels but those of the cache is longer
with the product than without it. The weights' bytes over the time are compared with a copy within the
device's memory in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvq.bench.cuda_graph import Driver
from kvq.bench.run import BenchSetup, Report
from kvq.bench.step_kernels import StepKernel, record_step
from kvq.errors import check_positive
from kvq.runtime.device import Device

#: Launches of a graph at least; replays of a round, whose time is that of one, and rounds.
LAUNCHES, REPLAYS, ROUNDS = 24, 8, 20
#: Name of the figure of all products of a step.
ALL = "all"


@dataclass(frozen=True)
class ProductFigure:
    """One measurement; the fields are keys of ``--json``. Times are of one launch, of :data:`ALL` of a step.

    Attributes
    ----------
    rows : int
        Rows of the step.
    weight : str
        What it multiplies by, such as ``qkv_proj``, or :data:`ALL`.
    kernel : str
        The kernel's name in the library; empty for :data:`ALL`, which has all kernels but the cache's.
    outputs, inputs : int or None
        Shape of the weight.
    launches : int
        In a step.
    us, of_copy : float or None
        Microseconds alone, and the rate of the weight's bytes over that of a copy; None for :data:`ALL`.
    us_in_step, of_copy_in_step : float, float or None
        The same within a step; no rate where the kernel takes no time that could be told.
    """

    rows: int
    weight: str
    kernel: str
    outputs: int | None
    inputs: int | None
    launches: int
    us: float | None
    of_copy: float | None
    us_in_step: float
    of_copy_in_step: float | None

    def to_dict(self) -> dict[str, float | str | None]:
        """A JSON-ready description."""
        return asdict(self)


def product_figures(
    rows: int,
    kernels: Sequence[StepKernel],
    copy_rate: float,
    seconds: Callable[[Sequence[StepKernel]], float],
) -> list[ProductFigure]:
    """Figures of each product of a step, in its order, and of all of them.

    Parameters
    ----------
    rows : int
        Rows of the step.
    kernels : sequence of StepKernel
        What it launches.
    copy_rate : float
        Bytes a second.
    seconds : callable
        Measures kernels that are launched one after another.
    """
    groups: dict[tuple[str, str], list[StepKernel]] = {}
    for kernel in kernels:
        if kernel.weight is not None:
            groups.setdefault((kernel.weight, kernel.name), []).append(kernel)
    figures, of_steps = [], []
    for (weight, name), group in groups.items():
        launched = group * -(-LAUNCHES // len(group))
        alone = seconds(launched) / len(launched)
        rest = [kernel for kernel in kernels if (kernel.weight, kernel.name) != (weight, name)]
        of_steps.append(seconds(kernels))  # beside what it is compared with: a device's clocks drift
        within = (of_steps[-1] - seconds(rest)) / len(group)
        ideal = group[0].weight_bytes / copy_rate
        outputs, inputs = group[0].shape
        figures.append(
            ProductFigure(
                rows,
                weight,
                name,
                outputs,
                inputs,
                len(group),
                alone * 1e6,
                ideal / alone,
                within * 1e6,
                ideal / within if within > 0 else None,
            )
        )
    ideal = sum(kernel.weight_bytes for kernel in kernels) / copy_rate
    of_step = statistics.median(of_steps)
    whole = of_step * 1e6, ideal / of_step
    return [*figures, ProductFigure(rows, ALL, "", None, None, len(kernels), None, None, *whole)]


def bench_products(
    setup: BenchSetup, rows: Sequence[int], report: Report | None = None
) -> tuple[list[ProductFigure], float]:
    """Measure the products of steps of several numbers of rows.

    Parameters
    ----------
    setup : BenchSetup
        The model, with one cache scheme, on CUDA.
    rows : sequence of int
        Rows of the steps, a sequence each.

    Returns
    -------
    figures : list of ProductFigure
    copy_rate : float
        Bytes a second, read and written, of a copy within the device's memory.

    Raises
    ------
    KvqError
        If there is no CUDA device, or an argument or the model is unsuitable.
    """
    check_positive(rows=min(rows))
    say = report or (lambda _: None)
    device = Device.open(setup.device)
    driver = Driver()
    copy_rate = driver.copy_rate()

    def seconds(kernels: Sequence[StepKernel]) -> float:
        def launch() -> None:
            for kernel in kernels:
                kernel.launch()

        return statistics.median(driver.time_replays(device.handle, launch, ROUNDS, REPLAYS))

    comparison = setup.comparison(1, say)
    figures = []
    for count in sorted(set(rows)):
        say(f"products of {count} rows")
        (model,) = comparison.load(1, 1, sequences=count, whole_sequences=count)
        figures += product_figures(count, record_step(model, count), copy_rate, seconds)
        del model
        comparison.release()
    return figures, copy_rate

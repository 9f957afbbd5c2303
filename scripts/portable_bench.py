"""What the benches of portable kernels share: compile without a GPU, run without a compiler."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from kvq.bench.attention_kernels import ENTRY
from kvq.runtime.device import Device

#: Bytes of data to rotate over: more than a GPU's L2 holds.
ROTATION_BYTES = 256 << 20
#: Launches of a batch, and batches of each length.
_SHORT, _LONG, _REPLAYS = 40, 240, 5
#: Words of a copy that measures the memory, and its library.
_COPIED_WORDS, _COPY = 1 << 24, "copy"
#: Seconds of work before anything is measured: an idle GPU's clock is low.
_WARM_SECONDS = 0.5


def seconds_each(launch: Callable[[int], object], device: Device) -> float:
    """Time of a launch among many, ``launch(n)`` the n-th, on a GPU that was busy before.

    From medians of short and of long batches: what a batch costs but once is not counted.
    """

    def batch(count: int) -> float:
        started = time.perf_counter()
        for n in range(count):
            launch(n)
        device.synchronize()
        return time.perf_counter() - started

    begun = time.perf_counter()
    while time.perf_counter() - begun < _WARM_SECONDS:
        batch(_SHORT)
    short, long = (statistics.median(batch(count) for _ in range(_REPLAYS)) for count in (_SHORT, _LONG))
    return (long - short) / (_LONG - _SHORT)


def copy_rate(device: Device, copy: Callable[[Any, Any], object]) -> float:
    """Bytes a second, read and written, of ``copy(source, target)`` within the device's memory."""
    pairs = [
        [tvm.runtime.empty((_COPIED_WORDS,), "uint32", device.handle) for _ in range(2)]
        for _ in range(ROTATION_BYTES // (4 * _COPIED_WORDS))
    ]

    return 8 * _COPIED_WORDS / seconds_each(lambda n: copy(*pairs[n % len(pairs)]), device)


def _copy_kernel() -> tirx.PrimFunc:
    """A kernel that copies: what memory gives to kernels. Drivers' own copies may be slower."""
    from tvm.script import tirx as T
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as builder

    from kvq.schedules.gpu.block import ATTRIBUTES, held, launch
    from kvq.schedules.statements import put

    threads, each = 256, 16
    with IRBuilder() as script, builder.prim_func(is_private=True):
        T.func_attr(ATTRIBUTES)
        source, target = (
            builder.arg(name, T.Buffer((_COPIED_WORDS,), "uint32")) for name in ("source", "target")
        )
        with launch([_COPIED_WORDS // (threads * each)], threads) as (group, thread):
            first = held(group * (threads * each) + thread)
            words = [T.bind(source[first + i * threads]) for i in range(each)]
            for i, word in enumerate(words):
                put(target, word, first + i * threads)
    return script.get()


def entry_of(library: Path) -> Any:
    """The kernel of a library that :func:`main` wrote."""
    return tvm.runtime.load_module(str(library))[ENTRY]


def main(
    description: str,
    options: dict[str, str],
    kernels: Callable[[Any], Iterator[tuple[str, tirx.PrimFunc]]],
    measure: Callable[[argparse.Namespace, Device], Iterator[dict[str, Any]]],
) -> None:
    """Compile, or run and print a line of JSON for the rates of copies and for each result.

    Parameters
    ----------
    description : str
    options : dict
        Defaults of the command's own options.
    kernels : callable
        ``kernels(backend)``: name of a library and its kernel.
    measure : callable
        ``measure(args, device)``: results of the libraries in ``args.directory``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["compile", "run"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--device", default="vulkan", help="default: %(default)s")
    for name, default in options.items():
        parser.add_argument(f"--{name}", default=default, help="default: %(default)s")
    args = parser.parse_args()
    if args.what == "run":
        device = Device.open(args.device)
        rate = copy_rate(device, entry_of(args.directory / f"{_COPY}.so")) / 1e12
        driver = copy_rate(device, lambda source, target: source.copyto(target)) / 1e12
        print(json.dumps({"copy_tb_per_s": rate, "driver_copy_tb_per_s": driver}), flush=True)
        for row in measure(args, device):
            row |= {"of_copy": row["tb_per_s"] / rate}
            print(json.dumps(row), flush=True)
        return
    from kvq.compiler.gpu_target import gpu_target

    target = gpu_target(args.device)
    args.directory.mkdir(parents=True, exist_ok=True)
    for name, func in ((_COPY, _copy_kernel()), *kernels(target.kernels)):
        module = tvm.IRModule({ENTRY: func.with_attr("global_symbol", ENTRY)})
        built = tvm.compile(module, target=target.target, tir_pipeline=target.tir_pipeline)
        built.export_library(str(args.directory / f"{name}.so"))

"""Loads a compiled library, its weights and its cache's tensors, and refuses what does not fit together."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.runtime.vm import VirtualMachine

from kvq.cpu_features import detect
from kvq.errors import CacheError, LibraryError
from kvq.loader.tensor_cache import TensorCache
from kvq.runtime import vulkan
from kvq.runtime.arena import Arena
from kvq.runtime.cache_shape import CacheShape
from kvq.runtime.device import Device
from kvq.runtime.metadata import DRAW, Metadata


def nbytes(tensor: Any) -> int:
    """Bytes of a tensor's data."""
    bits = tvm_ffi.dtype(tensor.dtype).bits
    return int(np.prod(tensor.shape)) * bits // 8


class Params:
    """A model's weights on the device, in the layout the kernels read.

    Attributes
    ----------
    handle : tvm_ffi.Array
        All of them in one object, as ``prefill`` and ``decode`` take them.
    nbytes : int
        Bytes of the tensors; one that several parameters share counts once.
    """

    def __init__(self, tensors: list[Any]) -> None:
        self.handle = tvm_ffi.convert(tensors)
        self.nbytes = sum({tensor.data_ptr(): nbytes(tensor) for tensor in tensors}.values())


class CacheTensors:
    """The tensors of a KV cache, allocated by the library.

    Attributes
    ----------
    pool, open, workspace, scratch
        ``kv_pool``, ``kv_open``, ``kv_workspace`` and ``attention_scratch`` of ``docs/design.md``.
    """

    def __init__(self, pool: Any, open_pages: Any, workspace: Any, scratch: Any) -> None:
        self.pool, self.open, self.workspace, self.scratch = pool, open_pages, workspace, scratch

    @property
    def named(self) -> dict[str, Any]:
        """The tensors by name."""
        return {"pool": self.pool, "open": self.open, "workspace": self.workspace, "scratch": self.scratch}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by name, counted from the tensors."""
        return {name: nbytes(tensor) for name, tensor in self.named.items()}

    def copy_open(self, src: int, dst: int) -> None:
        """Copy the rows of open page ``src`` to ``dst``, all layers."""
        _copy_page(self.open, src, dst)

    def copy_sealed(self, src: int, dst: int) -> None:
        """Copy sealed page ``src`` of the pool to ``dst``, all layers."""
        _copy_page(self.pool, src, dst)


def _copy_page(pages: Any, src: int, dst: int) -> None:
    shape = pages.shape[1:]
    size = math.prod(shape) * tvm_ffi.dtype(pages.dtype).bits // 8
    views = [pages._create_view(shape, relative_byte_offset=size * page) for page in (src, dst)]
    views[0].copyto(views[1])


class Library:
    """A compiled library.

    Attributes
    ----------
    path : Path
        The file.
    metadata : Metadata
        What it says about itself.
    device : Device
        Where it runs.
    threads : int
        Tasks of its kernels that run side by side.
    draw : callable or None
        Finds tokens on the device; what it can find, ``metadata.token_function`` says.
    """

    def __init__(self, path: Path, machine: VirtualMachine, metadata: Metadata, device: Device) -> None:
        self.path, self.metadata, self.device = path, metadata, device
        self._machine = machine
        self._steps = {
            name: [(limit, machine[f"{name}_{limit}"]) for limit in metadata.row_limits]
            + [(None, machine[name])]
            for name in ("prefill", "decode")
        }
        self.draw = self._token_function()
        self.threads = device.threads

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> Library:
        """Load a library and check that it can run here.

        Raises
        ------
        LibraryError
            If the file is missing, no library of kvq's, made by another version or for another device, or
            needs CPU features that this machine lacks.
        """
        path = Path(path)
        if not path.is_file():
            raise LibraryError(f"{path}: no such library: run kvq compile first")
        _refuse_truncated(path)
        opened = Device.open(device)
        try:
            module = tvm.runtime.load_module(str(path.resolve()))
            machine = VirtualMachine(module, opened.handle)
            text = str(machine["_metadata"]())
        except (RuntimeError, ValueError, AttributeError, OSError) as error:
            reason = (str(error).strip().splitlines() or ["unknown error"])[-1]
            if "load_from_bytes.vulkan" in reason:
                raise LibraryError(f"{path} was compiled for vulkan: {vulkan.INSTALL}") from None
            if "load_from_bytes.cuda" in reason:
                raise LibraryError(f"{path} was compiled for cuda, not {device}: use --device cuda") from None
            raise LibraryError(f"{path}: not a library that kvq compile wrote ({reason})") from None
        metadata = Metadata.parse(text)
        metadata.check_compatible(str(path), tvm.__version__, detect())
        if metadata.device != opened.kind:
            raise LibraryError(
                f"{path} was compiled for {metadata.device}, not {device}: use --device {metadata.device}"
            )
        opened.check_library(module, str(path))
        return cls(path, machine, metadata, opened)

    def step_function(self, name: str, rows: int) -> Callable[..., Any]:
        """``prefill`` or ``decode``, as it was compiled for a step of ``rows`` rows."""
        return next(func for limit, func in self._steps[name] if limit is None or rows <= limit)

    @contextmanager
    def watched(self, see: Callable[[str, Any, tuple[Any, ...]], None]) -> Iterator[None]:
        """Within this, ``see(name, kernel, arguments)`` is called before each kernel of a function that runs.

        A step that a CUDA graph repeats calls none.
        """

        def instrument(kernel: Any, name: str, before: bool, _result: Any, *arguments: Any) -> int:
            if before and not name.startswith("vm."):
                see(name, kernel, arguments)
            return 0  # the machine goes on

        self._machine.set_instrument(instrument)
        try:
            yield
        finally:
            self._machine.set_instrument(None)

    def _token_function(self) -> Callable[[Any, Any], Any] | None:
        """Of logits ``float32[n, 1, V]`` and draws ``int32[n, DRAW_FIELDS]`` the tokens ``int32[n]``."""
        name = self.metadata.token_function
        if name is None:
            return None
        function = self._machine[name]
        return function if name == DRAW else lambda logits, _: function(logits)

    def host_array(self, tensor: Any) -> np.ndarray:
        """A tensor's data: of the CPU's tensors a view, of a GPU's a copy, once it has been computed."""
        return np.from_dlpack(tensor) if self.device.kind == "cpu" else tensor.numpy()

    @property
    def params_bytes(self) -> int:
        """Bytes that the parameters will take that :meth:`load_params` makes."""
        return sum(map(self.device.allocated, self._params_bytes().values()))

    def _params_bytes(self) -> dict[tuple[str | None, tuple[str, ...]], int]:
        """Bytes of each distinct parameter, in the order in which they are made."""
        return {
            (spec.function, spec.inputs): math.prod(spec.shape) * np.dtype(spec.dtype).itemsize
            for spec in self.metadata.params
        }

    def load_params(
        self, weights_dir: str | Path, progress: Callable[[int, int], None] | None = None
    ) -> Params:
        """Read converted weights and bring them into the kernels' layout, tensor by tensor.

        Parameters
        ----------
        weights_dir : str or Path
            What ``kvq convert_weight`` wrote.
        progress : callable, optional
            Called with (done, total) parameters.

        Raises
        ------
        LibraryError
            If the weights are not this library's: the first tensor that differs; if the device has no room.
        CheckpointError
            If they cannot be read.
        """
        cache = TensorCache(weights_dir)
        self._check_weights(cache)
        specs = self.metadata.params
        by_source: dict[tuple[str | None, tuple[str, ...]], Any] = {}
        place = self._placer()
        tensors = []
        for index, spec in enumerate(specs):
            key = (spec.function, spec.inputs)
            if key not in by_source:
                arrays = [cache.read(name) for name in spec.inputs]
                try:
                    raw = [tvm.runtime.tensor(array, self.device.handle) for array in arrays]
                    made = self._machine[spec.function](*raw) if spec.function else raw[0]
                except RuntimeError as error:
                    reason = str(error).splitlines()[-1]
                    raise LibraryError(f"{cache.directory}: {spec.name} cannot be loaded: {reason}") from None
                if tuple(made.shape) != spec.shape or str(made.dtype) != spec.dtype:
                    raise LibraryError(
                        f"{self.path}: {spec.function or 'parameter'} made {spec.name} {made.dtype}"
                        f"{list(made.shape)}, not {spec.dtype}{list(spec.shape)}: compile it again"
                    )
                by_source[key] = place(made)
            tensor = by_source[key]
            tensors.append(tensor)
            if progress is not None:
                progress(index + 1, len(specs))
        return Params(tensors)

    def _placer(self) -> Callable[[Any], Any]:
        """Where prepared tensors go: on the CPU into one arena, on a GPU they stay."""
        if self.device.kind == "cpu":
            return Arena(list(self._params_bytes().values())).place
        return lambda tensor: tensor

    def _check_weights(self, cache: TensorCache) -> None:
        names = set(cache.names)
        for spec in self.metadata.raw_params:
            if spec.name not in names:
                raise LibraryError(
                    f"{cache.directory}: has no tensor {spec.name}, which {self.path} "
                    f"({self.metadata.quantization}) needs: convert the weights for it"
                )
            shape, dtype = cache.describe(spec.name)
            if shape != spec.shape or dtype != spec.dtype:
                raise LibraryError(
                    f"{cache.directory}: {spec.name} is {dtype}{list(shape)}, but {self.path} "
                    f"({self.metadata.quantization}) needs {spec.dtype}{list(spec.shape)}"
                )
        unused = sorted(names - {spec.name for spec in self.metadata.raw_params})
        if unused:
            raise LibraryError(
                f"{cache.directory}: tensor {unused[0]} is not used by {self.path} "
                f"({self.metadata.quantization}): the weights are of another model or scheme"
            )

    def create_cache(self, shape: CacheShape) -> CacheTensors:
        """Allocate a KV cache, zeroed.

        Raises
        ------
        CacheError
            If the memory cannot be had.
        """
        layout, meta = self.metadata.layout, self.metadata
        sizes = tvm_ffi.Shape((shape.num_pages, shape.num_open, shape.num_workspace))
        try:
            pool, open_pages, workspace = self._machine["create_paged_kv_cache"](sizes)
            width = layout.head_dim + 8
            slots = (max(1, meta.scratch_slots), meta.model.num_attention_heads, width)
            scratch = tvm.runtime.tensor(np.zeros(slots, np.float32), self.device.handle)
        except (RuntimeError, MemoryError) as error:
            total = shape.sealed_bytes(layout) + shape.open_bytes(layout) + shape.workspace_bytes(layout)
            raise CacheError(
                f"cannot allocate {total} bytes of KV cache: {str(error).splitlines()[-1]}"
            ) from None
        return CacheTensors(pool, open_pages, workspace, scratch)


def _refuse_truncated(path: Path) -> None:
    """Refuse an ELF file that ends too early: mapping it would kill the process, not raise an error."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) == 64 and header.startswith(b"\x7fELF\x02\x01"):
        (table,) = struct.unpack_from("<Q", header, 40)
        entry_size, entries = struct.unpack_from("<HH", header, 58)
        if path.stat().st_size < table + entry_size * entries:
            raise LibraryError(f"{path}: the file is truncated: compile it again")

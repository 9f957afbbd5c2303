"""What a compiled library says about itself, read from its ``_metadata`` function."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvq import __version__
from kvq.config import ModelConfig
from kvq.errors import KvqError, LibraryError
from kvq.layout import KVLayout

#: Functions that find tokens on the device: any draw, or the likeliest tokens alone.
DRAW, LIKELIEST = "draw", "likeliest"


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ParamSpec(TensorSpec):
    """A parameter of the library: the result of ``function(*inputs)``, or its one input as it is."""

    function: str | None
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class DecodeSpec:
    """How the attention of ``decode`` wants its work cut, where it has a kernel of its own."""

    task_fields: int
    blocks_per_sm: int
    warps: int


@dataclass(frozen=True)
class Metadata:
    """The metadata of ``docs/design.md``, typed."""

    kvq_version: str
    tvm_version: str
    model_type: str
    quantization: str
    kv_quantization: str
    opt: str
    activations: str
    target: Any
    cpu_features: tuple[str, ...]
    model: ModelConfig
    layout: KVLayout
    split_pages: int
    scratch_slots: int
    tile_rows: int
    decode: DecodeSpec | None
    row_limits: tuple[int, ...]
    context_window_size: int
    prefill_chunk_size: int
    max_batch_size: int
    step_bytes: int
    token_function: str | None
    raw_params: tuple[TensorSpec, ...]
    params: tuple[ParamSpec, ...]

    @property
    def device(self) -> str:
        """Device that the library was compiled for, as ``--device`` names it."""
        kind = str(self.target.get("kind"))
        return "cpu" if kind == "llvm" else kind

    @property
    def split_slots(self) -> int:
        """Slots of the scratch that the plan may give to splits; CUDA's kernels split in their own way."""
        return 0 if self.device == "cuda" else self.scratch_slots

    @classmethod
    def parse(cls, text: str) -> Metadata:
        """Read the JSON text.

        Raises
        ------
        LibraryError
            If a field is absent or malformed, which means another kvq wrote it.
        """
        try:
            data = json.loads(text)
            copied = ("kvq_version", "tvm_version", "model_type", "quantization", "kv_quantization")
            compiled = ("opt", "activations", "target")
            limits = (
                "context_window_size",
                "prefill_chunk_size",
                "max_batch_size",
                "step_bytes",
                "token_function",
            )
            return cls(
                **{name: data[name] for name in (*copied, *compiled, *limits)},
                cpu_features=tuple(data["cpu_features"]),
                model=ModelConfig(**data["model"]),
                layout=KVLayout(**data["kv_layout"]),
                split_pages=data["attention"]["split_pages"],
                scratch_slots=data["attention"]["scratch_slots"],
                tile_rows=data["attention"]["tile_rows"],
                decode=DecodeSpec(**data["attention"]["decode"]) if data["attention"]["decode"] else None,
                row_limits=tuple(data["row_limits"]),
                raw_params=tuple(
                    TensorSpec(p["name"], tuple(p["shape"]), p["dtype"]) for p in data["raw_params"]
                ),
                params=tuple(
                    ParamSpec(p["name"], tuple(p["shape"]), p["dtype"], p["function"], tuple(p["inputs"]))
                    for p in data["params"]
                ),
            )
        except KeyError as error:
            raise LibraryError(
                f"the library's metadata lacks {error}: compile it again with this kvq"
            ) from None
        except (ValueError, TypeError, KvqError) as error:
            reason = str(error).splitlines()[0]
            raise LibraryError(
                f"the library's metadata cannot be read ({reason}): compile it again with this kvq"
            ) from None

    def check_compatible(self, where: str, tvm_version: str, features: Iterable[str]) -> None:
        """Refuse a library that this kvq, TVM or CPU cannot run.

        Raises
        ------
        LibraryError
            In one line: what the library needs, and what is here.
        """
        if self.kvq_version.split(".")[:2] != __version__.split(".")[:2]:
            raise LibraryError(
                f"{where} was compiled by kvq {self.kvq_version}, this is {__version__}: compile it again"
            )
        if self.tvm_version != tvm_version:
            raise LibraryError(
                f"{where} was compiled by TVM {self.tvm_version}, this is {tvm_version}: compile it again"
            )
        missing = sorted(set(self.cpu_features) - set(features))
        if missing:
            raise LibraryError(
                f"{where} needs CPU features {', '.join(missing)}, which this machine lacks: compile it here"
            )

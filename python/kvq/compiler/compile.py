"""compile_model: a chat configuration in, a self-describing library out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tvm

from kvq import __version__
from kvq.config import ChatConfig
from kvq.errors import CompileError, ConfigError
from kvq.layout import KVLayout
from kvq.model.decoder import export_model
from kvq.model.families import FAMILIES
from kvq.model.families.llama import LLAMA
from kvq.model.parameters import model_parameters
from kvq.model.rope import fix_rope
from kvq.passes.lower_weights import WeightPlan
from kvq.passes.pipeline import kvq_pipeline, run_pipeline
from kvq.quantization.scheme import resolve
from kvq.quantization.weights import stored_parameters

from .hosts import HOSTS, Host, split_device
from .link import linker_for
from .target import EXACT_LEVELS, CompileTarget, target_for

#: Optimization levels: O0 plain code for any CPU of the architecture, exact; O1 vector instructions, exact
#: activations; O2 activations in int8, on CUDA in fp16 or bf16; O3 as O2 (nothing more to gain yet).
OPT_LEVELS = ("O0", "O1", "O2", "O3")
#: What tensor cores may take activations in; ``auto`` leaves it to the model's family.
ACTIVATIONS = ("auto", "float16", "bfloat16")
#: Tokens of a page.
PAGE_SIZE = 64
#: Configuration keys that ``--overrides`` may set.
OVERRIDES = ("context_window_size", "prefill_chunk_size", "max_batch_size", "page_size", "kv_quantization")


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Read ``"context_window_size=4096;page_size=128"``.

    Raises
    ------
    ConfigError
        For an unknown key or a value that is no positive number.
    """
    out: dict[str, Any] = {}
    for part in filter(None, (text or "").split(";")):
        key, found, value = (s.strip() for s in part.partition("="))
        if not found or key not in OVERRIDES:
            raise ConfigError(f"--overrides: {part!r} is not understood: use {', '.join(OVERRIDES)}")
        if key == "kv_quantization":
            out[key] = value
        elif value.isdigit() and int(value) > 0:
            out[key] = int(value)
        else:
            raise ConfigError(f"--overrides: {key} must be a positive whole number, not {value!r}")
    return out


def compile_model(
    config_path: str | Path,
    output: str | Path,
    *,
    device: str = "cpu",
    host: str | None = None,
    mcpu: str | None = None,
    cuda_arch: str | None = None,
    opt: str = "O2",
    activations: str = "auto",
    overrides: str | None = None,
    debug_dump: str | Path | None = None,
) -> Path:
    """Compile a model.

    Parameters
    ----------
    config_path : str or Path
        ``mlc-chat-config.json`` or the directory that holds it.
    output : str or Path
        The library to write; an existing one is replaced only by a whole new one. Its suffix becomes what the
        host's libraries have.
    device : str
        What to compile for, with or without a host: ``cpu``, ``cuda``, ``metal:macos-arm64``.
    host : str, optional
        The host alone, a key of :data:`~kvq.compiler.hosts.HOSTS`.
    mcpu : str, optional
        Level of x86-64 CPUs, a key of :data:`~kvq.compiler.hosts.X86_LEVELS`.
    cuda_arch : str, optional
        GPU architectures such as ``sm_80,sm_90``; by default this machine's, or the usual ones.
    opt : str
        One of :data:`OPT_LEVELS`.
    activations : str
        One of :data:`ACTIVATIONS`; others than ``auto`` go with CUDA's products that round.
    overrides : str, optional
        ``key=value;...`` of :data:`OVERRIDES`.
    debug_dump : str or Path, optional
        Directory for the module after each pass.

    Returns
    -------
    Path
        The library.

    Raises
    ------
    ConfigError, CompileError
        In one line, before anything is written.
    """
    if opt not in OPT_LEVELS:
        raise ConfigError(f"unknown --opt {opt!r}: use one of {', '.join(OPT_LEVELS)}")
    config = ChatConfig.load(Path(config_path))
    asked = parse_overrides(overrides)
    page_size = asked.pop("page_size", PAGE_SIZE)
    config = config.model_copy(update=asked)
    kind, place = split_device(device, host)
    taken = _activations(activations, config.served_model.model_type, kind, opt)
    target = target_for(kind, opt, cuda_arch, place, mcpu, taken)
    link = linker_for(place)
    library = library_path(Path(output), place)
    _make_parent(library)
    executable = _build(config, page_size, target, opt, Path(debug_dump) if debug_dump else None)
    return _export(executable, target, link, library)


def _activations(asked: str, model_type: str, device: str, opt: str) -> str:
    """What products on tensor cores take activations in, if the library has any."""
    if asked not in ACTIVATIONS:
        raise ConfigError(f"unknown --activations {asked!r}: use one of {', '.join(ACTIVATIONS)}")
    if asked == "auto":
        return FAMILIES.get(model_type, LLAMA).activations
    if device != "cuda" or opt in EXACT_LEVELS:
        raise CompileError(
            f"--activations {asked} goes with --device cuda and --opt O2: no other product takes that type"
        )
    return asked


def _build(
    config: ChatConfig, page_size: int, target: CompileTarget, opt: str, debug_dump: Path | None
) -> Any:
    weights, kv = resolve(config.quantization, config.kv_quantization, config.weight_storage)
    model = fix_rope(config.served_model, config.context_window_size)
    row_dtype = kv.row_dtype(weights)
    layout = KVLayout(
        model.num_hidden_layers,
        model.num_key_value_heads,
        model.head_dim,
        kv.k_bits,
        kv.v_bits,
        page_size,
        row_dtype,
        target.kernels.layout_order,
    )
    mod, names = export_model(model)
    shapes = _shapes(mod, names)
    plan = WeightPlan(target.kernels)
    parameters = {p.name: p for p in model_parameters(model)}
    for name in names:
        storage = weights.storage(name, parameters[name].quantize)
        plan.add(name, shapes[name], storage, parameters[name].of_experts)
    shape = target.kernels.attention_shape(layout, model.num_attention_heads)
    exact = opt in EXACT_LEVELS
    metadata = {
        "kvq_version": __version__,
        "tvm_version": version("apache-tvm"),
        "model_type": model.model_type,
        "quantization": weights.name,
        "kv_quantization": str(kv),
        "opt": opt,
        "activations": "float32" if exact else plan.activations(),
        "target": target.description,
        "cpu_features": list(target.features),
        "model": model.model_dump(),
        "kv_layout": layout.to_dict(),
        "attention": {
            "split_pages": shape.split_pages,
            "scratch_slots": shape.scratch_slots,
            "tile_rows": shape.tile_rows,
            "decode": asdict(shape.decode) if shape.decode else None,
        },
        "row_limits": list(target.kernels.row_limits),
        "context_window_size": config.context_window_size,
        "prefill_chunk_size": config.prefill_chunk_size,
        "max_batch_size": config.max_batch_size,
        "raw_params": [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype}
            for t in stored_parameters(model, weights)
        ],
        "params": [tensor.to_dict() for tensor in plan.tensors],
    }
    passes = kvq_pipeline(
        kv=kv,
        page_size=page_size,
        row_dtype=row_dtype,
        weights=plan,
        exact=exact,
        kernels=target.kernels,
        vocab=model.vocab_size,
        drawable=config.active_vocab_size,
        most_rows={
            "prefill": max(config.prefill_chunk_size, config.max_batch_size),
            "decode": config.max_batch_size,
        },
        lower=target.relax_pipeline,
        metadata=metadata,
    )
    with target.target:
        mod = run_pipeline(mod, passes, _dumper(debug_dump))
        return tvm.compile(mod, target.target, relax_pipeline=None, tir_pipeline=target.tir_pipeline)


def _shapes(mod: tvm.IRModule, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights, from the parameter tuple of ``decode``."""
    packed = mod["decode"].params[-1].ty
    return {
        name: tuple(int(s) for s in field.shape) for name, field in zip(names, packed.fields, strict=True)
    }


def _dumper(directory: Path | None) -> Any:
    if directory is None:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileError(f"--debug-dump {directory}: {error.strerror}") from None

    def dump(number: int, name: str, mod: tvm.IRModule) -> None:
        (directory / f"{number}_{name}.py").write_text(mod.script(show_meta=False))

    return dump


def _make_parent(output: Path) -> None:
    """Make the library's directory, before the work of compiling."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileError(f"cannot write {output}: {error.strerror or error}") from None


def library_path(output: Path, host: Host) -> Path:
    """The path with the suffix of the host's shared libraries: behind it, or instead of another host's."""
    if output.suffix not in {known.suffix for known in HOSTS.values()}:
        return output.with_name(output.name + host.suffix)
    return output if host.is_here else output.with_suffix(host.suffix)


def _export(executable: Any, target: CompileTarget, link: Callable[..., None], output: Path) -> Path:
    """Write the library beside its place, under the name that it keeps, then move it there."""
    directory = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        directory.mkdir()
        made = directory / output.name
        executable.mod.export_library(str(made), fcompile=link, fpack_imports=target.pack_imports)
        made.replace(output)
    except OSError as error:
        raise CompileError(f"cannot write {output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return output

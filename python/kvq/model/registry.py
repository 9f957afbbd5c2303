"""Which module implements which family."""

from __future__ import annotations

from tvm.ir import IRModule

from kvq.config import ModelConfig
from kvq.errors import CompileError

from .llama import LlamaForCausalLM

#: ``model_type`` of a configuration to the module that implements it.
MODELS = {"llama": LlamaForCausalLM}


def export_model(config: ModelConfig) -> tuple[IRModule, list[str]]:
    """Build the Relax module of a model, on the opaque cache and float32 weights.

    Returns
    -------
    mod : IRModule
        Functions ``prefill``, ``decode`` and ``create_paged_kv_cache``.
    names : list of str
        Parameter names in the order of the packed tuple.
    """
    if config.model_type not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise CompileError(f"model_type {config.model_type!r} cannot be compiled: known are {known}")
    model = MODELS[config.model_type](config)
    mod, params, _ = model.export_tvm(spec=model.get_default_spec(), allow_extern=True)
    return mod, [name for name, _ in params]

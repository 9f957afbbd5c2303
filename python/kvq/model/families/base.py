"""What a family is made of: its reading of ``config.json``, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kvq.errors import ConfigError


@dataclass(frozen=True)
class HFConfig:
    """The content of a ``config.json``, with what its family takes for granted.

    Attributes
    ----------
    data : dict
        Keys and values; those that the file leaves out and the family defines are there.
    path : Path
        The file, for messages.
    """

    data: dict[str, Any]
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; ``default`` where it is absent or null."""
        value = self.data.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of a key that must be there.

        Raises
        ------
        ConfigError
            If it is absent or null.
        """
        if self.data.get(key) is None:
            raise ConfigError(f"{self.path}: {key} is missing")
        return self.data[key]

    def refuse(self, problem: str) -> NoReturn:
        """Raise a :class:`ConfigError` that names the file."""
        raise ConfigError(f"{self.path}: {problem}")

    def per_layer(self, rule: Callable[[int], Any]) -> tuple[Any, ...]:
        """``rule(i)`` for every layer ``i``."""
        return tuple(rule(i) for i in range(self.need("num_hidden_layers")))


def sliding_layers(config: HFConfig, slides: Callable[[int], bool]) -> dict[str, Any]:
    """The fields of a model of which some layers slide.

    Parameters
    ----------
    config : HFConfig
        ``sliding_window``, and ``layer_types`` where the file lists them.
    slides : callable
        Whether layer ``i`` slides, where it does not.

    Returns
    -------
    dict
        ``sliding_window`` and ``layer_types``; empty where there is no window.
    """
    window = config.get("sliding_window")
    if window is None:
        return {}
    kinds = config.get("layer_types") or config.per_layer(
        lambda i: "sliding_attention" if slides(i) else "full_attention"
    )
    return {"sliding_window": window, "layer_types": kinds}


@dataclass(frozen=True)
class TensorNames:
    """Names of a layer's tensors, below ``model.layers.N.``; several are concatenated along the outputs.

    Attributes
    ----------
    qkv, gate_up : tuple of str
        The projections that the library has as one.
    router : str
        What chooses a token's experts.
    expert_gate_up, expert_down : tuple of str, str
        Of expert ``{}``.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"


def _nothing(_config: HFConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A family of checkpoints.

    Attributes
    ----------
    model_type : str
        As in ``config.json``.
    fields : callable
        From the configuration to those fields of :class:`~kvq.config.ModelConfig` that are not what
        :mod:`kvq.loader.hf_config` reads for every family.
    defaults : dict
        Keys that files of the family leave out, with the values they mean.
    names : TensorNames
        Where its tensors have other names than Llama's.
    norm_offset : float
        Added to the weights of norms when they are converted: 1 where the checkpoint stores ``w - 1``.
    activations : str
        What tensor cores take its activations in unless told: ``float16``, or ``bfloat16`` where these leave
        fp16's range.
    """

    model_type: str
    fields: Callable[[HFConfig], dict[str, Any]] = _nothing
    defaults: dict[str, Any] = field(default_factory=dict)
    names: TensorNames = TensorNames()
    norm_offset: float = 0.0
    activations: str = "float16"

"""Model and chat configuration: what a checkpoint says, normalized and validated.

``ModelConfig`` is one family-independent description of the architecture; ``ChatConfig`` is the file
``mlc-chat-config.json`` that ``kvq gen_config`` writes and every later stage reads.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvq.errors import ConfigError

#: Name of the file that ``gen_config`` writes.
CHAT_CONFIG_NAME = "mlc-chat-config.json"

#: Kinds of RoPE scaling that a model may ask for, by ``rope_type``.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

#: What the tokens of a layer see, by Hugging Face's names.
LayerType = Literal["full_attention", "sliding_attention"]
#: Which RoPE a layer has: the model's, that of its sliding layers, or none.
RopeKind = Literal["global", "local", "none"]
#: Activations of a gated feed-forward network.
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer, as far as layers of a model differ.

    Attributes
    ----------
    window : int or None
        A query at position p sees the keys at ``p - window + 1 .. p``; None: all up to p.
    rope : {"global", "local", "none"}
        Which RoPE turns queries and keys.
    """

    window: int | None = None
    rope: RopeKind = "global"


class ModelConfig(BaseModel):
    """Architecture of a decoder-only transformer. Field names are Hugging Face's where it has the field.

    Attributes
    ----------
    sliding_window : int or None
        Tokens that a sliding layer sees, the query's own among them.
    layer_types : tuple of str or None
        ``full_attention`` or ``sliding_attention`` for each layer. None: every layer slides if there is a
        ``sliding_window``, otherwise none does.
    rope_local_theta : float or None
        RoPE base of the sliding layers, which then have no scaling (Gemma 3). None: the one of all layers.
    rope_layers : tuple of bool or None
        Whether each layer has RoPE (SmolLM3). None: all have.
    attn_logit_softcapping : float or None
        ``c`` of the scores ``c * tanh(score / c)``, before the mask (Gemma 2).
    attention_sinks : bool
        Each layer has a learned logit a query head that takes part in the softmax without a value (gpt-oss).
    query_pre_attn_scalar : float or None
        Scores are scaled by its inverse square root. None: ``head_dim``.
    rms_norm_eps : float
        Of every norm, whatever its type.
    norm_type : {"rms_norm", "layer_norm"}
        ``layer_norm`` has a bias (StableLM).
    norm_placement : {"pre", "post", "both"}
        Norms before attention and feed-forward network (Llama), after them and before the residual (OLMo 2),
        or both (Gemma 2).
    qk_norm : {"head", "projection"} or None
        RMS norm of queries and keys before RoPE: of each head (Qwen3), or of all heads together (OLMo 2).
    embedding_scale : float
        What embeddings are multiplied by (Gemma).
    final_logit_softcapping : float or None
        ``c`` of the logits ``c * tanh(logit / c)`` (Gemma 2).
    num_experts, num_experts_per_tok, moe_intermediate_size : int or None
        Experts of a sparse layer, how many a token uses, and the width of each. None: the model has none.
    norm_topk_prob : bool
        Whether the weights of a token's experts are divided by their sum.
    moe_layers : tuple of bool or None
        Whether each layer is sparse. None: all are, if there are experts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0, le=4096)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rotary_dim: int | None = None
    max_position_embeddings: int = Field(default=2048, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = Field(default=None, gt=0)
    layer_types: tuple[LayerType, ...] | None = None
    rope_local_theta: float | None = Field(default=None, gt=0)
    rope_layers: tuple[bool, ...] | None = None
    attn_logit_softcapping: float | None = Field(default=None, gt=0)
    attention_sinks: bool = False
    query_pre_attn_scalar: float | None = Field(default=None, gt=0)
    norm_type: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_placement: Literal["pre", "post", "both"] = "pre"
    qk_norm: Literal["head", "projection"] | None = None
    embedding_scale: float = Field(default=1.0, gt=0)
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    num_experts: int | None = Field(default=None, gt=0)
    num_experts_per_tok: int | None = Field(default=None, gt=0)
    moe_intermediate_size: int | None = Field(default=None, gt=0)
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] | None = None

    @property
    def sm_scale(self) -> float:
        """What scores are multiplied by."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Whether each layer's feed-forward network is a mixture of experts."""
        return self.moe_layers or (self.num_experts is not None,) * self.num_hidden_layers

    @property
    def layer_attention(self) -> tuple[LayerAttention, ...]:
        """Attention of every layer."""
        count = self.num_hidden_layers
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        slides = [kind == "sliding_attention" for kind in self.layer_types or (kind,) * count]
        local: RopeKind = "global" if self.rope_local_theta is None else "local"
        return tuple(
            LayerAttention(
                window=self.sliding_window if sliding else None,
                rope="none" if not rotates else local if sliding else "global",
            )
            for sliding, rotates in zip(slides, self.rope_layers or (True,) * count, strict=True)
        )

    @property
    def cache_window(self) -> int | None:
        """Tokens that a row sees in any layer, where every layer slides; None: all before it."""
        windows = [layer.window for layer in self.layer_attention]
        return None if None in windows else self.sliding_window

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rope_scaling is not None and self.rope_scaling.get("rope_type") not in ROPE_TYPES:
            raise ValueError(
                f"rope_scaling has the unknown rope_type {self.rope_scaling.get('rope_type')!r}: "
                f"known are {', '.join(ROPE_TYPES)}"
            )
        for name in ("layer_types", "rope_layers", "moe_layers"):
            of_layers = getattr(self, name)
            if of_layers is not None and len(of_layers) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(of_layers)} entries, but num_hidden_layers is {self.num_hidden_layers}"
                )
        if "sliding_attention" in (self.layer_types or ()) and self.sliding_window is None:
            raise ValueError("layer_types names sliding layers, but sliding_window is missing")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is not supported: use {' or '.join(ACTIVATIONS)}"
            )
        if any(self.sparse_layers) and None in (
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
        ):
            raise ValueError("a mixture of experts needs num_experts, num_experts_per_tok and their width")
        if (self.num_experts_per_tok or 0) > (self.num_experts or 0):
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {self.num_experts}"
            )
        return self


class ChatConfig(BaseModel):
    """The content of ``mlc-chat-config.json``: MLC-LLM's fields and kvq's own after them.

    The JSON key ``model_config`` is the attribute ``model`` (pydantic keeps the other name to itself).
    Sizes are in tokens. A ``sliding_window_size`` other than -1 makes every layer of a model without windows
    slide; -1 leaves a model as it is.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())

    version: str = "0.1.0"
    model_type: str
    quantization: str
    model: ModelConfig = Field(alias="model_config")
    vocab_size: int = Field(gt=0)
    context_window_size: int = Field(gt=0)
    sliding_window_size: int = -1
    prefill_chunk_size: int = Field(gt=0)
    attention_sink_size: int = -1
    tensor_parallel_shards: int = Field(default=1, gt=0)
    pipeline_parallel_stages: int = Field(default=1, gt=0)
    max_batch_size: int = Field(gt=0)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    tokenizer_files: list[str] = Field(default_factory=list)
    tokenizer_info: dict[str, Any] = Field(default_factory=dict)
    conv_template: str | dict[str, Any]
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    # kvq's own: cache scheme, how each matrix is stored (of weights ``source``), ids the sampler may draw,
    # chat format and where an answer ends.
    kv_quantization: str = "none"
    weight_storage: dict[str, str] = Field(default_factory=dict)
    active_vocab_size: int = Field(gt=0)
    chat_template: str | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    stop_strings: list[str] = Field(default_factory=list)

    @property
    def served_model(self) -> ModelConfig:
        """The model that is compiled: with the window of ``sliding_window_size``, if there is one."""
        if self.sliding_window_size == -1:
            return self.model
        return self.model.model_copy(update={"sliding_window": self.sliding_window_size, "layer_types": None})

    @model_validator(mode="after")
    def _check_windows(self) -> ChatConfig:
        window, own = self.sliding_window_size, self.model.sliding_window
        if window != -1 and window < 1:
            raise ValueError(
                f"sliding_window_size must be -1 (none beside the model's own) or positive, not {window}"
            )
        if window != -1 and own is not None and self.model.cache_window != window:
            raise ValueError(
                f"sliding_window_size {window} contradicts the model's own window of {own} tokens: use -1"
            )
        if self.attention_sink_size > 0:
            raise ValueError(
                f"attention_sink_size {self.attention_sink_size} is not supported: a window keeps no first "
                "tokens, use -1"
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> ChatConfig:
        """Read the configuration from a file, or from the directory that holds it.

        Raises
        ------
        ConfigError
            If the file is missing, is not JSON, or a key is missing, unknown or of a wrong value.
        """
        path = Path(path)
        if path.is_dir():
            path = path / CHAT_CONFIG_NAME
        return parse_config(cls, read_json(path, ConfigError), path)

    def save(self, path: str | Path) -> Path:
        """Validate and write the configuration; an earlier file is replaced only by a whole new one.

        Raises
        ------
        ConfigError
            If a field was given an invalid value, or the file cannot be written.
        """
        path = Path(path)
        if path.is_dir():
            path = path / CHAT_CONFIG_NAME
        data = self.model_dump(mode="json", by_alias=True)
        parse_config(type(self), data, path)
        write_text_atomically(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        return path


def parse_config(kind: type[Any], data: Any, path: Path) -> Any:
    """Validate ``data`` as a pydantic model, turning a failure into one line that names key and file."""
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_validation(error)}") from None


def describe_validation(error: ValidationError) -> str:
    """The first problem of a pydantic error in one line, with the number of further ones."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "is missing"
    elif first["type"] == "extra_forbidden":
        message = "is not a known key"
    elif first["type"] != "value_error":
        message = f"{message}, not {first['input']!r}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return " ".join(f"{key}{': ' if key else ''}{message}{more}".split())


def read_json(path: Path, error: type[Exception]) -> Any:
    """Read a JSON file; raise ``error`` with one line if it is missing, unreadable or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise error(f"{path}: not valid JSON: {problem}") from None


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it into place.

    Raises
    ------
    ConfigError
        If the directory is not writable or the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as problem:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None

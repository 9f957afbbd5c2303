"""Model and chat configuration: what a checkpoint says, normalized and validated.

``ModelConfig`` is one family-independent description of the architecture; ``ChatConfig`` is the file
``mlc-chat-config.json`` that ``kvq gen_config`` writes and every later stage reads.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ModelConfig(BaseModel):
    """Architecture of a decoder-only transformer. Field names are Hugging Face's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rotary_dim: int | None = None
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"

"""The families of checkpoints that can be read: one file each, plain data, no compiler."""

from .base import Family, HFConfig, TensorNames
from .gemma import GEMMA, GEMMA2
from .gemma3 import GEMMA3_TEXT
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .olmo2 import OLMO2
from .phi3 import PHI3
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_moe import QWEN3_MOE
from .smollm3 import SMOLLM3
from .stablelm import STABLELM

#: Families by the ``model_type`` of their configuration.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        PHI3,
        SMOLLM3,
        OLMO2,
        STABLELM,
    )
}

__all__ = ["FAMILIES", "Family", "HFConfig", "TensorNames"]

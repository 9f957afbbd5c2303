"""The table of schemes: how weights are stored, and how the KV cache is.

``--quantization`` names a weight scheme, or an alias that also names a cache scheme
(``q4f16kv`` = weights ``q4f16_1`` with an int4 cache). ``--kv-quantization`` sets the cache alone:
``none``, ``int8``, ``int4``, ``int3``, or a mix spelled ``k=int4:v=int3``. ``float32`` rounds nothing,
whatever the weights: what the quality of the others is measured against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvq.errors import ConfigError

#: Bits of a cache component by its name; ``None`` keeps the rows as they are.
KV_BITS: dict[str, int | None] = {"none": None, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
#: Keeps K and V in float32, both of them.
EXACT = "float32"


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of a model are stored.

    Attributes
    ----------
    name : str
        The name used on the command line and in file metadata; MLC-LLM's where it has one.
    matrices : str or None
        Storage (:mod:`kvq.quantization.storage`) of every weight matrix; None where each has its own.
    vectors : str
        Dtype of norms and biases.
    row_dtype : str
        Dtype in which unquantized K and V rows are kept under this scheme.
    table : dict
        Storage of each matrix by its name in the library, where each has its own.
    """

    name: str
    matrices: str | None
    vectors: str
    row_dtype: str
    table: Mapping[str, str] = field(default_factory=dict)

    def storage(self, name: str, is_matrix: bool) -> str:
        """Storage of a parameter.

        Raises
        ------
        ConfigError
            If each matrix has its own, and this one is not in the table.
        """
        if not is_matrix:
            return self.vectors
        if self.matrices is not None:
            return self.matrices
        if name not in self.table:
            raise ConfigError(
                f"--quantization {self.name} needs the checkpoint, which says how {name} is stored: "
                "run kvq gen_config on it"
            )
        return self.table[name]


#: Stores every matrix as the checkpoint has it: the codes of a GGUF, AWQ or GPTQ file are taken over.
SOURCE = "source"

WEIGHT_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        WeightScheme("q0f32", "float32", "float32", "float32"),
        WeightScheme("q0f16", "float16", "float16", "float16"),
        WeightScheme("q4f16_1", "int4", "float16", "float16"),
        WeightScheme(SOURCE, None, "float32", "float16"),
    )
}


@dataclass(frozen=True)
class KVQuantization:
    """Storage of sealed K and V: each one of the keys of :data:`KV_BITS`, or both :data:`EXACT`."""

    k: str = "none"
    v: str = "none"

    @property
    def k_bits(self) -> int | None:
        """Bits of a key code, or None for unquantized keys."""
        return KV_BITS.get(self.k)

    @property
    def v_bits(self) -> int | None:
        """Bits of a value code, or None for unquantized values."""
        return KV_BITS.get(self.v)

    def row_dtype(self, weights: WeightScheme) -> str:
        """Dtype of rows that are not sealed, and of unquantized pages, beside ``weights``."""
        if self.k == EXACT:
            return "float32"
        return weights.row_dtype if self.k_bits is None and self.v_bits is None else "float16"

    def __str__(self) -> str:
        return self.k if self.k == self.v else f"k={self.k}:v={self.v}"

    @classmethod
    def parse(cls, text: str) -> KVQuantization:
        """Read ``int4`` or ``k=int4:v=int3``.

        Raises
        ------
        ConfigError
            If the text names no scheme.
        """
        known = ", ".join([EXACT, *KV_BITS])
        parts = dict(part.split("=", 1) for part in text.split(":") if "=" in part)
        if not parts and text in (EXACT, *KV_BITS):
            return cls(text, text)
        if set(parts) == {"k", "v"} and len(text.split(":")) == 2 and set(parts.values()) <= set(KV_BITS):
            return cls(parts["k"], parts["v"])
        raise ConfigError(
            f"unknown --kv-quantization {text!r}: use one of {known}, or a mix such as k=int4:v=int3"
        )


#: Names that stand for a weight scheme together with a cache scheme.
ALIASES = {
    "q4f16kv": ("q4f16_1", KVQuantization("int4", "int4")),
    "q3f16kv": ("q4f16_1", KVQuantization("int3", "int3")),
}


#: What a checkpoint of floats becomes when nothing is asked.
DEFAULT_QUANTIZATION = "q4f16kv"


def resolve(
    quantization: str, kv_quantization: str | None = None, table: Mapping[str, str] | None = None
) -> tuple[WeightScheme, KVQuantization]:
    """Turn the two command-line names into a weight scheme and a cache scheme.

    Parameters
    ----------
    quantization : str
        A key of :data:`WEIGHT_SCHEMES` or :data:`ALIASES`.
    kv_quantization : str, optional
        Overrides the cache scheme of the alias; a plain weight scheme defaults to ``none``.
    table : mapping, optional
        Of ``source``: the storage of each matrix, as the model's configuration has it.

    Raises
    ------
    ConfigError
        If either name is unknown.
    """
    weights, kv = ALIASES.get(quantization, (quantization, KVQuantization()))
    if weights not in WEIGHT_SCHEMES:
        known = ", ".join([*WEIGHT_SCHEMES, *ALIASES])
        raise ConfigError(f"unknown --quantization {quantization!r}: use one of {known}")
    if kv_quantization is not None:
        kv = KVQuantization.parse(kv_quantization)
    scheme = WEIGHT_SCHEMES[weights]
    return (replace(scheme, table=table) if scheme.matrices is None and table else scheme), kv

"""The language model in a checkpoint of several parts: its configuration, and tensors by their own names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from kvq.loader.checkpoint import TensorFile
    from kvq.quantization.storage import PackedRows

#: ``model_type`` of such a checkpoint -> that of its language model.
_LANGUAGE_MODELS = {"gemma3": "gemma3_text"}
#: How tensors of the language model begin, and how they would in a checkpoint of its own.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
#: How tensors of the other parts begin.
_OTHER_PARTS = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)


def text_config(data: dict[str, Any]) -> dict[str, Any] | None:
    """The ``config.json`` of the language model in a checkpoint of several parts; None where there is one."""
    model_type, text = data.get("model_type"), data.get("text_config")
    if model_type not in _LANGUAGE_MODELS or not isinstance(text, dict):
        return None
    shared = {key: data[key] for key in ("quantization_config",) if key in data}
    return {"model_type": _LANGUAGE_MODELS[model_type], **shared, **text}


class TextPart:
    """The tensors of the language model in a file.

    Parameters
    ----------
    file : TensorFile
        The whole file.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._stored = {_own_name(name): name for name in file.names() if not name.startswith(_OTHER_PARTS)}

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._file.shape(self._stored[name])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` of a tensor."""
        return self._file.read(self._stored[name], start, stop)

    def storage(self, name: str) -> str:
        """How a matrix is kept as it is."""
        return self._file.storage(self._stored[name])

    def packed(self, name: str, start: int, stop: int) -> PackedRows:
        """Rows of a matrix whose storage has codes."""
        return self._file.packed(self._stored[name], start, stop)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _own_name(name: str) -> str:
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name

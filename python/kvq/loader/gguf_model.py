"""A GGUF file as a checkpoint: its configuration, and tensors by Hugging Face's names and order of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvq.loader.gguf_blocks import STORAGE_OF
from kvq.loader.gguf_config import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, architecture_of, read_config
from kvq.loader.gguf_file import GGUFFile
from kvq.loader.gguf_names import places, unpermuted_rows
from kvq.model.families import FAMILIES
from kvq.quantization.storage import PackedRows


class GGUFModel:
    """A GGUF file read as a model.

    Attributes
    ----------
    file : GGUFFile
        The open file; its ``metadata`` also holds the tokenizer.
    config : ModelConfig
        The architecture.
    """

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self._architecture = architecture_of(self.file)
        self._norm_offset = np.float32(FAMILIES[self._architecture.family].norm_offset)
        self._places = {
            name: place
            for stored in self.file.names()
            if stored not in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)
            for name, place in places(self._architecture, stored, self.file.shape(stored))
        }
        self.config = read_config(self.file, self._architecture, set(self._places))

    def names(self) -> list[str]:
        """Tensor names, as Hugging Face spells them."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, ``(out, in)`` for a matrix."""
        return self._places[name].shape

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows ``start .. stop - 1`` of a tensor."""
        values = self.file.read(self._places[name].tensor, self._rows(name, start, stop))
        if self._norm_offset and name.endswith("norm.weight"):
            return values - self._norm_offset  # Hugging Face stores w - 1, GGUF w
        return values

    def storage(self, name: str) -> str:
        """The storage that keeps a matrix; float16 for types that have none of their own."""
        return STORAGE_OF.get(self.file.kind(self._places[name].tensor), "float16")

    def packed(self, name: str, start: int, stop: int) -> PackedRows:
        """Rows of a matrix whose storage has codes."""
        return self.file.packed(self._places[name].tensor, self._rows(name, start, stop))

    def _rows(self, name: str, start: int, stop: int) -> np.ndarray | slice:
        """Where the file has these rows."""
        place, heads = self._places[name], 0
        if self._architecture.permuted:
            if ".q_proj." in name:
                heads = self.config.num_attention_heads
            elif ".k_proj." in name:
                heads = self.config.num_key_value_heads
        # A head count that does not fit is left to the check of shapes.
        if heads and place.shape[0] % (2 * heads) == 0:
            return unpermuted_rows(heads, place.shape[0] // heads)[start:stop]
        return slice(place.first_row + start, place.first_row + stop)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

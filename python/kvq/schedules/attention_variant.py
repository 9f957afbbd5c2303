"""How the attention of a layer may differ from a Llama's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionVariant:
    """What a kernel of attention is built for, beside the geometry.

    Attributes
    ----------
    window : int or None
        A query at position p sees the keys at ``p - window + 1 .. p``; None: all up to p.
    softcap : float or None
        Scores become ``softcap * tanh(score / softcap)`` before the mask.
    sinks : bool
        A logit a query head takes part in the softmax without a value: a further argument of the kernel.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def suffix(self) -> str:
        """What kernels of this variant have behind their name; empty for the plain one."""
        parts = (
            f"_window_{self.window}" if self.window is not None else "",
            f"_softcap_{self.softcap:g}".replace(".", "_") if self.softcap is not None else "",
            "_sinks" if self.sinks else "",
        )
        return "".join(parts)


#: Every key up to the query's, scores as they are.
PLAIN = AttentionVariant()

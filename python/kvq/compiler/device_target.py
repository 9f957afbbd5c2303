"""What the targets of all GPUs have in common: the pipelines that follow kvq's own passes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import tvm
from tvm.ir.transform import Pass


class DeviceTarget(ABC):
    """A target whose kernels are TIRx beside what Relax legalizes (``lowering.py``)."""

    features: tuple[str, ...] = ()

    @property
    @abstractmethod
    def target(self) -> tvm.target.Target:
        """TVM's target."""

    @property
    def relax_pipeline(self) -> Pass:
        """What follows kvq's passes."""
        from .lowering import relax_pipeline

        return relax_pipeline(self.target)

    @property
    def tir_pipeline(self) -> str:
        """Name of the pipeline for kernels."""
        from .lowering import MIXED

        return MIXED

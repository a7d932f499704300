"""What comes out of a step: tensors on the device at first, numbers for the engine once the step has run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from engine_core.runner import StepResult

from .staging import Download, Staging

# Puts its tensors, on the CPU now, into the result.
Read = Callable[[StepResult, Sequence[torch.Tensor]], None]


@dataclass(slots=True)
class StepOutputs:
    """Collects a step's outputs while it is launched."""

    num_requests: int
    _tensors: list[torch.Tensor] = field(init=False, default_factory=list)
    _parts: list[tuple[slice, Read]] = field(init=False, default_factory=list)

    def add(self, tensors: Sequence[torch.Tensor], read: Read) -> None:
        first = len(self._tensors)
        self._tensors += tensors
        self._parts.append((slice(first, len(self._tensors)), read))

    def send(self, staging: Staging) -> RunningStep:
        """Let them come."""
        return RunningStep(self.num_requests, staging.download(self._tensors), self._parts)


@dataclass(frozen=True, slots=True)
class RunningStep:
    """As `engine_core.runner.LaunchedStep`."""

    num_requests: int
    download: Download
    parts: Sequence[tuple[slice, Read]]

    def wait(self) -> StepResult:
        tensors = self.download.wait()
        result = StepResult([None] * self.num_requests)
        for places, read in self.parts:
            read(result, tensors[places])
        return result

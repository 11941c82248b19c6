"""Adam on the host: fp32 parameters and their moments lie in its memory, and it updates them.

Gradients come from the device and parameters go back to it, each as one copy of one buffer. On GPUs the buffers are
pinned. The update is that of the optimizer on a device: `torch.optim.AdamW` with the fused kernel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from executor.offload import HostMemory
from executor.parallel import FlatGradients
from executor.record import Recorder
from simulator.specs.program import Phase, TaskKind


class HostAdamW:
    """Updates a model's parameters from gradients on a device.

    Attributes:
        parameters: fp32 copies of the model's, in its order, which the optimizer updates.
        optimizer: of these.

    Args:
        parameters: of the model, fp32, on one device.
        learning_rate: fp32 [] on the host, read in each step.
    """

    def __init__(
        self, parameters: Sequence[Tensor], memory: HostMemory, *, learning_rate: Tensor, weight_decay: float
    ) -> None:
        self._on_device, self._memory = list(parameters), memory
        sizes = [parameter.numel() for parameter in parameters]
        self._values = memory.buffer("parameters", 4 * sum(sizes)).view(torch.float32)
        self._gradients = memory.buffer("gradients", 4 * sum(sizes)).view(torch.float32).zero_()
        self.parameters = [
            nn.Parameter(values.view_as(parameter))
            for values, parameter in zip(self._values.split(sizes), parameters, strict=True)
        ]
        # The device's buffer of gradients begins with the last parameter.
        reversed_gradients = reversed(self._gradients.split(sizes[::-1]))
        for parameter, gradient in zip(self.parameters, reversed_gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, weight_decay=weight_decay, fused=True)
        self.load_parameters()

    @torch.no_grad()
    def load_parameters(self) -> None:
        """Take over the parameters that the device holds."""
        for mine, theirs in zip(self.parameters, self._on_device, strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def step(self, gradients: FlatGradients, recorder: Recorder) -> None:
        """Update the parameters on the host and on the device, and forget the gradients."""
        flat = gradients.flat
        num_bytes = flat.numel() * flat.element_size()
        shape = (flat.numel(), len(self.parameters))
        with recorder.task("optimizer.copy_out", TaskKind.COPY_TO_HOST, Phase.UPDATE, (num_bytes,)):
            self._gradients.copy_(flat, non_blocking=True)
            self._memory.synchronize()
        with recorder.task("optimizer", TaskKind.HOST_OPTIMIZER, Phase.UPDATE, shape):
            self.optimizer.step()
            gradients.zero()
        with recorder.task("optimizer.copy_in", TaskKind.COPY_FROM_HOST, Phase.UPDATE, (num_bytes,)):
            for mine, theirs in zip(self.parameters, self._on_device, strict=True):
                theirs.copy_(mine, non_blocking=True)

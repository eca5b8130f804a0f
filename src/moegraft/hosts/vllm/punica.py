"""vLLM's punica wrappers with :class:`StepSlots`, by the dotted name that vLLM loads them by."""

from __future__ import annotations

from vllm.lora.punica_wrapper import punica_cpu, punica_gpu

from moegraft.hosts.vllm.steps import StepSlots


class PunicaWrapperCPU(StepSlots, punica_cpu.PunicaWrapperCPU):
    """The CPU's."""


class PunicaWrapperGPU(StepSlots, punica_gpu.PunicaWrapperGPU):
    """The one for CUDA."""


#: Dotted name of a stock wrapper -> the class that takes its place.
OURS: dict[str, type[StepSlots]] = {
    "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU": PunicaWrapperCPU,
    "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU": PunicaWrapperGPU,
}

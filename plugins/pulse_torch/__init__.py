"""The torch model executor: loaders, decoder family, attention over blocks, KV cache."""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl

__all__ = ["pulse_block_stores", "pulse_model_executors"]


def _executor(build: Build) -> Any:
    from pulse_torch.executor import TorchExecutor

    return TorchExecutor(build)


def _device_store(build: Build) -> Any:
    from pulse_torch.device import DeviceStore

    assert build.shape is not None
    return DeviceStore(build.shape, build.argument or "cuda")


@hookimpl
def pulse_model_executors() -> list[Plugin]:
    """The executor of this package."""
    needs = ("torch", "numba", "numpy", "transformers", "safetensors", "gguf")
    summary = "Llama, Mistral, Qwen2, Qwen3, Gemma 3 from Hugging Face directories and GGUF files"
    return [Plugin("torch", _executor, summary, needs)]


@hookimpl
def pulse_block_stores() -> list[Plugin]:
    """The arena on a torch device."""
    return [Plugin("device", _device_store, "an arena in GPU memory", ("torch",))]

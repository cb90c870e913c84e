"""The torch model executor: loaders, decoder family, attention over blocks, KV cache."""

from __future__ import annotations

from typing import Any

from pulse import Build, Plugin, hookimpl

__all__ = ["pulse_arrays", "pulse_block_stores", "pulse_diagnostics", "pulse_model_executors"]


def _arrays(_: Build) -> Any:
    from pulse_torch.arrays import TorchArrays

    return TorchArrays()


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


@hookimpl
def pulse_arrays() -> list[Plugin]:
    """Tensors and buffers for conformance kits."""
    return [Plugin("torch", _arrays, "CPU tensors, numpy buffers, for kits", ("torch", "numpy"))]


@hookimpl
def pulse_diagnostics() -> list[tuple[str, bool, str]]:
    """What torch can do here."""
    try:
        import torch
    except ImportError:
        return [("torch", False, "not installed; pip install -c constraints.txt pulse-llm")]
    from pulse_torch.loaders import resolve_dtype
    from pulse_torch.threads import default_threads

    chosen = str(resolve_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    rows = [("CPU", True, f"{default_threads()} compute threads; --dtype auto is {chosen}")]
    if torch.cuda.is_available():
        rows.append(("CUDA", True, f"{torch.cuda.get_device_name(0)}; --device auto uses it"))
    else:
        text = "no CUDA device, or a CPU build of torch; --device auto uses the CPU"
        rows.append(("CUDA", False, text))
    return rows

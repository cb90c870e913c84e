"""Load a model by path or name: a Hugging Face directory, a GGUF file, or ``org/name``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from pulse.errors import ConfigError, ModelNotFound
from pulse.types import Geometry
from pulse_torch.loaders.files import one_line
from pulse_torch.spec import DTYPES, ModelSpec
from pulse_torch.tokenizer import TextTokenizer
from pulse_torch.weights import Weights

__all__ = ["LoadedModel", "load", "resolve_device", "resolve_dtype"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja"]
_HUB_IGNORE = ["original/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `path` is the directory or file that it came from."""

    spec: ModelSpec
    weights: Weights
    tokenizer: TextTokenizer
    geometry: Geometry
    dtype: torch.dtype
    device: torch.device
    path: Path


def load(model: str | Path, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a Hugging Face directory, a GGUF file, or ``org/name`` from the Hugging Face hub.

    dtype: "auto", "bfloat16" or "float32"; see `resolve_dtype`.
    device: "auto", "cpu" or "cuda"; see `resolve_device`.

    Raises ConfigError, ModelNotFound, ModelFormatError and UnsupportedModel, each naming what is
    wrong.
    """
    on = resolve_device(device)
    kind = resolve_dtype(dtype, on)
    path = _locate(model)
    if path.is_dir():
        from pulse_torch.loaders import hf

        spec = hf.load_spec(path)
        tokenizer = TextTokenizer(hf.load_tokenizer(path), spec.stop_ids)
        weights = hf.load_weights(path, spec, kind, on)
    else:
        from pulse_torch.loaders import gguf

        file = gguf.open_gguf(path)
        spec = gguf.load_spec(file)
        tokenizer = TextTokenizer(gguf.load_tokenizer(file), spec.stop_ids)
        weights = gguf.load_weights(file, spec, kind, on)
    return LoadedModel(spec, weights, tokenizer, spec.geometry(kind), kind, on, path)


def resolve_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one.

    Raises ConfigError for an unknown name, and for CUDA where there is none.
    """
    kind = name.partition(":")[0]
    if name != "auto" and kind not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} must be auto, cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}: torch sees no CUDA device; use device=cpu or install a torch with "
            "CUDA"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is bfloat16 where the device multiplies it fast, else float32.

    Raises ConfigError for an unknown name.
    """
    if name == "auto":
        fast = device.type == "cuda" or _cpu_multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} must be auto, {' or '.join(DTYPES)}")
    return DTYPES[name]


def _cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has AVX-512 or AMX instructions for bfloat16, and torch uses them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # Private in torch, so that either may go away; without them the kernel is asked.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    found = [getattr(torch.cpu, probe, None) for probe in probes]
    if all(found):
        return any(probe() for probe in found if probe is not None)
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16"})


def _locate(model: str | Path) -> Path:
    path = Path(model).expanduser()
    if path.exists():
        return path
    name = str(model)
    if isinstance(model, str) and _HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return _download(name)
    raise ModelNotFound(
        f"{name}: no such file or directory; pass a directory with config.json and safetensors, "
        "a GGUF file, or org/name of a model on the Hugging Face hub"
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORE))
    except Exception as error:
        # Which exceptions a failed connection ends in depends on the hub's HTTP library.
        raise ModelNotFound(
            f"{name}: no such file or directory, and not to be had from the Hugging Face hub "
            f"({one_line(error)}); pass a local directory or a GGUF file instead"
        ) from error

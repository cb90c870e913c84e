"""A Hugging Face directory: config.json, safetensors and a tokenizer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from pulse.errors import ModelFormatError, ModelNotFound, UnsupportedModel
from pulse_torch.loaders.files import fingerprint, one_line, read_json
from pulse_torch.spec import ARCHITECTURES, ModelSpec, from_config, token_ids
from pulse_torch.weights import Weights, assemble

__all__ = ["load_spec", "load_tokenizer", "load_weights"]

_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""What comes before ``embed_tokens.weight`` and ``layers.0``; multimodal models nest the text."""

_HEADS = ("lm_head.", "language_model.lm_head.")

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_SANDWICH_PARTS = _LAYER_PARTS | {
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_spec(directory: Path) -> ModelSpec:
    """The spec from config.json and, where there is one, generation_config.json.

    Code that comes with a model never runs. Raises ModelNotFound, ModelFormatError and
    UnsupportedModel.
    """
    architecture = read_json(directory / "config.json").get("model_type")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{directory}: architecture {architecture!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelFormatError(f"{directory / 'config.json'}: {one_line(error)}") from error
    spec = from_config(config).with_stops(_generation_stops(directory))
    source = tuple(fingerprint(path) for path in sorted(set(_weight_files(directory).values())))
    return dataclasses.replace(spec, source=source)


def load_weights(
    directory: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Weights:
    """The weights, tensor by tensor. Raises ModelNotFound and ModelFormatError."""
    return assemble(spec, _Safetensors(directory, spec), dtype, device)


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer. Raises ModelNotFound and ModelFormatError."""
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise ModelNotFound(f"there is no tokenizer.json in {directory}")
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # tokenizers raises bare Exceptions for files that it cannot parse.
        raise ModelFormatError(
            f"the tokenizer in {directory} cannot be read: {one_line(error)}"
        ) from error


def _generation_stops(directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    return token_ids(read_json(path).get("eos_token_id")) if path.exists() else ()


def _weight_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor; a single file under "", as its tensors are not known yet."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ModelFormatError(f"{index} has no weight_map")
        files = {tensor: directory / str(name) for tensor, name in names.items()}
    elif single.exists():
        files = {"": single}
    else:
        raise ModelNotFound(
            f"there is neither model.safetensors nor model.safetensors.index.json in {directory}"
        )
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise ModelFormatError(f"{file} is missing; {index.name} says that it holds weights")
    return files


class _Safetensors:
    """A `TensorSource` over one or several safetensors files, which stay mapped, not read."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self._files = {}
        for path in sorted(set(_weight_files(directory).values())):
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 - not a mapping
                self._files[name] = (file, path)
        self._parts = _SANDWICH_PARTS if spec.sandwich_norms else _LAYER_PARTS
        self._prefix = self._first(_PREFIXES, "embed_tokens.weight")
        self._head = self._first(_HEADS, "weight")

    def _first(self, prefixes: tuple[str, ...], name: str) -> str:
        found = (prefix for prefix in prefixes if prefix + name in self._files)
        return next(found, prefixes[0])

    def name(self, part: str, layer: int | None) -> str:
        stem, kind = part.split(".")
        if layer is not None:
            return f"{self._prefix}layers.{layer}.{self._parts[stem]}.{kind}"
        if stem == "head":
            return self._head + kind
        return f"{self._prefix}{'embed_tokens' if stem == 'embedding' else 'norm'}.{kind}"

    def shape(self, part: str, layer: int | None) -> tuple[int, ...] | None:
        name = self.name(part, layer)
        if name not in self._files:
            return None
        return tuple(self._files[name][0].get_slice(name).get_shape())

    def read(self, part: str, layer: int | None, out: Tensor) -> None:
        name = self.name(part, layer)
        file, path = self._files[name]
        try:
            tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ModelFormatError(f"{path}: tensor {name} cannot be read: {error}") from error
        if not tensor.is_floating_point():
            raise UnsupportedModel(f"{path}: tensor {name} is {tensor.dtype}, not floating point")
        out.copy_(tensor)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelFormatError(f"{path} is damaged or truncated: {error}") from error

"""One GGUF file of a Llama, Mistral, Qwen2, Qwen3 or Gemma 3 model, as llama.cpp writes it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from pulse.errors import ModelFormatError, UnsupportedModel
from pulse_torch.loaders.files import fingerprint, one_line
from pulse_torch.loaders.gguf_file import GgufFile, GgufTensor, open_gguf
from pulse_torch.loaders.gguf_tokenizer import load_tokenizer
from pulse_torch.spec import ModelSpec, Rope, from_config
from pulse_torch.weights import Weights, assemble

__all__ = ["load_spec", "load_tokenizer", "load_weights", "open_gguf"]

_CONFIGS = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma3": "Gemma3TextConfig",
}
_KINDS = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
)
_PARTS = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_ffn_norm": "post_ffw_norm",
}
Bytes = npt.NDArray[np.uint8]

_PIECE = 1 << 19
"""Weights that a worker dequantises at a time: a piece stays in cache and bounds the memory."""

_GEMMA_PATTERN = 6
_GEMMA_27B_LAYERS = 62


def load_spec(file: GgufFile) -> ModelSpec:
    """The spec from the metadata. Raises UnsupportedModel and ModelFormatError."""
    metadata = _Metadata(file)
    if metadata.number("expert_count", 0):
        raise UnsupportedModel(f"{file.path}: mixtures of experts are not supported")
    arguments = _common(metadata)
    if metadata.architecture == "gemma3":
        arguments |= _gemma3(metadata, arguments)
    elif window := metadata.number("attention.sliding_window", 0):
        # Only converters of Mistral write this under "llama"; its windows are on all layers.
        arguments |= {"sliding_window": window}
    name = _CONFIGS[metadata.architecture]
    if metadata.architecture == "llama" and "sliding_window" in arguments:
        name = "MistralConfig"
    try:
        spec = from_config(getattr(transformers, name)(**arguments))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ModelFormatError(
            f"{file.path}: the metadata contradict each other: {one_line(error)}"
        ) from error
    return dataclasses.replace(
        spec,
        ropes=_scaled(file, spec.ropes),
        source=(fingerprint(file.path),),
        # Biases have no key: they are there or not.
        qkv_bias=spec.qkv_bias or "blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )


def load_weights(
    file: GgufFile, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Weights:
    """Dequantise into `dtype`, piece by piece. Raises ModelFormatError and UnsupportedModel."""
    # numpy lets the GIL go in its loops, so that pieces really run side by side.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return assemble(spec, _GgufSource(file, spec, pool), dtype, device)


class _Metadata:
    """The keys of one architecture, checked on access."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", "missing"))
        if self.architecture not in _CONFIGS:
            raise UnsupportedModel(
                f"{file.path}: architecture {self.architecture!r} is not supported; supported: "
                f"{', '.join(_CONFIGS)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<key>``."""
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: Any = None) -> Any:
        """A number that is the same for all layers. Raises ModelFormatError when it is missing."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(
                    f"{self.file.path}: {self.architecture}.{key} differs between layers"
                )
            value = value[0]
        if value is None:
            raise ModelFormatError(
                f"{self.file.path}: {self.architecture}.{key} is missing from the metadata"
            )
        return value


def _common(metadata: _Metadata) -> dict[str, Any]:
    """Arguments of the transformers configuration that all architectures share."""
    file, hidden = metadata.file, metadata.number("embedding_length")
    heads = metadata.number("attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path}: tensor token_embd.weight is missing")
    head_dim = metadata.number("attention.key_length", hidden // max(heads, 1))
    rotated = metadata.number("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(
            f"{file.path}: rotary embedding of {rotated} of {head_dim} dimensions is not supported"
        )
    stops = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "hidden_size": hidden,
        "num_hidden_layers": metadata.number("block_count"),
        "intermediate_size": metadata.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.number("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": [stop for stop in stops if stop is not None],
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "rope_parameters": _rope_parameters(metadata),
    }


def _rope_parameters(metadata: _Metadata) -> dict[str, Any]:
    default = 1e6 if metadata.architecture == "gemma3" else 1e4
    parameters: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(metadata.number("rope.freq_base", default)),
    }
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return parameters
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{metadata.file.path}: {metadata.architecture}.rope.scaling.type={kind!r} is not "
            "supported; supported: none, linear, yarn"
        )
    factor = float(metadata.number("rope.scaling.factor"))
    parameters |= {"rope_type": kind, "factor": factor}
    return parameters | (_yarn(metadata, factor) if kind == "yarn" else {})


def _yarn(metadata: _Metadata, factor: float) -> dict[str, Any]:
    parameters = {}
    original = metadata.get("rope.scaling.original_context_length")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = metadata.get(f"rope.scaling.{theirs}")
        if value is not None:
            parameters[ours] = value
    # llama.cpp multiplies its own factor onto YaRN's; transformers takes the product.
    extra = metadata.get("rope.scaling.attn_factor")
    if extra is not None:
        parameters["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return parameters


def _gemma3(metadata: _Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """Windows, the second rotary embedding and the attention scale, which has no key."""
    layers = common["num_hidden_layers"]
    window = metadata.number("attention.sliding_window", 0)
    pattern = metadata.get("attention.sliding_window_pattern", _GEMMA_PATTERN)
    if not isinstance(pattern, list):
        pattern = [(layer + 1) % max(pattern, 1) != 0 for layer in range(layers)]
    scale = common["head_dim"]
    if layers == _GEMMA_27B_LAYERS:
        scale = common["hidden_size"] // common["num_attention_heads"]
    local = float(metadata.number("rope.freq_base_swa", 1e4))
    return {
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if window and sliding else "full_attention" for sliding in pattern
        ],
        "query_pre_attn_scalar": scale,
        "rope_parameters": {
            "full_attention": common["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
    }


def _scaled(file: GgufFile, ropes: tuple[Rope, ...]) -> tuple[Rope, ...]:
    """Llama 3's scaling comes as a tensor of divisors of the frequencies."""
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise UnsupportedModel(f"{file.path}: LongRoPE (tensor {name}) is not supported")
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ropes
    _check_kind(file, tensor)
    divisors = torch.from_numpy(_dequantise(tensor, tensor.data)).flatten()
    scaled = []
    for rope in ropes:
        if len(divisors) != len(rope.inv_freq):
            raise ModelFormatError(
                f"{file.path}: tensor rope_freqs.weight has shape {tensor.shape}; the metadata "
                f"want ({len(rope.inv_freq)},)"
            )
        frequencies = torch.tensor(rope.inv_freq) / divisors
        scaled.append(Rope(tuple(frequencies.tolist()), rope.scaling))
    return tuple(scaled)


class _GgufSource:
    """A `TensorSource` that undoes what llama.cpp's converter did to the weights."""

    def __init__(self, file: GgufFile, spec: ModelSpec, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._spec = spec
        self._pool = pool
        self._permuted = file.metadata.get("general.architecture") == "llama"

    def name(self, part: str, layer: int | None) -> str:
        stem, kind = part.split(".")
        name = f"{_PARTS[stem]}.{kind}"
        return name if layer is None else f"blk.{layer}.{name}"

    def shape(self, part: str, layer: int | None) -> tuple[int, ...] | None:
        tensor = self._file.tensors.get(self.name(part, layer))
        return None if tensor is None else tensor.shape

    def read(self, part: str, layer: int | None, out: Tensor) -> None:
        tensor = self._file.tensors[self.name(part, layer)]
        _check_kind(self._file, tensor)
        stem = part.split(".")[0]
        if self._permuted and stem in ("q", "k"):
            out = _interleaved(out, self._spec.head_dim)
        # Gemma's norms are stored with their 1 added.
        offset = self._spec.norm_offset if stem.endswith("norm") else 0.0
        pieces = _pieces(tensor, out)
        for _ in self._pool.map(lambda piece: _fill(tensor, offset, *piece), pieces):
            pass


def _interleaved(out: Tensor, head_dim: int) -> Tensor:
    """A view of `out` in the order in which llama.cpp stores the rows of a query or key head.

    Its rotary embedding pairs neighbours (2i, 2i + 1), ours i with i + head_dim / 2.
    """
    halves = out.view(-1, 2, head_dim // 2, *out.shape[1:])
    return halves.transpose(1, 2)


def _pieces(tensor: GgufTensor, out: Tensor) -> Iterator[tuple[Bytes, Tensor]]:
    """(rows of the file, where they go); whole heads where `out` is interleaved."""
    rows = tensor.data.shape[0]
    if rows == 1:
        yield tensor.data, out
        return
    each = rows // out.shape[0]
    group = max(1, _PIECE // (each * tensor.shape[-1]))
    for start in range(0, out.shape[0], group):
        yield tensor.data[start * each : (start + group) * each], out[start : start + group]


def _fill(tensor: GgufTensor, offset: float, data: Bytes, out: Tensor) -> None:
    values = _dequantise(tensor, data)
    if offset:
        values -= np.float32(offset)
    out.copy_(torch.from_numpy(values).view(out.shape))


def _dequantise(tensor: GgufTensor, data: Bytes) -> npt.NDArray[np.float32]:
    """float32 values of whole rows, in memory of their own."""
    values: npt.NDArray[np.float32] = quants.dequantize(data, tensor.kind)
    # F32 comes back as a view of the file, which is mapped read-only.
    return values if values.flags.writeable else values.copy()


def _check_kind(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.kind in _KINDS:
        return
    name = tensor.kind.name if tensor.kind is not None else f"type {tensor.kind_id}"
    raise UnsupportedModel(
        f"{file.path}: tensor {tensor.name} is quantised as {name}; supported: "
        f"{', '.join(kind.name for kind in _KINDS)}"
    )

"""A decoder as one configurable block: Llama, Mistral, Qwen2, Qwen3 and the text of Gemma 3."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pulse.errors import ModelFormatError, UnsupportedModel
from pulse.types import Geometry

__all__ = ["ARCHITECTURES", "DTYPES", "ModelSpec", "Rope", "from_config"]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
"""The `model_type`s understood; "gemma3" is the text part of the multimodal checkpoint."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""The dtypes a model runs in, by name."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
# Left out on purpose: "dynamic" and "longrope", whose frequencies depend on the sequence length, so
# that keys already in the cache would have to be rotated again.
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """One kind of rotary embedding.

    inv_freq: head_dim / 2 inverse frequencies in radians per token, exact float32 values.
    scaling: factor on both cosine and sine (YaRN; otherwise 1).
    """

    inv_freq: tuple[float, ...]
    scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder, as far as its arithmetic is concerned.

    norm_offset: added to the stored RMSNorm weights (1.0 for Gemma's ``1 + w``).
    activation: "silu" or "gelu_tanh", of the gated FFN.
    sandwich_norms: norms after attention and after the FFN too, each before its residual add.
    embed_scale: factor on the embeddings, rounded to the dtype of the model first.
    scale: factor on the attention scores.
    tied_head: the embedding is the output head.
    windows: per layer the tokens attended to, the query's own included; None is the whole context.
    ropes, rope_of: the kinds of rotary embedding, and per layer which of them it uses.
    stop_ids: tokens that end a text, ascending.
    source: (name, bytes, digest of samples) of each weights file; part of the identity.
    """

    architecture: str
    layers: int
    hidden: int
    ffn: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    norm_eps: float
    scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    norm_offset: float = 0.0
    activation: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    embed_scale: float = 1.0
    tied_head: bool = False
    stop_ids: tuple[int, ...] = ()
    bos: int | None = None
    source: tuple[tuple[str, int, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "q_heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelFormatError(f"{name}={value!r} of the model must be at least 1")
        if self.q_heads % self.kv_heads:
            raise ModelFormatError(
                f"{self.q_heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )
        for rope in self.ropes:
            if 2 * len(rope.inv_freq) != self.head_dim:
                raise UnsupportedModel(
                    f"{self.architecture}: rotary embedding of {2 * len(rope.inv_freq)} of "
                    f"{self.head_dim} dimensions (partial_rotary_factor); only the whole head "
                    "is supported"
                )

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection: all query, key and value heads."""
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def identity(self) -> str:
        """A stable hash of everything that decides what a KV block of this model holds.

        Frequencies enter with six digits, as their last bits may differ between machines.
        """
        fields = dataclasses.asdict(self)
        fields["ropes"] = [
            [[f"{value:.6g}" for value in rope.inv_freq], f"{rope.scaling:.6g}"]
            for rope in self.ropes
        ]
        for unrelated in ("stop_ids", "bos"):
            del fields[unrelated]
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def geometry(self, dtype: torch.dtype) -> Geometry:
        """The shape as scheduling and KV memory see it, for KV in `dtype`."""
        return Geometry(
            layers=self.layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            vocab_size=self.vocab,
            dtype=str(dtype).removeprefix("torch."),
            element_bytes=dtype.itemsize,
            windows=self.windows,
            identity=self.identity(),
        )

    def with_stops(self, ids: Iterable[int]) -> ModelSpec:
        """The same model with more stop ids."""
        return dataclasses.replace(self, stop_ids=tuple(sorted({*self.stop_ids, *ids})))


def from_config(config: Any) -> ModelSpec:
    """The spec of a transformers configuration.

    Raises UnsupportedModel for an architecture or a setting that the decoder does not know, naming
    it, and ModelFormatError for sizes that contradict each other.
    """
    architecture = str(getattr(config, "model_type", ""))
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    _refuse_quantised(config)
    stops = token_ids(getattr(config, "eos_token_id", None))
    if architecture == "gemma3":
        config = config.text_config
    architecture = "gemma3_text" if architecture == "gemma3" else architecture
    _refuse_settings(config, architecture)
    head_dim = _head_dim(config)
    kinds = _layer_kinds(config, architecture)
    ropes, rope_of = _ropes(config, kinds, head_dim)
    gemma = architecture == "gemma3_text"
    bias = bool(getattr(config, "attention_bias", False))
    return ModelSpec(
        architecture=architecture,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_eps=float(config.rms_norm_eps),
        scale=float(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
        windows=tuple(
            config.sliding_window if kind == "sliding_attention" else None for kind in kinds
        ),
        ropes=ropes,
        rope_of=rope_of,
        norm_offset=1.0 if gemma else 0.0,
        activation=_activation(config, architecture),
        qkv_bias=True if architecture == "qwen2" else bias,
        out_bias=False if architecture == "qwen2" else bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma,
        embed_scale=float(config.hidden_size**0.5) if gemma else 1.0,
        tied_head=bool(config.tie_word_embeddings),
        stop_ids=tuple(sorted({*stops, *token_ids(config.eos_token_id)})),
        bos=config.bos_token_id,
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """Ids of a configuration field that holds none, one or a list of them; ascending."""
    if value is None:
        return ()
    return (
        tuple(sorted({int(token) for token in value}))
        if isinstance(value, list | tuple)
        else (value,)
    )


def _refuse_quantised(config: Any) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        read = quantised.get if isinstance(quantised, dict) else vars(quantised).get
        raise UnsupportedModel(
            f"quantisation {read('quant_method', 'of an unknown kind')} of safetensors weights is "
            "not supported; pass the unquantised model or a GGUF file"
        )


def _refuse_settings(config: Any, architecture: str) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None):
            raise UnsupportedModel(
                f"{architecture}: {name}={getattr(config, name)!r} is not supported; "
                "only models without soft-capping are"
            )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"{architecture}: use_bidirectional_attention is not supported; only causal models are"
        )


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _activation(config: Any, architecture: str) -> str:
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{architecture}: activation {name!r} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _layer_kinds(config: Any, architecture: str) -> tuple[str, ...]:
    """Per layer "sliding_attention" or "full_attention"."""
    window = getattr(config, "sliding_window", None)
    if window is None or architecture == "llama":
        return ("full_attention",) * int(config.num_hidden_layers)
    if architecture == "mistral":
        return ("sliding_attention",) * int(config.num_hidden_layers)
    kinds = tuple(str(kind) for kind in config.layer_types)
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise UnsupportedModel(f"{architecture}: layers of type {kind!r} are not supported")
    if len(kinds) != config.num_hidden_layers:
        raise ModelFormatError(
            f"layer_types names {len(kinds)} layers, num_hidden_layers is "
            f"{config.num_hidden_layers}"
        )
    return kinds


def _ropes(
    config: Any, kinds: tuple[str, ...], head_dim: int
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The distinct rotary embeddings and which of them each layer uses."""
    nested = {
        kind for kind in set(kinds) if isinstance((config.rope_parameters or {}).get(kind), dict)
    }
    ropes: list[Rope] = []
    rope_of = []
    for kind in kinds:
        rope = _rope(config, kind if kind in nested else None, head_dim)
        if rope not in ropes:
            ropes.append(rope)
        rope_of.append(ropes.index(rope))
    return tuple(ropes), tuple(rope_of)


def _rope(config: Any, layer_type: str | None, head_dim: int) -> Rope:
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPES:
        raise UnsupportedModel(
            f"rotary embedding of type {kind!r} is not supported; supported: {', '.join(_ROPES)}"
        )
    if kind != "default":
        options = {"layer_type": layer_type} if layer_type else {}
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
        return Rope(tuple(frequencies.tolist()), float(scaling))
    rotated = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return Rope(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))

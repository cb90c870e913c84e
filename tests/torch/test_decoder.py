"""The decoder against transformers, with dense attention written out here."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pulse.errors import ModelFormatError, UnsupportedModel
from pulse_torch.decoder import Decoder
from pulse_torch.loaders import hf, load
from pulse_torch.spec import from_config
from pulse_torch.weights import Weights

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama, 1 KV head": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama, 4 KV heads": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama, wide heads": lambda: LlamaConfig(**SIZES | {"head_dim": 16}),
    "llama, tied, biases": lambda: LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama, llama3 rope": lambda: LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3_ROPE)),
    "llama, linear rope": lambda: LlamaConfig(**SIZES, rope_parameters=dict(LINEAR_ROPE)),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral, window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "qwen2": lambda: Qwen2Config(**SIZES, sliding_window=4),
    "qwen2, windows": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen2, layer types": lambda: Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3, tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3, yarn rope": lambda: Qwen3Config(**SIZES, rope_parameters=dict(YARN_ROPE)),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7}, sliding_window=6, query_pre_attn_scalar=16
    ),
    "gemma3, linear rope": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 2},
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=512,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}


def random_model(config: Any, seed: int = 0) -> Any:
    """A transformers model whose norms and biases are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3 if weight.dim() == 1 else 0.15)
    return model


def dense_logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits ``[n, vocab]`` with causal, windowed attention over the whole sequence."""
    spec, positions = decoder.spec, torch.arange(len(ids))
    distance = positions[:, None] - positions
    group = spec.q_heads // spec.kv_heads
    h = decoder.embed(torch.tensor(ids))
    for layer, window in enumerate(spec.windows):
        q, k, v = (x.float() for x in decoder.qkv(h, layer, positions))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * spec.scale
        hidden = (distance < 0) | (distance >= (window or len(ids)))
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        attention = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))
        h = decoder.finish(h, attention.flatten(1).to(h.dtype), layer)
    return decoder.logits(h)


def decoder_of(model: Any, directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model.save_pretrained(directory)
    spec = hf.load_spec(directory)
    return Decoder(spec, hf.load_weights(directory, spec, dtype, CPU))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name]())
    ids = torch.randint(0, 97, (23,)).tolist()
    expected = model(torch.tensor([ids])).logits[0]
    logits = dense_logits(decoder_of(model, tmp_path), ids)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3, tied", "gemma3"])
def test_bfloat16_is_as_close_as_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(CONFIGS[name]())
    ids = torch.randint(0, 97, (23,)).tolist()
    exact = model(torch.tensor([ids])).logits[0]
    logits = dense_logits(decoder_of(model, tmp_path, torch.bfloat16), ids)
    theirs = model.bfloat16()(torch.tensor([ids])).logits[0].float()
    assert (logits - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_tokens_do_not_depend_on_their_neighbours(tmp_path: Path) -> None:
    decoder = decoder_of(random_model(CONFIGS["qwen3, tied"]()), tmp_path)
    positions = torch.tensor([5, 0, 9, 2])
    h = decoder.embed(torch.tensor([3, 1, 4, 1]))
    together = decoder.qkv(h, 1, positions)
    for i in range(4):
        alone = decoder.qkv(h[i : i + 1], 1, positions[i : i + 1])
        for one, all_ in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], all_[i], rtol=0, atol=1e-6)


def test_shapes_and_inputs_left_alone(tmp_path: Path) -> None:
    decoder = decoder_of(random_model(CONFIGS["llama"]()), tmp_path)
    h = decoder.embed(torch.tensor([1, 2, 3]))
    q, k, v = decoder.qkv(h, 0, torch.arange(3))
    assert (q.shape, k.shape, v.shape) == ((3, 4, 8), (3, 2, 8), (3, 2, 8))
    before, attention = h.clone(), torch.randn(3, 32)
    kept, milestones = attention.clone(), []
    out = decoder.finish(h, attention, 0, lambda: milestones.append(1))
    assert milestones == [1]
    assert torch.equal(h, before)
    assert torch.equal(attention, kept)
    assert torch.equal(out, decoder.finish(h, attention, 0))
    assert decoder.logits(out[:1]).shape == (1, 97)
    assert decoder.embed(torch.tensor([], dtype=torch.int64)).shape == (0, 32)
    assert decoder.qkv(h[:0], 0, torch.arange(0))[0].shape == (0, 4, 8)


def test_rotary_tables_grow(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"max_position_embeddings": 20000})
    decoder = decoder_of(random_model(config), tmp_path)
    assert decoder.positions == 4096
    h = decoder.embed(torch.tensor([7, 7]))
    near = decoder.qkv(h, 0, torch.tensor([1, 3]))
    far = decoder.qkv(h, 0, torch.tensor([15001, 15003]))
    assert decoder.positions >= 15004
    # Scores depend on the distance alone.
    for head in range(2):
        scores = [(q[1, 2 * head] @ k[0, head]).item() for q, k, _ in (near, far)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    again = decoder.qkv(h, 0, torch.tensor([1, 3]))
    assert torch.equal(again[0], near[0])


def test_gemma_rounds_its_embedding_factor(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**SIZES | {"hidden_size": 40, "num_hidden_layers": 1})
    model = random_model(config)
    decoder = decoder_of(model, tmp_path, torch.bfloat16)
    expected = model.bfloat16().get_input_embeddings()(torch.arange(97))
    assert torch.equal(decoder.embed(torch.arange(97)), expected)


def test_spec_of_a_config() -> None:
    spec = from_config(CONFIGS["gemma3"]())
    assert spec.windows == (6, 6, 6, 6, 6, None, 6)
    assert spec.rope_of == (0, 0, 0, 0, 0, 1, 0)
    assert (spec.norm_offset, spec.scale, spec.stop_ids, spec.bos) == (1.0, 0.25, (1,), 2)
    assert spec.tied_head
    assert spec.sandwich_norms
    assert spec.qk_norm
    geometry = spec.geometry(torch.bfloat16)
    assert (geometry.dtype, geometry.element_bytes, geometry.growing) == ("bfloat16", 2, (5,))
    assert geometry.identity == spec.identity()


def test_identity_tells_models_apart() -> None:
    spec = from_config(CONFIGS["llama"]())
    assert spec.identity() == from_config(CONFIGS["llama"]()).identity()
    assert spec.identity() == spec.with_stops([5]).identity()
    others = [
        from_config(CONFIGS["llama, llama3 rope"]()),
        dataclasses.replace(spec, source=(("model.safetensors", 10, "a"),)),
        dataclasses.replace(spec, source=(("model.safetensors", 10, "b"),)),
    ]
    assert len({spec.identity(), *(other.identity() for other in others)}) == 4


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (lambda: transformers.GPT2Config(), "'gpt2' is not supported; supported: llama"),
        (lambda: Gemma3TextConfig(**SIZES, final_logit_softcapping=30.0), "final_logit_softcap"),
        (lambda: Gemma3TextConfig(**SIZES, attn_logit_softcapping=50.0), "attn_logit_softcap"),
        (lambda: Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "bidirectional"),
        (lambda: LlamaConfig(**SIZES, hidden_act="relu"), "activation 'relu'"),
        (
            lambda: LlamaConfig(
                **SIZES,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "rotary embedding of type 'dynamic'",
        ),
        (
            lambda: LlamaConfig(**SIZES, quantization_config={"quant_method": "gptq"}),
            "quantisation gptq",
        ),
        (
            lambda: LlamaConfig(
                **SIZES,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                partial_rotary_factor=0.5,
            ),
            "partial_rotary_factor",
        ),
    ],
)
def test_unsupported_settings_are_named(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        from_config(config())


def test_heads_must_divide() -> None:
    with pytest.raises(ModelFormatError, match="4 query heads are not a multiple of 3"):
        from_config(LlamaConfig(**SIZES | {"num_key_value_heads": 3}))


def test_weights_count_a_tied_head_once(tmp_path: Path) -> None:
    tied = decoder_of(random_model(CONFIGS["qwen3, tied"]()), tmp_path).weights
    assert isinstance(tied, Weights)
    assert tied.head is tied.embedding
    assert tied.bytes == sum(tensor.nbytes for tensor in set(tied.tensors()))


SMOLLM2 = Path(
    os.environ.get("PULSE_SMOLLM2", "~/.cache/pulse/SmolLM2-135M-Instruct.Q4_1.gguf")
).expanduser()


def transformers_model_of(path: Path) -> Any:
    """The file through transformers' own reader; its from_pretrained would want accelerate.

    The configuration is the published one: reading it from the file takes seconds.
    """
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model


@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is absent; set PULSE_SMOLLM2")
def test_real_model() -> None:
    model = load(SMOLLM2, dtype="float32", device="cpu")
    text = "The capital of France is Paris. 你好，世界! 12345 apples, naïve café. "
    ids = model.tokenizer.encode(text, chat=False)
    assert len(ids) >= 20
    assert model.tokenizer.decode(ids) == text
    reference = transformers_model_of(SMOLLM2)
    expected = reference(torch.tensor([ids])).logits[0]
    logits = dense_logits(Decoder(model.spec, model.weights), ids)
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))

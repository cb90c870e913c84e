"""Loading from a Hugging Face directory and from GGUF, into the same canonical weights."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as library
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from pulse.errors import ConfigError, ModelFormatError, ModelNotFound, UnsupportedModel
from pulse_torch import loaders
from pulse_torch.loaders import gguf, gguf_file, hf
from pulse_torch.spec import ModelSpec, from_config
from pulse_torch.weights import Weights

CPU = torch.device("cpu")
VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama biases": lambda: LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=48),
    "qwen2": lambda: Qwen2Config(**SIZES, bos_token_id=1, eos_token_id=2),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7},
        sliding_window=16,
        query_pre_attn_scalar=32,
        bos_token_id=1,
        eos_token_id=2,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.2)
    return model


def small_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and that was that, then"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        chat_template="{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}",
    )


def saved(name: str, directory: Path) -> Any:
    model = random_model(CONFIGS[name]())
    model.save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return model


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Weights]:
    spec = hf.load_spec(directory)
    return spec, hf.load_weights(directory, spec, dtype, CPU)


def assert_same_weights(ours: Weights, theirs: Weights, *, atol: float = 0.0) -> None:
    pairs = list(zip(ours.tensors(), theirs.tensors(), strict=True))
    assert len(pairs) > 10
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


# --- Hugging Face directories ---------------------------------------------------------------


def test_weights_are_fused_and_tied(tmp_path: Path) -> None:
    state = saved("qwen2", tmp_path).state_dict()
    spec, weights = loaded(tmp_path)
    attention = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    layer = weights.layers[1]
    assert torch.equal(layer.qkv, torch.cat([state[f"{name}.weight"] for name in attention]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([state[f"{name}.bias"] for name in attention]))
    assert torch.equal(layer.gate_up[96:], state["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(weights.head, state["lm_head.weight"])
    assert layer.out_bias is None
    assert spec.qkv_rows == layer.qkv.shape[0]


def test_dtype_is_cast(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    _, exact = loaded(tmp_path)
    _, rounded = loaded(tmp_path, torch.bfloat16)
    for one, other in zip(rounded.tensors(), exact.tensors(), strict=True):
        assert torch.equal(one, other.to(torch.bfloat16))
    assert rounded.head is rounded.embedding


def test_shards_equal_one_file(tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    spec, one = loaded(tmp_path / "one")
    sharded, many = loaded(tmp_path / "many")
    assert_same_weights(one, many)
    assert dataclasses.replace(spec, source=()) == dataclasses.replace(sharded, source=())
    assert spec.identity() != sharded.identity()


def test_text_of_a_multimodal_gemma(tmp_path: Path) -> None:
    """The published checkpoints nest the text: in the config and in the names of the tensors."""
    saved("gemma3", tmp_path / "text")
    nested = tmp_path / "nested"
    nested.mkdir()
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    save_file(
        {f"language_model.{name}": tensor for name, tensor in tensors.items()},
        nested / "model.safetensors",
    )
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    (nested / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": config, "eos_token_id": [1, 106]})
    )
    plain, text = loaded(tmp_path / "text")
    spec, weights = loaded(nested)
    assert_same_weights(weights, text)
    assert spec.stop_ids == (1, 2, 106)
    same = dataclasses.replace(spec, source=(), stop_ids=())
    assert same == dataclasses.replace(plain, source=(), stop_ids=())


def test_load_a_directory(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    model = loaders.load(str(tmp_path), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16 == model.weights.embedding.dtype
    assert model.geometry == model.spec.geometry(torch.bfloat16)
    assert model.spec.stop_ids == (2, 5, 9)
    assert model.tokenizer.stop_ids >= {2, 5, 9}
    assert model.path == tmp_path
    (source,) = model.spec.source
    assert source[:2] == ("model.safetensors", (tmp_path / "model.safetensors").stat().st_size)


def damage_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def other_architecture(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "gpt2", "auto_map": {"AutoConfig": "x.X"}}')


def contradict(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": 65}))


def narrow(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))


def bias_wanted(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def lose_a_shard(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    )


def damage_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text('{"version": 1}')


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (without("config.json"), ModelNotFound, r"no config\.json in"),
        (damage_config, ModelFormatError, r"config\.json cannot be read as JSON"),
        (other_architecture, UnsupportedModel, "'gpt2' is not supported; supported: llama"),
        (contradict, ModelFormatError, r"config\.json.*hidden size \(65\)"),
        (without("model.safetensors"), ModelNotFound, r"neither model\.safetensors nor"),
        (truncate, ModelFormatError, r"model\.safetensors is damaged or truncated"),
        (lose_a_shard, ModelFormatError, r"model-00001-of-00002\.safetensors is missing"),
        (
            narrow,
            ModelFormatError,
            r"layers\.0\.mlp\.gate_proj\.weight has shape \(96, 64\).*wants \(100, 64\)",
        ),
        (bias_wanted, ModelFormatError, r"layers\.0\.self_attn\.q_proj\.bias is missing"),
        (without("tokenizer.json"), ModelNotFound, r"no tokenizer\.json in"),
        (damage_tokenizer, ModelFormatError, "tokenizer in .* cannot be read"),
    ],
)
def test_damaged_directories(
    damage: Callable[[Path], None], error: type[Exception], named: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=named):
        loaders.load(tmp_path, device="cpu")


# --- where a model comes from, and where it goes -----------------------------------------------


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/model.gguf", "nowhere", "a/b.gguf", "a/b/c"]
)
def test_paths_that_are_not_there(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or directory") as caught:
        loaders.load(name)
    assert name in str(caught.value)


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="pass a local directory or a GGUF file instead"):
        loaders.load("some-org/some-model")


def test_names_go_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    asked = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert loaders.load("some-org/some-model", device="cpu").path == tmp_path
    assert asked["name"] == "some-org/some-model"
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


def test_devices() -> None:
    assert loaders.resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match="device='tpu' must be auto, cpu or cuda"):
        loaders.resolve_device("tpu")


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loaders.resolve_device("auto") == CPU
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        loaders.load("anything", device="cuda")


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaders.resolve_dtype("float32", CPU) == torch.float32
    assert loaders.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='int4' must be auto, bfloat16 or float32"):
        loaders.resolve_dtype("int4", CPU)
    for fast, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loaders, "_cpu_multiplies_bfloat16", lambda fast=fast: fast)
        assert loaders.resolve_dtype("auto", CPU) == wanted


def test_the_cpu_is_asked_without_torchs_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = loaders._cpu_multiplies_bfloat16()
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported", raising=False)
    assert loaders._cpu_multiplies_bfloat16() in (expected, False)


# --- GGUF ---------------------------------------------------------------------------------------

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, names: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{names[part]}.{kind}"
    return f"{names[stem]}.{kind}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp stores them: element i of both halves, side by side."""
    rows = weight.shape[0] // heads
    order = [half * rows // 2 + i for i in range(rows // 2) for half in (0, 1)]
    return np.concatenate([weight[h * rows : (h + 1) * rows][order] for h in range(heads)])


def write_gguf(
    path: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    *,
    kinds: Callable[[str], Kind] = lambda name: Kind.F32,
    raw: dict[str, tuple[np.ndarray, Kind]] | None = None,
    extra: Callable[[Any], None] = lambda writer: None,
    omit: tuple[str, ...] = (),
    sizes: dict[str, Any] = SIZES,
    vocabulary: Callable[[Any], None] | None = None,
) -> Path:
    writer = library.GGUFWriter(path, arch)
    steps: dict[str, Callable[[], None]] = {
        "context_length": lambda: writer.add_context_length(sizes["max_position_embeddings"]),
        "embedding_length": lambda: writer.add_embedding_length(sizes["hidden_size"]),
        "block_count": lambda: writer.add_block_count(sizes["num_hidden_layers"]),
        "ffn": lambda: writer.add_feed_forward_length(sizes["intermediate_size"]),
        "heads": lambda: writer.add_head_count(sizes["num_attention_heads"]),
        "kv_heads": lambda: writer.add_head_count_kv(sizes["num_key_value_heads"]),
        "key_length": lambda: writer.add_key_length(sizes["head_dim"]),
        "eps": lambda: writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"]),
    }
    for name, step in steps.items():
        if name not in omit:
            step()
    (vocabulary or byte_level_vocabulary)(writer)
    extra(writer)
    for name, tensor in tensors.items():
        kind = kinds(name)
        writer.add_tensor(name, library.quants.quantize(tensor, kind), raw_dtype=kind)
    for name, (data, kind) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary(writer: Any) -> None:
    backend = small_tokenizer().backend_tokenizer
    vocab = backend.get_vocab()
    model = json.loads(backend.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(small_tokenizer().chat_template)


def gguf_tensors(state: dict[str, torch.Tensor], arch: str, *, tied: bool) -> dict[str, np.ndarray]:
    """What llama.cpp's converter writes for a model of the small sizes."""
    tensors = {}
    for name, tensor in state.items():
        if tied and name == "lm_head.weight":
            continue
        data = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            data = permuted(data, 4 if "q_proj" in name else 2)
        if arch == "gemma3" and name.endswith("norm.weight"):
            data = data + np.float32(1)
        tensors[gguf_name(name, GEMMA_NAMES if arch == "gemma3" else GGUF_NAMES)] = data
    return tensors


EXTRAS: dict[str, Callable[[Any], None]] = {
    "mistral": lambda writer: writer.add_sliding_window(48),
    "gemma3": lambda writer: (
        writer.add_sliding_window(16),
        writer.add_rope_scaling_type(library.RopeScalingType.LINEAR),
        writer.add_rope_scaling_factor(8.0),
        writer.add_rope_freq_base(1e6),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf_equals_hugging_face(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_PIECE", 1000)
    model = saved(name, tmp_path)
    arch = "llama" if name.startswith(("llama", "mistral")) else name
    spec, weights = loaded(tmp_path)
    tensors = gguf_tensors(model.state_dict(), arch, tied=spec.tied_head)
    path = write_gguf(
        tmp_path / "model.gguf",
        arch,
        tensors,
        extra=EXTRAS.get(name, lambda writer: None),
        sizes=SIZES | {"num_hidden_layers": spec.layers},
    )
    read = loaders.load(path, dtype="float32", device="cpu")
    assert_same_weights(read.weights, weights, atol=1e-6 if arch == "gemma3" else 0.0)
    same = dataclasses.replace(read.spec, source=(), stop_ids=spec.stop_ids, norm_eps=spec.norm_eps)
    assert same == dataclasses.replace(spec, source=())
    assert read.spec.norm_eps == pytest.approx(spec.norm_eps)
    assert read.spec.stop_ids == (2,)
    assert read.tokenizer.stop_ids == {2}


def llama_tensors(hidden: int) -> dict[str, np.ndarray]:
    """One layer whose matrices are all ``[hidden, hidden]``, two heads, tied."""
    random = np.random.default_rng(0)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}.weight": (hidden, hidden) for name in names}
    shapes |= {f"blk.0.{name}.weight": (hidden,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def llama_sizes(hidden: int) -> dict[str, Any]:
    return SIZES | {
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": hidden // 2,
    }


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    rows = np.arange(weight.shape[0])[:, None]
    source = permuted(np.broadcast_to(rows, weight.shape), heads)[:, 0]
    out = np.empty_like(weight)
    out[source] = weight
    return out


def check_values(path: Path, values: dict[str, np.ndarray], dtype: torch.dtype) -> None:
    file = gguf_file.open_gguf(path)
    spec = gguf.load_spec(file)
    layer, weights = None, gguf.load_weights(file, spec, dtype, CPU)
    layer = weights.layers[0]
    hidden = spec.hidden
    expected = {
        "token_embd": weights.embedding,
        "blk.0.attn_v": layer.qkv[2 * hidden :],
        "blk.0.ffn_up": layer.gate_up[hidden:],
        "blk.0.ffn_down": layer.down,
    }
    for name, ours in expected.items():
        assert torch.equal(ours, torch.from_numpy(values[f"{name}.weight"]).to(dtype)), name
    query = torch.from_numpy(unpermuted(values["blk.0.attn_q.weight"], 2)).to(dtype)
    assert torch.equal(layer.qkv[:hidden], query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
)
def test_quantised_by_the_library(
    kind: Kind, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_PIECE", 3000)
    tensors = llama_tensors(64)
    path = write_gguf(
        tmp_path / "model.gguf",
        "llama",
        tensors,
        kinds=lambda name: Kind.F32 if "norm" in name else kind,
        sizes=llama_sizes(64),
    )
    values = {}
    for name, tensor in tensors.items():
        quantised = library.quants.quantize(tensor, kind)
        values[name] = library.quants.dequantize(quantised, kind)
        assert np.abs(values[name] - tensor).max() < 0.5
    check_values(path, values, dtype)


# Per K-quant: bytes of a block of 256 and where its float16 scales are.
K_QUANTS = {Kind.Q4_K: (144, (0, 2)), Kind.Q5_K: (176, (0, 2)), Kind.Q6_K: (210, (208,))}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants(kind: Kind, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    size, scales = K_QUANTS[kind]
    plain, raw, values = {}, {}, {}
    for name, tensor in llama_tensors(256).items():
        if tensor.ndim == 1:
            plain[name] = tensor
            continue
        blocks = random.integers(0, 256, (tensor.shape[0], size), dtype=np.uint8)
        for at in scales:
            scale = random.uniform(0.001, 0.01, (tensor.shape[0], 1)).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8)
        raw[name] = (blocks, kind)
        values[name] = library.quants.dequantize(blocks, kind)
        assert np.isfinite(values[name]).all()
    path = write_gguf(tmp_path / "model.gguf", "llama", plain, raw=raw, sizes=llama_sizes(256))
    check_values(path, values, torch.float32)


def spec_of(path: Path) -> ModelSpec:
    return gguf.load_spec(gguf_file.open_gguf(path))


def small_gguf(tmp_path: Path, arch: str = "llama", **options: Any) -> Path:
    tensors = llama_tensors(64) | options.pop("more", {})
    for name in options.pop("less", ()):
        del tensors[name]
    sizes = llama_sizes(64) | options.pop("sizes", {})
    return write_gguf(tmp_path / f"{arch}.gguf", arch, tensors, sizes=sizes, **options)


def test_llama3_rope_comes_as_a_tensor(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    plain = spec_of(small_gguf(tmp_path)).ropes[0].inv_freq
    scaled = spec_of(small_gguf(tmp_path, more={"rope_freqs.weight": divisors})).ropes[0].inv_freq
    np.testing.assert_allclose(np.array(plain) / divisors, scaled, rtol=1e-6)


def test_yarn_in_the_metadata(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_rope_scaling_type(library.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    ours = spec_of(small_gguf(tmp_path, extra=extra))
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    theirs = from_config(LlamaConfig(**llama_sizes(64), rope_parameters=rope))
    assert ours.ropes == theirs.ropes
    assert ours.ropes[0].scaling > 1.1


@pytest.mark.parametrize("as_list", [False, True])
def test_gemma_window_pattern_in_the_metadata(as_list: bool, tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_sliding_window(16)
        pattern = [True, False, True] if as_list else 2
        writer.add_sliding_window_pattern(pattern)

    path = small_gguf(tmp_path, "gemma3", extra=extra, sizes={"num_hidden_layers": 3})
    assert spec_of(path).windows == (16, None, 16)


def scaling(kind: str) -> Callable[[Any], None]:
    def extra(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(4.0)

    return extra


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"arch": "falcon"}, UnsupportedModel, "'falcon' is not supported; supported: llama"),
        ({"less": ["blk.0.ffn_up.weight"]}, ModelFormatError, r"blk\.0\.ffn_up\.weight is missing"),
        ({"less": ["token_embd.weight"]}, ModelFormatError, r"token_embd\.weight is missing"),
        (
            {"sizes": {"intermediate_size": 65}},
            ModelFormatError,
            r"blk\.0\.ffn_gate\.weight has shape \(64, 64\); the configuration wants \(65, 64\)",
        ),
        ({"omit": ("heads",)}, ModelFormatError, r"llama\.attention\.head_count is missing"),
        ({"sizes": {"hidden_size": 63}}, ModelFormatError, "contradict each other.*63"),
        ({"extra": scaling("longrope")}, UnsupportedModel, "type='longrope' is not supported"),
        (
            {"extra": lambda w: w.add_rope_dimension_count(16)},
            UnsupportedModel,
            "rotary embedding of 16 of 32 dimensions",
        ),
        ({"extra": lambda w: w.add_expert_count(8)}, UnsupportedModel, "mixtures of experts"),
        (
            {"more": {"rope_factors_long.weight": np.ones(16, np.float32)}},
            UnsupportedModel,
            "LongRoPE",
        ),
        (
            {"more": {"rope_freqs.weight": np.ones(8, np.float32)}},
            ModelFormatError,
            r"rope_freqs\.weight has shape \(8,\)",
        ),
        (
            {"arch": "gemma3", "extra": lambda w: w.add_final_logit_softcapping(30.0)},
            UnsupportedModel,
            "final_logit_softcapping=30.0",
        ),
        (
            {
                "less": ["blk.0.ffn_up.weight"],
                "raw": {"blk.0.ffn_up.weight": (np.zeros((64, 64), np.int8), Kind.I8)},
            },
            UnsupportedModel,
            r"tensor blk\.0\.ffn_up\.weight is quantised as I8; supported: F32",
        ),
    ],
)
def test_gguf_that_cannot_be_loaded(
    options: dict[str, Any], error: type[Exception], named: str, tmp_path: Path
) -> None:
    path = small_gguf(tmp_path, **options)
    with pytest.raises(error, match=named):
        loaders.load(path, device="cpu")


def test_a_block_format_of_the_future(tmp_path: Path) -> None:
    path = small_gguf(tmp_path)
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    kind_at = data.index(name) + len(name) + 4 + 2 * 8
    data[kind_at : kind_at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"ffn_up\.weight is quantised as type 999"):
        loaders.load(path, device="cpu")


def test_gguf_truncated_anywhere(tmp_path: Path) -> None:
    whole = small_gguf(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [3, 10, 30, 100, 1000, 3000, len(whole) // 2, len(whole) - 100]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFormatError, match=r"cut\.gguf is (damaged|truncated|not a GGUF)"):
            loaders.load(path, device="cpu")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 something else entirely", "is not a GGUF file: it starts with b'PK"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "GGUF version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "little-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "damaged or truncated"),
    ],
)
def test_what_is_not_gguf(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=named):
        loaders.load(path, device="cpu")


# --- the tokenizers of GGUF files -----------------------------------------------------------------


def test_byte_level_tokenizer_round_trip(tmp_path: Path) -> None:
    ours = loaders.load(small_gguf(tmp_path), device="cpu").tokenizer
    theirs = small_tokenizer()
    for text in ("that cat, the mat", "1234 the 56", "naïve 你好 😀", "  the<|im_end|>cat", ""):
        ids = ours.encode(text, chat=False)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == text.replace("<|im_end|>", "")
    assert ours.encode("the", chat=True) == theirs.encode("<|im_start|>the")


def pre_tokenizer(pre: str, add_bos: bool | None = None) -> Callable[[Any], None]:
    def vocabulary(writer: Any) -> None:
        byte_level_vocabulary(writer)
        writer.kv_data[0]["tokenizer.ggml.pre"].value = pre
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)

    return vocabulary


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["Ġ", "Ġthey", "'ll", "Ġ12345", "!!", "Ċ", "x"]),
        ("smollm", ["Ġ", "Ġthey", "'ll", "Ġ", "1", "2", "3", "4", "5", "!!", "Ċ", "x"]),
        ("llama-bpe", ["Ġ", "Ġthey", "'ll", "Ġ", "123", "45", "!!Ċ", "x"]),
        ("qwen2", ["Ġ", "Ġthey", "'ll", "Ġ", "1", "2", "3", "4", "5", "!!Ċ", "x"]),
        ("tekken", ["Ġ", "Ġthey", "'ll", "Ġ", "1", "2", "3", "4", "5", "!!Ċ", "x"]),
        ("default", ["Ġ", "Ġthey", "'", "ll", "Ġ", "123", "45", "!!", "Ċ", "x"]),
    ],
)
def test_pre_tokenizers(pre: str, pieces: list[str], tmp_path: Path) -> None:
    path = small_gguf(tmp_path, vocabulary=pre_tokenizer(pre))
    backend = gguf.load_tokenizer(gguf_file.open_gguf(path)).backend_tokenizer
    cut = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("  they'll 12345!!\nx")]
    assert cut == pieces


@pytest.mark.parametrize(
    ("pre", "add_bos", "starts"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
    ],
)
def test_beginning_of_text(pre: str, add_bos: bool | None, starts: bool, tmp_path: Path) -> None:
    path = small_gguf(tmp_path, vocabulary=pre_tokenizer(pre, add_bos))
    tokenizer = loaders.load(path, device="cpu").tokenizer
    assert (tokenizer.encode("the", chat=False)[0] == 1) == starts


def sentencepiece_vocabulary(writer: Any) -> None:
    pieces = ["▁", *"thecasmondi", "th", "at", "he", "▁t", "▁the", "the", "cat", "▁c", "▁cat"]
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<turn>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*specials, *pieces])
    writer.add_token_scores([0.0] * len(specials) + [float(-i) for i in range(len(pieces))])
    writer.add_token_types([2, 3, 3, *[6] * 256, 4, *[1] * len(pieces)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def best_merges_first(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """Sentencepiece's BPE, plainly: merge the best-scored neighbours until none are left."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        found = [
            (scores[tokens.index(a + b)], -i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in tokens
        ]
        if not found:
            break
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        known = [tokens.index(part)] if part in tokens else []
        ids += known or [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return ids


def test_sentencepiece_tokenizer_round_trip(tmp_path: Path) -> None:
    path = small_gguf(tmp_path, vocabulary=sentencepiece_vocabulary)
    metadata = gguf_file.open_gguf(path).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    tokenizer = loaders.load(path, device="cpu").tokenizer
    for text in ("the cat sat on the mat", "that  is it", "naïve 你好 😀", "cathe </s"):
        ids = tokenizer.encode(text, chat=False)
        assert ids == [1, *best_merges_first(text, tokens, scores)]
        assert tokenizer.decode(ids) == text
        decoder = tokenizer.decoder()
        assert "".join([*(decoder.push(token) for token in ids), decoder.flush()]) == text
    assert tokens.index("<turn>") in tokenizer.encode("the<turn>cat", chat=False)


def test_gemma_keeps_spaces_and_needs_no_prefix(tmp_path: Path) -> None:
    def vocabulary(writer: Any) -> None:
        tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "▁", *"thecat", "th", "the", "▁c"]
        tokens = list(dict.fromkeys(tokens))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([3, 3, 3, 2, 4, *[1] * (len(tokens) - 5)])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_add_space_prefix(False)

    path = small_gguf(tmp_path, "gemma3", vocabulary=vocabulary)
    tokenizer = gguf.load_tokenizer(gguf_file.open_gguf(path))
    assert tokenizer.tokenize("the cat  the") == ["the", "▁c", "a", "t", "▁▁", "the"]
    assert tokenizer.decode(tokenizer.encode("the  cat"), skip_special_tokens=True) == "the  cat"
    assert tokenizer.encode("the")[0] == 2


@pytest.mark.parametrize(
    ("vocabulary", "error", "named"),
    [
        (pre_tokenizer("klingon"), UnsupportedModel, "pre='klingon' is not supported"),
        (lambda w: w.add_tokenizer_model("bert"), ModelFormatError, "tokens is missing"),
        (
            lambda w: (w.add_tokenizer_model("bert"), w.add_token_list(["a"])),
            UnsupportedModel,
            "tokenizer 'bert' is not supported; supported: gpt2, llama",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"])),
            ModelFormatError,
            "merges is missing",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"])),
            ModelFormatError,
            "scores is missing",
        ),
        (
            lambda w: (byte_level_vocabulary(w), w.add_unk_token_id(9999)),
            ModelFormatError,
            "unknown_token_id=9999 is not one of",
        ),
    ],
)
def test_tokenizers_that_cannot_be_built(
    vocabulary: Callable[[Any], None], error: type[Exception], named: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=named):
        loaders.load(small_gguf(tmp_path, vocabulary=vocabulary), device="cpu")

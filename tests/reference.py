"""Small random models, how transformers continues a prompt, and runs of the engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numba
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from pulse import Completion, Engine
from pulse.hookspecs import Build
from pulse_torch.executor import State, TorchExecutor
from pulse_torch.kv import TorchKVCache

__all__ = [
    "ARCHITECTURES",
    "TOLERANCE",
    "WINDOW",
    "Models",
    "Recorder",
    "Reference",
    "decode",
    "one_thread",
    "run",
]

T = TypeVar("T")
VOCAB = 256
WINDOW = 24
TOLERANCE = 1e-3
"""How far float32 logits may be from those of transformers."""
MARGIN = 10 * TOLERANCE
"""The least distance of the two best logits in a prompt's continuation."""
SEEDS = 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-1kv": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama-4kv": lambda: LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 4},
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
ARCHITECTURES = tuple(CONFIGS)

Mask = Callable[[int], Tensor]
"""Of a sequence's length: which keys each token sees, boolean ``[1 or heads, length, length]``."""


@dataclass(frozen=True)
class Reference:
    """A greedy continuation: its tokens, and the logits ``[tokens, vocab]`` that they came from."""

    tokens: tuple[int, ...]
    logits: Tensor

    @property
    def margin(self) -> float:
        """The least distance of the two best logits."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


class Models:
    """The models of a test run, made on first use, and the prompts and references for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, Any] = {}
        self._greedy: dict[tuple[Any, ...], Reference] = {}
        self._prompts: dict[tuple[str, int, int], tuple[int, ...]] = {}

    def path(self, name: str) -> Path:
        """The directory of a model."""
        self.model(name)
        return self.folder / name

    def model(self, name: str) -> Any:
        """The transformers model."""
        if name not in self._models:
            model = _random_model(CONFIGS[name]())
            model.save_pretrained(self.folder / name)
            word_tokenizer().save_pretrained(self.folder / name)
            self._models[name] = model
        return self._models[name]

    def greedy(
        self, name: str, prompt: Sequence[int], count: int, mask: Mask | None = None
    ) -> Reference:
        """`count` tokens by transformers, which sees the whole sequence anew at each step."""
        key = (name, tuple(prompt), count, mask)
        if key not in self._greedy:
            self._greedy[key] = _greedy(self.model(name), list(prompt), count, mask)
        return self._greedy[key]

    def prompt(self, name: str, length: int, count: int) -> tuple[int, ...]:
        """The first drawn prompt whose greedy continuation is nowhere near a tie."""
        key = (name, length, count)
        if key not in self._prompts:
            self._prompts[key] = self._decided(name, length, count, None)
        return self._prompts[key]

    def masked_prompt(self, name: str, length: int, count: int, mask: Mask) -> tuple[int, ...]:
        """The same, where tokens see only what `mask` says."""
        return self._decided(name, length, count, mask)

    def _decided(self, name: str, length: int, count: int, mask: Mask | None) -> tuple[int, ...]:
        for seed in range(SEEDS):
            draw = random.Random(f"{name} {length} {seed}")
            prompt = tuple(draw.choices(range(VOCAB), k=length))
            if self.greedy(name, prompt, count, mask).margin > MARGIN:
                return prompt
        raise AssertionError(f"{name}: no prompt of {length} tokens keeps a margin of {MARGIN}")


def _random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    centre = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma stores weight - 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0.0, 0.3)
            elif weight.dim() == 1:
                weight.normal_(centre, 0.2)
            else:
                weight.normal_(0.0, 0.2)
        model.model.norm.weight.add_(15.0)  # logits far apart, so that hardly any two are close
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0")


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], count: int, mask: Mask | None) -> Reference:
    ids, rows = list(prompt), []
    with one_thread():
        for _ in range(count):
            seen = {} if mask is None else {"attention_mask": mask(len(ids))[None]}
            output = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1, **seen)
            rows.append(output.logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    return Reference(tuple(ids[len(prompt) :]), torch.stack(rows))


class Recorder(TorchExecutor):
    """The torch executor in float32 on one CPU thread, keeping the logits it samples from.

    logits: by request and position of the token that was computed.
    """

    def __init__(self, model: Path, *, fast_store: str = "host") -> None:
        super().__init__(Build(model=str(model), dtype="float32", device="cpu"))
        self.fast_store = fast_store
        self.logits: dict[tuple[str, int], Tensor] = {}
        self.kv: TorchKVCache

    def cache(self, **options: Any) -> TorchKVCache:
        """The cache, to be looked at after the run; called on the engine's compute worker."""
        torch.set_num_threads(1)
        numba.set_num_threads(1)
        self.kv = super().cache(**options)
        return self.kv

    @torch.inference_mode()
    def sample(self, state: State, samplers: Sequence[Any]) -> list[tuple[int, float]]:
        """The executor's own, after a look at the logits."""
        batch = state.batch
        rows = self._decoder.logits(state.h[-1:] if len(batch.sequences) == 1 else state.h)
        for sequence, start, tokens, row in zip(
            batch.sequences, batch.starts, batch.tokens, rows, strict=True
        ):
            self.logits[sequence.request, start + len(tokens) - 1] = row
        return super().sample(state, samplers)

    def of(self, number: int, prompt: Sequence[int], count: int) -> Tensor:
        """The logits ``[count, vocab]`` that the `number`-th request's tokens were drawn from."""
        request, last = str(number + 1), len(prompt) - 1
        return torch.stack([self.logits[request, last + i] for i in range(count)])


def decode(
    model: Path, prompts: Sequence[Sequence[int]], count: int = 64, **options: Any
) -> list[Completion]:
    """`count` greedy tokens for each of `prompts`, all requests at once in one float32 engine."""

    async def complete() -> list[Completion]:
        settings = {"dtype": "float32", "device": "cpu", "fast_tier": "4MiB", "threads": 1}
        async with Engine(model, **settings | options) as engine:
            streams = [
                engine.generate(list(prompt), max_tokens=count, ignore_eos=True)
                for prompt in prompts
            ]
            return [await stream.result() for stream in streams]

    return run(complete())


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, on one of torch's threads unless the engine is told otherwise."""
    with one_thread():
        return asyncio.run(coroutine)


@contextmanager
def one_thread() -> Iterator[None]:
    """Models as small as these are slower on several threads, by far where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

#!/usr/bin/env python3
"""Train the tiny retrieval model the tests use, and save it as a Hugging Face directory.

What: a two-layer Llama with about 0.65 M parameters and a word-level tokenizer that answers one
kind of question. Needles ``n<key>:<value>`` lie at random depths in filler ``f<number>``; the query
``q<key>`` that ends the prompt must be answered by ``v<value>``, the value of the needle with that
key. One needle is one token, so the answer has to be fetched by attention from one far position.

Why: a model with random weights cannot tell a KV cache that kept the right entries from one that
lost them. This one can: it answers (nearly) always with full attention up to 8,192 tokens, and at
the rate of chance (1 in 16) when the needle is out of reach. It is small enough to commit and to
run on a CPU.

How: train on short sequences until the lookup is learned, then on longer and longer ones, with the
loss only on the answers. The script ends by measuring the saved model, and fails if it is not good
enough. ``make_prompt`` needs only the standard library, so that tests can import it cheaply.

    python scripts/train_recall_model.py --out tests/models/recall-tiny
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

KEYS = 64
VALUES = 16
FILLERS = 256
UNK, PAD, EOS = "<unk>", "<pad>", "<eos>"
MAX_POSITIONS = 16384
ROPE_THETA = 1e6

LEARNING_RATE = 3e-3
MIXED_LENGTHS = (256, 512, 1024, 2048, 4096, 4096, 8192, 8192)  # the longest are the hardest

EVAL_LENGTHS = (1024, 4096, 8192)
EVAL_NEEDLES = 16
EVAL_QUERIES = 208  # at least this many for each length
CONTROL_FIRST = 16
CONTROL_LAST = 512
MIN_ACCURACY = 0.98
MAX_CONTROL = 0.25


class Needle(NamedTuple):
    """A key with its value, and where in the haystack it lies."""

    key: int
    value: int
    position: int


class Phase(NamedTuple):
    """Training steps that share their sequence lengths (one is drawn for each step)."""

    steps: int
    lengths: tuple[int, ...]
    tokens_per_step: int
    decay: bool


PHASES = (
    Phase(steps=300, lengths=(48,), tokens_per_step=48 * 64, decay=False),
    Phase(steps=100, lengths=(256,), tokens_per_step=256 * 16, decay=False),
    Phase(steps=100, lengths=(1024,), tokens_per_step=1024 * 4, decay=False),
    Phase(steps=400, lengths=MIXED_LENGTHS, tokens_per_step=8192 * 2, decay=True),
)


class Score(NamedTuple):
    """How a set of queries was answered."""

    right: int
    queries: int
    min_margin: float  # logit of the right answer less the best other logit: the worst query's

    @property
    def accuracy(self) -> float:
        """The share of queries that were answered right."""
        return self.right / self.queries


def vocabulary() -> list[str]:
    """All tokens, in the order of their ids."""
    return [
        UNK,
        PAD,
        EOS,
        *(f"v{value}" for value in range(VALUES)),
        *(f"q{key}" for key in range(KEYS)),
        *(f"n{key}:{value}" for key in range(KEYS) for value in range(VALUES)),
        *(f"f{number}" for number in range(FILLERS)),
    ]


def make_haystack(rng: random.Random, length: int, needles: int) -> tuple[list[str], list[Needle]]:
    """Filler of `length` tokens, `needles` of them replaced by needles with distinct keys."""
    if not 1 <= needles <= KEYS:
        raise ValueError(f"needles must be between 1 and {KEYS}, not {needles}")
    if length < needles:
        raise ValueError(f"{needles} needles do not fit in a haystack of {length} tokens")
    tokens = [f"f{number}" for number in rng.choices(range(FILLERS), k=length)]
    hidden = [
        Needle(key, rng.randrange(VALUES), position)
        for key, position in zip(
            rng.sample(range(KEYS), needles), rng.sample(range(length), needles), strict=True
        )
    ]
    for needle in hidden:
        tokens[needle.position] = f"n{needle.key}:{needle.value}"
    return tokens, hidden


def make_prompt(length: int, needles: int, seed: int) -> tuple[str, str]:
    """A prompt of `length` tokens that ends with one query, and the token that answers it.

    The other `length` - 1 tokens hide `needles` needles with distinct keys at random depths; the
    query asks for one of them. The same arguments always give the same prompt.
    """
    rng = random.Random(f"make_prompt {length} {needles} {seed}")
    tokens, hidden = make_haystack(rng, length - 1, needles)
    asked = rng.choice(hidden)
    return " ".join([*tokens, f"q{asked.key}"]), f"v{asked.value}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words separated by spaces; nothing is added to what it reads."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # and no decoder: tokens are joined by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNK,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        # High, so that half of the frequencies hardly turn over a whole prompt: what the lookup
        # needs is a match that does not depend on the distance.
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_batch(
    rng: random.Random, ids: dict[str, int], length: int, batch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training sequences of exactly `length` tokens: a haystack, then queries with their answers.

    Returns the input ids (batch, length), and the positions and the answers of the queries (both
    (batch, queries)).
    """
    import torch

    # One number of needles for the batch, so that it is a plain rectangle. Every needle is asked
    # for: the more of them, the more there is to learn from one long sequence.
    needles = rng.randint(length // 8, length // 5) if length < 256 else rng.randint(16, 48)
    rows, positions, answers = [], [], []
    haystack_length = length - 2 * needles
    for _ in range(batch):
        tokens, hidden = make_haystack(rng, haystack_length, needles)
        for needle in hidden:  # in the order they were drawn, which is not that of the haystack
            tokens += [f"q{needle.key}", f"v{needle.value}"]
        rows.append([ids[token] for token in tokens])
        positions.append(list(range(haystack_length, length, 2)))
        answers.append([ids[f"v{needle.value}"] for needle in hidden])
    return torch.tensor(rows), torch.tensor(positions), torch.tensor(answers)


def train(
    model: LlamaForCausalLM, ids: dict[str, int], rng: random.Random, steps_scale: float
) -> None:
    """Run all phases."""
    import torch
    from torch.nn import functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    started, tokens_seen = time.monotonic(), 0
    model.train()
    for number, phase in enumerate(PHASES, start=1):
        steps = max(1, round(phase.steps * steps_scale))
        for step in range(steps):
            rate = LEARNING_RATE * (1 - step / steps if phase.decay else 1)
            for group in optimizer.param_groups:
                group["lr"] = rate
            length = rng.choice(phase.lengths)
            batch = max(1, phase.tokens_per_step // length)
            inputs, positions, answers = make_batch(rng, ids, length, batch)
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            rows = torch.arange(batch).unsqueeze(1)
            logits = model.lm_head(hidden[rows, positions])
            loss = functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens_seen += inputs.numel()
            if step % 20 == 0 or step == steps - 1:
                right = (logits.argmax(-1) == answers).float().mean().item()
                print(
                    f"phase {number} step {step + 1:4d}/{steps} length {length:5d} "
                    f"loss {loss.item():7.4f} right {right:6.1%} tokens {tokens_seen / 1e6:5.2f} M "
                    f"{time.monotonic() - started:5.0f} s",
                    flush=True,
                )
    model.eval()


def attention_mask(length: int, *, control: bool) -> torch.Tensor:
    """Who sees whom, (length, length): causal, and in the control only the first and last few."""
    import torch

    query = torch.arange(length).unsqueeze(1)
    key = torch.arange(length).unsqueeze(0)
    mask = key <= query
    if control:
        mask &= (key < CONTROL_FIRST) | (query - key < CONTROL_LAST)
    return mask


def evaluate(
    model: LlamaForCausalLM,
    ids: dict[str, int],
    rng: random.Random,
    length: int,
    *,
    control: bool,
) -> Score:
    """Ask for every needle of as many haystacks as it takes to reach EVAL_QUERIES.

    Each query is asked on its own, as the last token of a prompt of `length` tokens. The prompts
    that share a haystack run as one sequence: all their queries have the last position, and none
    sees another. In the control, a needle within reach is not asked for.
    """
    import torch

    right = queries = 0
    min_margin = float("inf")
    seen = attention_mask(length, control=control)
    while queries < EVAL_QUERIES:
        tokens, hidden = make_haystack(rng, length - 1, EVAL_NEEDLES)
        if control:
            hidden = [needle for needle in hidden if not seen[-1, needle.position]]
        asked = len(hidden)
        if not asked:
            continue
        tokens += [f"q{needle.key}" for needle in hidden]
        inputs = torch.tensor([[ids[token] for token in tokens]])
        answers = torch.tensor([[ids[f"v{needle.value}"]] for needle in hidden])
        mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        mask[: length - 1, : length - 1] = seen[:-1, :-1]
        mask[length - 1 :, : length - 1] = seen[-1, :-1]
        mask[length - 1 :, length - 1 :] = torch.eye(asked, dtype=torch.bool)
        with torch.inference_mode():
            logits = model(
                input_ids=inputs,
                attention_mask=mask[None, None],
                position_ids=torch.arange(len(tokens)).clamp(max=length - 1).unsqueeze(0),
                use_cache=False,
                logits_to_keep=asked,
            ).logits[0]
        best_other = logits.scatter(1, answers, float("-inf")).amax(1)
        margins = logits.gather(1, answers).squeeze(1) - best_other
        right += int((margins > 0).sum())
        queries += asked
        min_margin = min(min_margin, float(margins.min()))
    return Score(right, queries, min_margin)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the Hugging Face directory."""
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for the owner only
    tokenizer.save_pretrained(out)
    # transformers 5 moved or renamed these two: older code finds them where they used to be, and
    # transformers 5 reads both.
    for name, key, value in (
        ("config.json", "rope_theta", ROPE_THETA),
        ("tokenizer_config.json", "tokenizer_class", "PreTrainedTokenizerFast"),
    ):
        content = json.loads((out / name).read_text())
        content[key] = value
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def check(out: Path, seed: int) -> bool:
    """Measure the saved model, print what comes out, and say whether it is good enough."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    text, _ = make_prompt(EVAL_LENGTHS[0], EVAL_NEEDLES, seed)
    encoded = tokenizer(text)["input_ids"]
    good = len(encoded) == EVAL_LENGTHS[0] and tokenizer.decode(encoded) == text
    print(f"tokenizer reads a prompt and writes it back: {'yes' if good else 'NO'}")
    ids = tokenizer.get_vocab()
    rng = random.Random(f"evaluate {seed}")
    for length in EVAL_LENGTHS:
        score = evaluate(model, ids, rng, length, control=False)
        control = evaluate(model, ids, rng, length, control=True)
        good &= score.accuracy >= MIN_ACCURACY and control.accuracy <= MAX_CONTROL
        print(
            f"{length:5d} tokens, {EVAL_NEEDLES} needles: {score.accuracy:6.1%} right "
            f"({score.right}/{score.queries}, least margin {score.min_margin:.2f}); "
            f"control, needle out of reach: {control.accuracy:6.1%} "
            f"({control.right}/{control.queries})",
            flush=True,
        )
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save and check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("tests/models/recall-tiny"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps-scale", type=float, default=1.0, help="multiplies the steps of every phase"
    )
    options = parser.parse_args(arguments)

    import torch

    started = time.monotonic()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    rng = random.Random(f"train {options.seed}")
    train(model, tokenizer.get_vocab(), rng, options.steps_scale)
    save(model, tokenizer, options.out)
    print(f"trained and saved in {time.monotonic() - started:.0f} s")

    good = check(options.out, options.seed)
    print("good enough" if good else "NOT good enough")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

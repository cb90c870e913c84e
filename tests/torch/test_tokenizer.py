"""Encoding, chat templates, stop ids and incremental decoding."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pulse import ports
from pulse.errors import PromptError
from pulse_torch.tokenizer import IncrementalDecoder, TextTokenizer

TEXTS = [
    "Hello, world!  Two spaces,\n\nand   three. Don't.",
    "naïve café — “quoted” … Grüße",
    "你好，世界。这是一个测试。 日本語のテキスト 한국어",
    "emoji 😀👩‍👩‍👧‍👦🇩🇪 and é (combining)",
    " leading and trailing ",
    "ends in an emoji 🎉",
    "",
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", chat_template=chat_template
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """Of sentencepiece's kind: spaces as U+2581, a prefix space, unknown characters as bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"Helowrdans", "He", "ll", "▁w", "▁and"]
    merges = [("H", "e"), ("l", "l"), ("▁", "w"), ("▁", "and")]
    tokens.append("and")
    merges.insert(0, ("a", "nd"))
    tokens.append("nd")
    merges.insert(0, ("n", "d"))
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


TOKENIZERS = {"byte-level": TextTokenizer(byte_level()), "fallback": TextTokenizer(byte_fallback())}


def streamed(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    decoder = tokenizer.decoder()
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def test_it_is_a_tokenizer() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert isinstance(tokenizer, ports.Tokenizer)
    assert isinstance(tokenizer.decoder(), ports.TextDecoder)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, chat=False)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_streams_as_it_decodes(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, chat=False)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_incomplete_characters_are_held_until_the_end() -> None:
    tokenizer = TOKENIZERS["fallback"]
    ids = tokenizer.encode("He 😀", chat=False)
    pieces = streamed(tokenizer, ids)
    assert pieces[-5:] == ["", "", "", "😀", ""]
    cut = streamed(tokenizer, ids[:-1])
    assert cut[-4:-1] == ["", "", ""]
    assert set(cut[-1]) == {"\ufffd"}


def test_special_tokens_have_no_text() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    hello = tokenizer.encode("Hello", chat=False)
    (end,) = tokenizer.encode("<|im_end|>", chat=False)
    assert "".join(streamed(tokenizer, [end, *hello, end, *hello, end])) == "HelloHello"


def test_the_window_stays_short() -> None:
    longest = 0
    tokenizer = TOKENIZERS["byte-level"]

    def decode(ids: Any) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    decoder = IncrementalDecoder(decode)
    for token in tokenizer.encode(TEXTS[0] * 20, chat=False):
        decoder.push(token)
    assert longest <= 4


def test_stop_ids() -> None:
    raw = byte_level()
    ids = {token: raw.convert_tokens_to_ids(token) for token in SPECIALS}
    wanted = {7, ids["<|endoftext|>"], ids["<|im_end|>"]}
    assert TextTokenizer(raw, stop_ids=(7,)).stop_ids == wanted
    assert TOKENIZERS["fallback"].stop_ids == {2}


def test_chat() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode("Hello", chat=True)
    assert ids == tokenizer.encode(expected, chat=False)
    messages = [{"role": "user", "content": "Hello"}]
    assert tokenizer.encode(messages, chat=True) == ids
    answered = [*messages, {"role": "assistant", "content": "Hi"}, *messages]
    assert len(tokenizer.encode(answered, chat=True)) > 2 * len(ids)


@pytest.mark.parametrize(
    "message", [{"content": "Hello"}, "Hello", {"role": "user"}, {"role": "user", "content": 3}]
)
def test_what_is_not_a_message(message: Any) -> None:
    with pytest.raises(PromptError, match="is not a chat message"):
        TOKENIZERS["byte-level"].encode([message], chat=True)


def test_a_template_may_refuse() -> None:
    with pytest.raises(PromptError, match="refuses these messages: unknown role wizard"):
        TOKENIZERS["byte-level"].encode([{"role": "wizard", "content": "Hello"}], chat=True)


def test_no_chat_template() -> None:
    with pytest.raises(PromptError, match=r"no chat template: pass chat=False \(--raw\)"):
        TextTokenizer(byte_level(None)).encode("Hello", chat=True)
    with pytest.raises(PromptError, match="chat=True"):
        TOKENIZERS["byte-level"].encode([{"role": "user", "content": "Hello"}], chat=False)


def test_texts_get_the_special_tokens_of_the_tokenizer() -> None:
    raw = byte_fallback()
    raw.add_bos_token = True
    raw.update_post_processor()
    assert TextTokenizer(raw).encode("He", chat=False)[0] == 1
    assert TOKENIZERS["fallback"].encode("He", chat=False)[0] != 1

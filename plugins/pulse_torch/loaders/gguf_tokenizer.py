"""The tokenizer that the metadata of a GGUF file describes.

transformers builds one too (``AutoTokenizer.from_pretrained(..., gguf_file=...)``), but takes
seconds to read the file and does not know all of llama.cpp's pre-tokenizers, SmolLM's among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

from pulse.errors import ModelFormatError, UnsupportedModel
from pulse_torch.loaders.gguf_file import GgufFile

__all__ = ["load_tokenizer"]

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0")
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "trillion"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"),
        (r"\p{N}", _GPT2),
    ),
    **dict.fromkeys((*_LLAMA3_NAMES, "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "tekken": (_TEKKEN,),
}
"""Regular expressions that cut a text, one after the other, by ``tokenizer.ggml.pre``."""

_WHOLE_WORDS_FIRST = frozenset((*_LLAMA3_NAMES, "tekken"))
"""Vocabularies in which a piece that is a token stays whole, and which start texts with BOS."""


def load_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the chat template of the file.

    Raises UnsupportedModel for a kind of tokenizer that it does not know, naming it, and
    ModelFormatError where metadata are missing.
    """
    vocabulary = _Vocabulary(file)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        backend = _byte_level(vocabulary)
    elif kind == "llama":
        backend = _sentencepiece(vocabulary)
    else:
        raise UnsupportedModel(
            f"{file.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama"
        )
    _add_tokens(backend, vocabulary)
    if vocabulary.adds_bos and vocabulary.special("bos") is not None:
        backend.post_processor = _starts_with(vocabulary)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    specials = {f"{ours}_token": vocabulary.special(theirs) for ours, theirs in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in specials.items() if token is not None},
    )


class _Vocabulary:
    """The ``tokenizer.ggml`` metadata."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.metadata.get("general.architecture")
        tokens = self.get("tokens")
        if not isinstance(tokens, list):
            raise ModelFormatError(f"{file.path}: tokenizer.ggml.tokens is missing")
        self.tokens: list[str] = tokens
        self.types: Sequence[int] = self.get("token_type") or [_NORMAL] * len(tokens)

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}", default)

    def missing(self, key: str) -> ModelFormatError:
        return ModelFormatError(f"{self._file.path}: tokenizer.ggml.{key} is missing")

    def special(self, name: str) -> str | None:
        """The token of ``<name>_token_id``, or None."""
        index = self.get(f"{name}_token_id")
        if index is None:
            return None
        if not 0 <= index < len(self.tokens):
            raise ModelFormatError(
                f"{self._file.path}: tokenizer.ggml.{name}_token_id={index} is not one of "
                f"{len(self.tokens)} tokens"
            )
        return str(self.tokens[index])

    @property
    def pre(self) -> str:
        """What cuts a text; files written before there was a key have none."""
        pre = self.get("pre")
        if pre in (None, "default") and str(self.architecture).startswith("qwen"):
            return "qwen2"
        if pre is not None and pre not in _SPLITS:
            raise UnsupportedModel(
                f"{self._file.path}: tokenizer.ggml.pre={pre!r} is not supported; supported: "
                f"{', '.join(sorted(_SPLITS))}"
            )
        return pre or "default"

    @property
    def adds_bos(self) -> bool:
        """Whether texts start with BOS; the default is llama.cpp's."""
        given = self.get("add_bos_token")
        if given is not None:
            return bool(given)
        return self.get("model") == "llama" or self.pre in _WHOLE_WORDS_FIRST


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    merges = vocabulary.get("merges")
    if merges is None:
        raise vocabulary.missing("merges")
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=vocabulary.pre in _WHOLE_WORDS_FIRST,
        )
    )
    if vocabulary.pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        for pattern in _SPLITS[vocabulary.pre]
    ]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """Sentencepiece's BPE, which merges the best-scored token first, as ranked merges."""
    gemma = vocabulary.architecture == "gemma3"
    tokens = [_spelled(token) for token in vocabulary.tokens] if gemma else vocabulary.tokens
    scores = vocabulary.get("scores")
    if scores is None and not gemma:
        raise vocabulary.missing("scores")
    # Gemma's scores do not order its merges; the position in the vocabulary does.
    ranks = [-float(index) for index in range(len(tokens))] if gemma else scores
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=_merges(tokens, vocabulary.types, ranks),
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", _SPACE)
    if vocabulary.get("add_space_prefix", not gemma):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend


def _spelled(token: str) -> str:
    """Gemma files hold runs of spaces as such, where other tokens spell a space as U+2581."""
    return _SPACE * len(token) if token and not token.strip(" ") else token


def _merges(
    tokens: Sequence[str], types: Sequence[int], ranks: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the best first.

    Control and byte tokens take no part, so that a text can never spell one.
    """
    mergeable = {
        token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)
    }
    pairs = []
    for index, token in enumerate(tokens):
        if token not in mergeable:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                pairs.append((-ranks[index], index, left, right))
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def _add_tokens(backend: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are matched whole in a text, too."""
    plain = []
    special = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if backend.token_to_id(token) is None:
            continue  # a run of spaces that is spelled otherwise, see `_spelled`
        if kind == _CONTROL:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _starts_with(vocabulary: _Vocabulary) -> processors.TemplateProcessing:
    bos = vocabulary.special("bos")
    return processors.TemplateProcessing(
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
        special_tokens=[(bos, vocabulary.get("bos_token_id"))],
    )

"""Text to token ids and back, over a transformers tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from pulse.errors import PromptError

__all__ = ["IncrementalDecoder", "TextTokenizer"]

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Added tokens with which chat models end their turn, whatever their config calls end of text."""

_REPLACEMENT = "\ufffd"


class TextTokenizer:
    """A `pulse.ports.Tokenizer` over a transformers tokenizer, which it owns.

    stop_ids: `stop_ids` as given (the model's), the tokenizer's own end of sequence, and the
        end-of-turn tokens that it knows.
    """

    def __init__(self, tokenizer: Any, stop_ids: Iterable[int] = ()) -> None:
        # Cleaning up spaces would change text that has already been streamed.
        tokenizer.clean_up_tokenization_spaces = False
        self._tokenizer = tokenizer
        # transformers' own decode costs several times its backend's, and runs once per token.
        self._backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
        added = tokenizer.get_added_vocab()
        own = tokenizer.eos_token_id
        self.stop_ids = frozenset(
            (
                *stop_ids,
                *(() if own is None else (own,)),
                *(added[token] for token in _END_OF_TURN if token in added),
            )
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode` takes ``chat=True``."""
        return bool(self._tokenizer.chat_template)

    def encode(self, prompt: str | Sequence[dict[str, str]], *, chat: bool) -> list[int]:
        """Token ids of a text, or of chat messages through the model's chat template.

        Raises PromptError where the model has no chat template, or where its template refuses the
        messages.
        """
        if chat:
            return self._chat(prompt)
        if not isinstance(prompt, str):
            raise PromptError("chat messages need the chat template: pass chat=True, or one text")
        return list(self._tokenizer.encode(prompt))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def decoder(self) -> IncrementalDecoder:
        """A fresh incremental decoder."""
        return IncrementalDecoder(self.decode)

    def _chat(self, prompt: str | Sequence[dict[str, str]]) -> list[int]:
        if not self.has_chat_template:
            raise PromptError(
                "the model has no chat template: pass chat=False (--raw) to send the text as it is"
            )
        user = [{"role": "user", "content": prompt}]
        messages = user if isinstance(prompt, str) else [_message(item) for item in prompt]
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return list(ids)


def _message(item: Any) -> dict[str, str]:
    """A chat message. Templates would print what is missing as nothing."""
    if (
        not isinstance(item, dict)
        or not isinstance(item.get("role"), str)
        or not isinstance(item.get("content"), str)
    ):
        raise PromptError(
            f'{item!r} is not a chat message; it must be {{"role": "…", "content": "…"}}'
        )
    return item


class IncrementalDecoder:
    """Turns a stream of token ids into text; the texts joined are the text of all ids.

    Decodes a short window that starts one piece before the unseen tokens, since a decoder treats
    the start of a text in its own way (it may drop a space), and gives out what the window gained.
    A window that ends in the replacement character is held back, as a character may be incomplete.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._seen = 0
        """Tokens of the window whose text has been given out."""
        self._prefix = ""
        """Text of those tokens."""

    def push(self, token: int) -> str:
        """Text that `token` completes; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._prefix):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """Text that was held back, when no token follows."""
        if self._seen == len(self._window):
            return ""
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        fresh = text[len(self._prefix) :]
        del self._window[: self._seen]
        self._seen = len(self._window)
        self._prefix = self._decode(self._window)
        return fresh

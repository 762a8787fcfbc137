"""Text to tokens and back: the model's own byte-level BPE, or plain bytes for the tiny model."""

import codecs
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import jinja2
import jinja2.sandbox
import tokenizers

from pdpool_reference.weights import WeightsError

TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
TINY: Final = "tiny"
"""The path that stands for the tiny model."""
_TINY_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TINY_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplateError(ValueError):
    """Messages that the model's chat template refuses."""


class TextTooLongError(ValueError):
    """A text with more bytes than the engine's tokens can hold."""


class Vocabulary(Protocol):
    """The differences between tokenizers."""

    longest: int
    """Bytes of text that one token can stand for at most."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; names of special tokens in it become those tokens."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for a special token."""
        ...


class Detokenizer:
    """Text of a growing sequence of tokens: only whole characters come out.

    Bytes that cannot be UTF-8 come out as U+FFFD.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Return the text that this token completes, possibly none."""
        return self._decoder.decode(self._vocabulary.bytes_of(token))

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)


class Tokenizer:
    """A vocabulary with a chat template. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary, template: str) -> None:
        self._vocabulary = vocabulary
        self._max_bytes: int | None = None
        # The template is a file of the model: sandboxed. Its output is tokens, not HTML: nothing to escape.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)

    def limit(self, max_tokens: int) -> None:
        """Refuse texts from now on that `max_tokens` tokens cannot hold, before encoding them.

        Encoding takes a hundred times the memory of the text.
        """
        self._max_bytes = max_tokens * self._vocabulary.longest

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; names of special tokens in it become those tokens.

        A lone surrogate, which JSON can carry, has no UTF-8 form and counts as `?`. Raises TextTooLongError.
        """
        data = text.encode("utf-8", errors="replace")
        if self._max_bytes is not None and len(data) > self._max_bytes:
            raise TextTooLongError(f"{len(data)} bytes of text, at most {self._max_bytes} can fit")
        return self._vocabulary.encode(data.decode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special tokens."""
        detokenizer = self.stream()
        return "".join([detokenizer.add(token) for token in tokens]) + detokenizer.flush()

    def stream(self) -> Detokenizer:
        """Return a new detokenizer for one sequence."""
        return Detokenizer(self._vocabulary)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to the start of the assistant's answer.

        Raises ChatTemplateError and TextTooLongError.
        """
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"messages do not fit the model's chat template: {error}") from error
        return self.encode(text)


class _Bpe:
    """Byte-level BPE from a `tokenizer.json`."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._specials = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        # In the byte alphabet each character of a token's name stands for one byte.
        self.longest = max(map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        # Only the batch calls release the GIL.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def bytes_of(self, token: int) -> bytes:
        if token in self._specials:
            return b""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            raise ValueError(f"token {token} is not in the vocabulary of {self._tokenizer.get_vocab_size()}")
        alphabet = _byte_alphabet()
        return bytes([alphabet[character] for character in name])


class _Bytes:
    """Token i below 256 is byte i; three special tokens follow."""

    longest = max(map(len, _TINY_SPECIALS))

    def encode(self, text: str) -> list[int]:
        return list(_with_specials(text, _TINY_SPECIALS))

    def bytes_of(self, token: int) -> bytes:
        if not 0 <= token < 256 + len(_TINY_SPECIALS):
            raise ValueError(f"token {token} is not in the vocabulary of {256 + len(_TINY_SPECIALS)}")
        return bytes([token]) if token < 256 else b""


def load(model_path: str | Path) -> Tokenizer:
    """Load the tokenizer of a model directory, or of the tiny model for `tiny`. Raises WeightsError."""
    if str(model_path) == TINY:
        return Tokenizer(_Bytes(), _TINY_TEMPLATE)
    directory = Path(model_path)
    for file in (TOKENIZER_FILE, TEMPLATE_FILE):
        if not (directory / file).is_file():
            raise WeightsError(f"{directory} holds no {file}: convert the model again")
    return Tokenizer(_Bpe(directory / TOKENIZER_FILE), (directory / TEMPLATE_FILE).read_text(encoding="utf-8"))


def build_bpe(tokens: Sequence[str], merges: Sequence[str], specials: Iterable[str]) -> tokenizers.Tokenizer:
    """A `tokenizers.Tokenizer` as SmolLM2 has it: single digits, then GPT-2's pattern, then byte-level BPE.

    tokens: names by id; merges: "left right", most frequent first; specials: names of control tokens.
    """
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocabulary = {name: token for token, name in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: itself where a byte is printable Latin-1, else from U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _with_specials(text: str, specials: Sequence[str]) -> Iterable[int]:
    while text:
        found = [(at, name) for name in specials if (at := text.find(name)) >= 0]
        at, name = min(found, default=(len(text), ""))
        yield from text[:at].encode()
        if name:
            yield 256 + specials.index(name)
        text = text[at + len(name) :]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

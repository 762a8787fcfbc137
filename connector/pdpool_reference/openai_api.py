"""`/v1/completions` and `/v1/chat/completions`: bodies in, jobs out; tokens in, answers and stream events out."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

import msgspec

from pdpool_reference.request import Finish, RequestError, SamplingParams, Tokens
from pdpool_reference.request_body import (
    HandoffFields,
    Job,
    NewTokens,
    Rid,
    Samples,
    Seed,
    Temperature,
    Token,
    TopK,
    TopP,
    check_count,
    check_tokens,
    make_job,
    refuse_unsupported,
    stop_strings,
)
from pdpool_reference.tokenizer import ChatTemplateError

NO_MODEL = ("", "default", "unknown")
"""Models of a body that names none: SGLang fills in "default", and sglang-router "unknown" for a chat."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for `/v1/completions`."""
DEFAULT_CHAT_TOKENS = 512
"""Bound of a chat answer that names none: the pages of the whole answer are set aside when a request is admitted."""


class Tokenizer(Protocol):
    """The part of the tokenizer that requests need."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's answer begins."""
        ...


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class _Common(HandoffFields):
    model: str | None = None
    max_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Samples | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: Rid | None = None


class CompletionBody(_Common):
    """`POST /v1/completions`."""

    prompt: str | list[str | Token | list[Token]] = msgspec.field(default_factory=list)


class TextPart(msgspec.Struct):
    """One part of a message's content; only text is understood."""

    text: str
    type: Literal["text"] = "text"


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None

    def plain(self) -> dict[str, str]:
        """The message as the chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(_Common, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: NewTokens | None = None


def completion_job(body: CompletionBody, tokenizer: Tokenizer, vocab: int, request_id: str, room_for: int) -> Job:
    """The sequences that a completion asks for. Raises RequestError. `room_for`: see `chat_job`."""
    refuse_unsupported(body)
    prompts = [check_tokens(tokens, vocab, "prompt") for tokens in _prompts(body.prompt, tokenizer)]
    sampling = _sampling(body, body.max_tokens or DEFAULT_COMPLETION_TOKENS)
    count = len(prompts)
    return make_job(
        [body.rid or request_id] * count,
        prompts,
        [sampling] * count,
        body,
        samples=body.n or 1,
        stream=body.stream or False,
        room_for=room_for,
    )


def chat_job(body: ChatBody, tokenizer: Tokenizer, vocab: int, request_id: str, room_for: int) -> Job:
    """The sequences that a chat asks for. Raises RequestError.

    `room_for` is the most tokens that prompt and answer may have together.
    """
    refuse_unsupported(body)
    for number, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            param = f"messages[{number}].content"
            raise RequestError(f"{param}: null; a text or a list of text parts is right", param=param)
    try:
        tokens = tokenizer.chat([message.plain() for message in body.messages])
    except ChatTemplateError as error:
        raise RequestError(f"messages: {error}", param="messages") from None
    prompt = check_tokens(tuple(tokens), vocab, "messages")
    asked = body.max_completion_tokens or body.max_tokens
    sampling = _sampling(body, asked or max(1, min(DEFAULT_CHAT_TOKENS, room_for - len(prompt))))
    return make_job(
        [body.rid or request_id],
        [prompt],
        [sampling],
        body,
        samples=body.n or 1,
        stream=body.stream or False,
        room_for=room_for,
    )


def _prompts(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt))]
    if not prompt:
        raise RequestError("prompt: missing or empty; a text, a list of texts, or tokens are right", param="prompt")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [tuple(tokens)]
    if tokens:
        raise RequestError("prompt: mixes tokens with texts or lists", param="prompt")
    check_count(len(prompt))
    return [
        tuple(tokenizer.encode(item) if isinstance(item, str) else item) for item in prompt if not isinstance(item, int)
    ]


def _sampling(body: _Common, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=stop_strings(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
    )


class Result:
    """What one sequence has produced so far."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.finish: Finish | None = None

    def add(self, tokens: Tokens) -> None:
        """Take the next tokens."""
        self.ids += tokens.ids
        self.texts.append(tokens.text)
        self.finish = tokens.finish

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.texts)


def usage(results: Sequence[Result], samples: int) -> dict[str, int]:
    """Token counts of a request; a prompt counts once, however many samples were drawn from it."""
    prompt = sum(result.prompt_tokens for result in results[::samples])
    completion = sum(len(result.ids) for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


Event = dict[str, Any]


class Reply(Protocol):
    """Renders one kind of answer."""

    def whole(self, results: Sequence[Result]) -> Event | list[Event]:
        """The answer of a request that does not stream."""
        ...

    def opening(self) -> list[Event]:
        """What a stream begins with."""
        ...

    def delta(self, index: int, tokens: Tokens, result: Result) -> Event | None:
        """The event for new tokens of a sequence that has produced `result` with them; None if nothing is to show."""
        ...

    def closing(self, results: Sequence[Result]) -> list[Event]:
        """What a stream ends with, before `[DONE]`."""
        ...


class CompletionReply:
    """Answers of `/v1/completions`."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, request_id: str, model: str, *, samples: int, sequences: int, include_usage: bool) -> None:
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._samples = samples
        self._sequences = sequences
        self._include_usage = include_usage

    def whole(self, results: Sequence[Result]) -> Event:
        """See Reply."""
        choices = [self._choice(i, result) for i, result in enumerate(results)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(results, self._samples)}

    def opening(self) -> list[Event]:
        """See Reply."""
        return []

    def delta(self, index: int, tokens: Tokens, result: Result) -> Event | None:
        """See Reply."""
        del result
        if not tokens.text and tokens.finish is None:
            return None
        return self._chunk([self._delta(index, tokens.text, tokens.finish)])

    def closing(self, results: Sequence[Result]) -> list[Event]:
        """See Reply."""
        return [{**self._chunk([]), "usage": usage(results, self._samples)}] if self._include_usage else []

    def _chunk(self, choices: list[Event]) -> Event:
        return {**self._head, "object": self.chunk_kind, "choices": choices}

    def _choice(self, index: int, result: Result) -> Event:
        return {"index": index, "text": result.text, "logprobs": None, **_ending(result.finish)}

    def _delta(self, index: int, text: str, finish: Finish | None) -> Event:
        return {"index": index, "text": text, "logprobs": None, **_ending(finish)}


class ChatReply(CompletionReply):
    """Answers of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self) -> list[Event]:
        """See Reply."""
        return [
            self._chunk(
                [{"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
            )
            for i in range(self._sequences)
        ]

    def _choice(self, index: int, result: Result) -> Event:
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text},
            "logprobs": None,
            **_ending(result.finish),
        }

    def _delta(self, index: int, text: str, finish: Finish | None) -> Event:
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": None, **_ending(finish)}


def _ending(finish: Finish | None) -> Event:
    return {"finish_reason": finish.reason, "matched_stop": finish.matched} if finish else {"finish_reason": None}


def new_request_id() -> str:
    """An id that no other request has."""
    return uuid.uuid4().hex


def error_body(message: str, *, status: int, code: str, param: str | None = None) -> Event:
    """An OpenAI-style error body."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_object(served_name: str, created: int, max_context: int) -> Event:
    """The model as `/v1/models` shows it."""
    return {
        "id": served_name,
        "object": "model",
        "created": created,
        "owned_by": "pdpool",
        "root": served_name,
        "max_model_len": max_context,
    }

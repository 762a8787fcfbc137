"""`/generate` and the small bodies that only SGLang has. Field names and shapes are those of SGLang 0.5.23."""

from collections.abc import Sequence

import msgspec

from pdpool_reference.openai_api import Event, Result, Tokenizer
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
    Unsupported,
    check_count,
    check_tokens,
    make_job,
    refuse_unsupported,
    stop_strings,
)

DEFAULT_NEW_TOKENS = 128
"""SGLang's for a body that names none."""


class SamplingBody(Unsupported):
    """`sampling_params` of `/generate`. Null is the default, as the router drops fields that are null.

    For `max_new_tokens` SGLang itself takes null as the whole context.
    """

    max_new_tokens: NewTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Samples | None = None
    sampling_seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = None
    ignore_eos: bool | None = None


class GenerateBody(HandoffFields):
    """`POST /generate`: `text` or `input_ids`, one or a list."""

    text: str | list[str] | None = None
    input_ids: list[Token | list[Token]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: Rid | list[Rid] | None = None
    stream: bool | None = None

    @property
    def batch(self) -> bool:
        """Whether it holds a list of prompts, be it of one."""
        first = self.input_ids[0] if self.input_ids else None
        return isinstance(self.text, list) or isinstance(first, list)


class AbortBody(msgspec.Struct):
    """`POST /abort_request`."""

    rid: str = ""
    abort_all: bool = False


def generate_job(body: GenerateBody, tokenizer: Tokenizer, vocab: int, request_id: str, room_for: int) -> Job:
    """The sequences that a `/generate` body asks for. Raises RequestError. `room_for`: see `chat_job`."""
    refuse_unsupported(body)
    prompts, param = _prompts(body, tokenizer)
    prompts = [check_tokens(tokens, vocab, param) for tokens in prompts]
    bodies = (
        body.sampling_params
        if isinstance(body.sampling_params, list)
        else [body.sampling_params or SamplingBody()] * len(prompts)
    )
    rids = body.rid if isinstance(body.rid, list) else [body.rid or request_id] * len(prompts)
    for name, values in (("sampling_params", bodies), ("rid", rids)):
        if len(values) != len(prompts):
            raise RequestError(f"{name}: {len(values)} entries for {len(prompts)} prompts", param=name)
    samples = {one.n or 1 for one in bodies}
    if len(samples) > 1:
        raise RequestError(
            f"sampling_params.n: {sorted(samples)}; one value for all prompts is right", param="sampling_params.n"
        )
    sampling = [_sampling(one) for one in bodies]
    return make_job(
        rids, prompts, sampling, body, samples=samples.pop(), stream=body.stream or False, room_for=room_for
    )


def _prompts(body: GenerateBody, tokenizer: Tokenizer) -> tuple[list[tuple[int, ...]], str]:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("text: give either text or input_ids", param="text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not texts:
            raise RequestError("text: an empty list, at least one text is needed", param="text")
        check_count(len(texts), param="text")
        return [tuple(tokenizer.encode(text)) for text in texts], "text"
    ids = body.input_ids or []
    flat = [item for item in ids if isinstance(item, int)]
    nested = [tuple(item) for item in ids if not isinstance(item, int)]
    if flat and nested:
        raise RequestError("input_ids: mixes tokens with lists of tokens", param="input_ids")
    return nested or [tuple(flat)], "input_ids"


def _sampling(body: SamplingBody) -> SamplingParams:
    refuse_unsupported(body, "sampling_params.")
    return SamplingParams(
        max_new_tokens=body.max_new_tokens or DEFAULT_NEW_TOKENS,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.sampling_seed,
        stop=stop_strings(body.stop, "sampling_params.stop"),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos or False,
    )


class GenerateReply:
    """Answers of `/generate`: an object, or a list for a `batch` and for several samples, as SGLang's.

    The events of a stream repeat the text so far.
    """

    def __init__(self, rids: Sequence[str], *, batch: bool) -> None:
        self._rids = rids
        self._listed = batch or len(rids) > 1

    def whole(self, results: Sequence[Result]) -> Event | list[Event]:
        """See Reply."""
        answers = [self._answer(i, result) for i, result in enumerate(results)]
        return answers if self._listed else answers[0]

    def opening(self) -> list[Event]:
        """See Reply."""
        return []

    def delta(self, index: int, tokens: Tokens, result: Result) -> Event | None:
        """See Reply."""
        if not tokens.text and tokens.finish is None:
            return None
        return {**self._answer(index, result), "index": index}

    def closing(self, results: Sequence[Result]) -> list[Event]:
        """See Reply."""
        del results
        return []

    def _answer(self, index: int, result: Result) -> Event:
        meta = {
            "id": self._rids[index],
            "finish_reason": finish_reason(result.finish, len(result.ids)),
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": len(result.ids),
            "cached_tokens": 0,
        }
        return {"text": result.text, "output_ids": list(result.ids), "meta_info": meta}


def finish_reason(finish: Finish | None, length: int) -> Event | None:
    """SGLang's form of a finish reason."""
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": length}
    if finish.reason == "abort":
        return {"type": "abort", "message": "Aborted by /abort_request."}
    return {"type": finish.reason, "matched": finish.matched}

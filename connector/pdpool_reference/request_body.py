"""What the bodies of OpenAI and SGLang share: bounds, stop strings, hand-off fields, errors that name the field."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from pdpool_connector.transport.address import AddressError, parse_address

from pdpool_reference.request import Handoff, RequestError, SamplingParams, prompt_of

MAX_BODY_BYTES = 16 << 20
"""Longest body of a client. The router refuses longer ones itself."""
ROUTER_ADDS_BYTES = 64 << 10
"""The router adds less than this to a body: defaults, and host (253 bytes at most), port and room of each sequence."""
MAX_SEQUENCES = 128
"""Bound on prompts x samples of one HTTP request; OpenAI's bound on `n`."""
MAX_ROOM_HALVES = 64
"""Most sequences of one request that share a room: the connector takes no more live hand-offs in one room."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256

Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=2.0)]
TopP = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, msgspec.Meta(ge=-1)]
"""How many of the likeliest tokens may be drawn; 0 and -1 are all."""
Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)]
NewTokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Room = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Token = Annotated[int, msgspec.Meta(ge=0)]
MAX_RID = 256
Rid = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_RID)]

Body = TypeVar("Body", bound=msgspec.Struct)
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)


class Unsupported(msgspec.Struct):
    """Fields that SGLang 0.5.23 or OpenAI use, that change the answer, and that this engine does not support.

    The default of a field asks for nothing. So do null, {} and a list of such values. Every body is read for all
    fields, so that a field in the wrong place is refused too.
    """

    frequency_penalty: Any = 0
    presence_penalty: Any = 0
    repetition_penalty: Any = 1
    logit_bias: Any = None
    min_p: Any = 0
    min_tokens: Any = 0
    min_new_tokens: Any = 0
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    response_format: Any = msgspec.field(default_factory=lambda: {"type": "text"})
    tools: Any = None
    stop_regex: Any = None
    no_stop_trim: Any = False
    skip_special_tokens: Any = True
    spaces_between_special_tokens: Any = True
    custom_params: Any = None
    custom_logit_processor: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = False
    reasoning_effort: Any = None
    lora_path: Any = None
    session_params: Any = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    echo: Any = False
    suffix: Any = ""
    best_of: Any = 1
    logprobs: Any = False
    top_logprobs: Any = 0
    return_logprob: Any = False
    top_logprobs_num: Any = 0
    token_ids_logprob: Any = None
    return_hidden_states: Any = False
    return_routed_experts: Any = False
    return_token_ids: Any = False
    return_prompt_token_ids: Any = False


_NOTHING: Final = Unsupported()


class HandoffFields(Unsupported):
    """Fields that the router adds to a body: one value for the request, or one for each prompt or sequence."""

    bootstrap_host: str | list[str] | None = None
    bootstrap_port: Port | list[Port | None] | None = None
    bootstrap_room: Room | list[Room] | None = None


class _FirstHandoff(HandoffFields):
    rid: Any = None


def decode_body(raw: bytes, shape: type[Body]) -> Body:
    """Decode and validate a JSON body. Raises RequestError that names the field."""
    try:
        return msgspec.json.decode(raw, type=shape)
    except msgspec.ValidationError as error:
        match = _AT.match(str(error))
        what, path = (match["what"], match["path"]) if match else (str(error), None)
        param = path.lstrip(".") if path else None
        missing = re.search(r"missing required field `(.*?)`", what)
        if missing:
            param = f"{param}.{missing[1]}" if param else missing[1]
        raise RequestError(f"{param or 'body'}: {what}", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RequestError("the body nests too deeply to be read", code="invalid_json") from None


def refuse_unsupported(body: Unsupported, prefix: str = "") -> None:
    """Refuse what this engine does not support, rather than ignore it. Raises RequestError."""
    for name in Unsupported.__struct_fields__:
        value, nothing = getattr(body, name), getattr(_NOTHING, name)
        if not all(_asks_nothing(item, nothing) for item in (value if isinstance(value, list) else [value])):
            param = prefix + name
            raise RequestError(
                f"{param}: not supported by the reference engine; leave it out", param=param, code="unsupported"
            )


def _asks_nothing(value: object, nothing: object) -> bool:
    """0 is not false here: `"logprobs": 0` asks for the log probability of each token."""
    return value in (None, {}) or (value == nothing and isinstance(value, bool) == isinstance(nothing, bool))


def stop_strings(stop: str | list[str] | None, param: str = "stop") -> tuple[str, ...]:
    """The stop strings as a tuple. Raises RequestError for empty, too many or too long ones."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{param}: {len(stops)} stop strings, at most {MAX_STOPS} are taken", param=param)
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"{param}: a stop string has {len(text)} characters, 1 to {MAX_STOP_CHARS} are right", param=param
            )
    return stops


def handoffs(fields: HandoffFields, prompts: int, samples: int) -> list[Handoff | None]:
    """Return the hand-off of each sequence (prompt 0 sample 0, prompt 0 sample 1, ...); None for all without a room.

    The router sends one value, one for each prompt, or one for each sequence. Raises RequestError when the fields do
    not fit.
    """
    sequences = prompts * samples
    if fields.bootstrap_room is None:
        return [None] * sequences
    if fields.bootstrap_host is None:
        raise RequestError("bootstrap_host: missing, though bootstrap_room is given", param="bootstrap_host")
    rooms = _spread("bootstrap_room", fields.bootstrap_room, prompts, samples)
    hosts = _spread("bootstrap_host", fields.bootstrap_host, prompts, samples)
    ports = _spread("bootstrap_port", fields.bootstrap_port, prompts, samples)
    found: list[Handoff | None] = []
    for i, (host, port, room) in enumerate(zip(hosts, ports, rooms, strict=True)):
        if not isinstance(port, int):
            raise _unfit("bootstrap_port", port, i, "a port number")
        if not isinstance(room, int):
            raise _unfit("bootstrap_room", room, i, "a number")
        bare_ipv6 = ":" in str(host) and not str(host).startswith("[")
        try:
            prefill = parse_address(f"[{host}]:{port}" if bare_ipv6 else f"{host}:{port}")
        except AddressError:
            raise _unfit("bootstrap_host", host, i, "the name or address of a prefill engine") from None
        found.append(Handoff(prefill=str(prefill), room=room))
    for room, halves in Counter(rooms).items():
        if halves > MAX_ROOM_HALVES:
            message = f"bootstrap_room: {halves} sequences share the room {room}, at most {MAX_ROOM_HALVES} may"
            raise RequestError(message, param="bootstrap_room")
    return found


def first_handoff(raw: bytes) -> tuple[str, Handoff] | None:
    """Return request id and hand-off of a body's first sequence, if its hand-off fields are right; else None.

    Everything else in the body may be wrong. The request id is empty where the body has none. The hand-off has no
    prompt digest, so it matches any half of its room. One half is enough to end a request on the other side: a request
    fails with its first sequence.
    """
    try:
        fields = msgspec.json.decode(raw, type=_FirstHandoff)
        rooms = fields.bootstrap_room
        found = handoffs(fields, len(rooms) if isinstance(rooms, list) else 1, 1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RequestError):
        return None
    if not found or (first := found[0]) is None:
        return None
    rid = fields.rid[0] if isinstance(fields.rid, list) and fields.rid else fields.rid
    return (rid if isinstance(rid, str) and len(rid) <= MAX_RID else ""), first


def _unfit(name: str, value: object, sequence: int, right: str) -> RequestError:
    return RequestError(f"{name}: {repr(value)[:300]} for sequence {sequence}; {right} is needed", param=name)


def _spread(name: str, value: object, prompts: int, samples: int) -> Sequence[object]:
    if not isinstance(value, list):
        return [value] * (prompts * samples)
    if len(value) == prompts * samples:
        return value
    if len(value) == prompts:
        return [item for item in value for _ in range(samples)]
    raise RequestError(
        f"{name}: {len(value)} values for {prompts} prompts, n={samples}; give one, or one for each prompt or sequence",
        param=name,
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as its sequences (prompt 0 sample 0, prompt 0 sample 1, ...), one entry each in all lists."""

    rids: list[str]
    prompts: list[tuple[int, ...]]
    sampling: list[SamplingParams]
    handoffs: list[Handoff | None]
    samples: int
    stream: bool


def make_job(
    rids: list[str],
    prompts: list[tuple[int, ...]],
    sampling: list[SamplingParams],
    fields: HandoffFields,
    *,
    samples: int,
    stream: bool,
    room_for: int,
) -> Job:
    """Return a job of `samples` sequences for each prompt; the lists have one entry for each prompt.

    A prompt of more than `room_for` tokens gets no digest, as the engine refuses it later. Digests of many samples of
    millions of tokens would take seconds. Raises RequestError.
    """
    check_count(len(prompts), samples)
    tokens = [np.array(prompt, np.int32) if len(prompt) <= room_for else None for prompt in prompts]
    order = [i for i in range(len(prompts)) for _ in range(samples)]
    where = handoffs(fields, len(prompts), samples)
    drawn = [_sample_of(sampling[i], j % samples) for j, i in enumerate(order)]
    return Job(
        rids=[rids[i] for i in order],
        prompts=[prompts[i] for i in order],
        sampling=drawn,
        handoffs=[
            handoff and replace(handoff, prompt=b"" if (read := tokens[i]) is None else prompt_of(read, one))
            for i, handoff, one in zip(order, where, drawn, strict=True)
        ],
        samples=samples,
        stream=stream,
    )


def check_count(prompts: int, samples: int = 1, param: str = "prompt") -> None:
    """Bound the sequences of one request. Call it before texts are made into tokens. Raises RequestError."""
    if not 1 <= prompts * samples <= MAX_SEQUENCES:
        what = f"{param}: {prompts} prompts with n={samples}, at most {MAX_SEQUENCES} sequences in one request"
        raise RequestError(what, param=param)


def _sample_of(params: SamplingParams, sample: int) -> SamplingParams:
    """Samples of one prompt must differ though they share the body's seed."""
    return params if params.seed is None else replace(params, seed=params.seed + sample)


def check_tokens(tokens: tuple[int, ...], vocab: int, param: str) -> tuple[int, ...]:
    """Return the tokens of one prompt. Raises RequestError when there is none, or one outside the vocabulary."""
    if not tokens:
        raise RequestError(f"{param}: empty, at least one token is needed", param=param)
    if max(tokens) >= vocab:
        raise RequestError(f"{param}: token {max(tokens)} is not in the vocabulary of {vocab}", param=param)
    return tokens

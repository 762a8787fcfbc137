"""What request bodies become, and what is refused with the name of the field."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pdpool_reference import request_body
from pdpool_reference.openai_api import ChatBody, CompletionBody, Result, chat_job, completion_job
from pdpool_reference.request import Handoff, RequestError, prompt_of
from pdpool_reference.request_body import Unsupported, decode_body, first_handoff
from pdpool_reference.sglang_api import GenerateBody, GenerateReply, SamplingBody, generate_job

VOCAB = 300
ROOM_FOR = 100
IMAGE = {"type": "image_url", "text": "a"}


class Bytes:
    """A tokenizer whose tokens are the bytes of the text."""

    def encode(self, text):
        return list(text.encode())

    def chat(self, messages):
        return [byte for message in messages for byte in message["content"].encode()]


def completion(**body):
    return completion_job(decode_body(json.dumps(body).encode(), CompletionBody), Bytes(), VOCAB, "id", ROOM_FOR)


def chat(**body):
    body.setdefault("messages", [{"role": "user", "content": "hello"}])
    return chat_job(decode_body(json.dumps(body).encode(), ChatBody), Bytes(), VOCAB, "id", ROOM_FOR)


def generate(**body):
    return generate_job(decode_body(json.dumps(body).encode(), GenerateBody), Bytes(), VOCAB, "id", ROOM_FOR)


ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


REFUSED = [
    (completion, {"prompt": []}, "prompt"),
    (completion, {"prompt": ""}, "prompt"),
    (completion, {"prompt": [1, "a"]}, "prompt"),
    (completion, {"prompt": {"a": 1}}, "prompt"),
    (completion, {"prompt": [VOCAB]}, "prompt"),
    (completion, {"prompt": [-1]}, "prompt[0]"),
    (completion, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (completion, {"prompt": "a", "max_tokens": 10**4000}, "max_tokens"),
    (completion, {"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    (completion, {"prompt": "a", "temperature": -1}, "temperature"),
    (completion, {"prompt": "a", "temperature": 2.5}, "temperature"),
    (completion, {"prompt": "a", "top_p": 0}, "top_p"),
    (completion, {"prompt": "a", "n": 0}, "n"),
    (completion, {"prompt": "a", "n": 1000}, "n"),
    (completion, {"prompt": ["a"] * 100, "n": 100}, "prompt"),
    (completion, {"prompt": "a", "stop": ""}, "stop"),
    (completion, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    (completion, {"prompt": "a", "stream": "yes"}, "stream"),
    (completion, {"prompt": "a", "echo": True}, "echo"),
    (completion, {"prompt": "a", "logprobs": 1}, "logprobs"),
    (completion, {"prompt": "a", "best_of": 3}, "best_of"),
    (completion, {"prompt": "a", "bootstrap_room": 1}, "bootstrap_host"),
    (completion, {"prompt": "a", "bootstrap_room": 1, "bootstrap_host": "h"}, "bootstrap_port"),
    (completion, {"prompt": "a", "bootstrap_room": 1, "bootstrap_host": "", "bootstrap_port": 1}, "bootstrap_host"),
    *(
        (
            completion,
            {"prompt": "a", "bootstrap_room": 1, "bootstrap_host": host, "bootstrap_port": 1},
            "bootstrap_host",
        )
        for host in ("x y", "[::1", "::1]", "http://h", "h:80", "a" * 64)
    ),
    (completion, {"prompt": "a", "bootstrap_room": -1}, "bootstrap_room"),
    (completion, {"prompt": "a", "bootstrap_room": 2**63}, "bootstrap_room"),
    (
        completion,
        {"prompt": "a", "bootstrap_room": [1, 2], "bootstrap_host": "h", "bootstrap_port": 1},
        "bootstrap_room",
    ),
    (chat, {"messages": []}, "messages"),
    (chat, {"messages": "hello"}, "messages"),
    (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (chat, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (chat, {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
    (chat, {"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    (chat, {"tools": [{"type": "function"}]}, "tools"),
    (chat, {"response_format": {"type": "json_object"}}, "response_format"),
    (chat, {"frequency_penalty": 1}, "frequency_penalty"),
    (chat, {"logprobs": True}, "logprobs"),
    (chat, {"max_completion_tokens": -5}, "max_completion_tokens"),
    (generate, {}, "text"),
    (generate, {"text": "a", "input_ids": [1]}, "text"),
    (generate, {"text": []}, "text"),
    (generate, {"input_ids": []}, "input_ids"),
    (generate, {"input_ids": [[]]}, "input_ids"),
    (generate, {"input_ids": [1, [2]]}, "input_ids"),
    (generate, {"text": ["a", "b"], "rid": ["x"]}, "rid"),
    (generate, {"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    (generate, {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params.n"),
    (generate, {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
    (generate, {"text": "a", "sampling_params": {"min_p": 0.1}}, "sampling_params.min_p"),
    (generate, {"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
    (generate, {"text": "a", "return_logprob": True}, "return_logprob"),
    (completion, {"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens"),
    (completion, {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (chat, {"min_p": 0.1}, "min_p"),
    (generate, {"text": "a", "image_data": "a.png"}, "image_data"),
    (generate, {"text": "a", "input_embeds": [[1.0]]}, "input_embeds"),
    (generate, {"text": "a", "lora_path": [None, "a"]}, "lora_path"),
]


@pytest.mark.parametrize(
    ("parse", "body", "param"), REFUSED, ids=lambda value: getattr(value, "__name__", str(value))[:60]
)
def test_wrong_field_is_refused_by_name(parse, body, param):
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"prompt": "\xff"}'])
def test_body_that_is_not_json_is_refused(raw):
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        decode_body(raw, CompletionBody)
    assert caught.value.status == 400


def test_json_nested_too_deeply_is_refused():
    with pytest.raises(RequestError, match="too deeply") as caught:
        decode_body(b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", CompletionBody)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"text"', b"3"])
def test_json_without_object_is_refused(raw):
    with pytest.raises(RequestError, match="body: Expected `object`"):
        decode_body(raw, CompletionBody)


@pytest.mark.parametrize("name", Unsupported.__struct_fields__)
def test_unsupported_field_is_refused_in_every_body(name):
    def of_sampling(text, **fields):
        return generate(text=text, sampling_params=fields)

    for parse, body, prefix in (
        (completion, {"prompt": "a"}, ""),
        (chat, {}, ""),
        (generate, {"text": "a"}, ""),
        (of_sampling, {"text": "a"}, "sampling_params."),
    ):
        for value in (3.5, "a", ["a"], {"a": 1}):
            with pytest.raises(RequestError, match=rf"^{prefix}{name}: ") as caught:
                parse(**body, **{name: value})
            assert (caught.value.status, caught.value.code) == (400, "unsupported")
            assert caught.value.param == prefix + name


ADDED_BY_THE_ROUTER = {
    completion: {"prompt": "a", "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
    | {"stream": False, "return_hidden_states": False},
    chat: {"logprobs": False, "stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
    | {"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}
    | {"return_hidden_states": False},
    generate: {"text": "a", "model": None, "return_text_in_logprobs": False, "stream": False, "log_metrics": True}
    | {"return_hidden_states": False, "background": False, "no_logs": False, "return_bytes": False}
    | {"return_entropy": False},
}
"""Recorded from sglang-router 0.3.2, which sends these whether or not the client did."""


def test_fields_of_the_router_are_accepted():
    for parse, body in ADDED_BY_THE_ROUTER.items():
        assert len(parse(**body).prompts) == 1


def test_fields_that_ask_for_nothing_are_accepted():
    nothing = {
        "min_p": 0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "custom_params": {},
        "stop_regex": [],
        "return_logprob": [False],
    }
    nothing |= {"lora_path": [None], "tools": [], "response_format": {"type": "text"}, "suffix": "", "best_of": 1}
    nulls = dict.fromkeys(Unsupported.__struct_fields__)
    for fields in (nothing, nulls):
        for job in (completion(prompt="a", **fields), chat(**fields), generate(text="a", sampling_params=fields)):
            assert len(job.prompts) == 1


def test_unknown_fields_are_ignored():
    assert completion(prompt="ab", user="a", no_such_field=3).prompts == [(97, 98)]


def test_prompt_may_be_text_or_tokens_or_lists():
    assert completion(prompt="ab").prompts == [(97, 98)]
    assert completion(prompt=["a", "b"]).prompts == [(97,), (98,)]
    assert completion(prompt=[1, 2]).prompts == [(1, 2)]
    assert completion(prompt=[[1, 2], [3]]).prompts == [(1, 2), (3,)]
    assert generate(input_ids=[1, 2]).prompts == [(1, 2)]
    assert generate(input_ids=[[1, 2], [3]]).prompts == [(1, 2), (3,)]
    assert generate(text=["a", "b"]).prompts == [(97,), (98,)]


def test_defaults_are_those_of_the_api():
    assert completion(prompt="a").sampling[0].max_new_tokens == 16
    assert generate(text="a").sampling[0].max_new_tokens == 128
    nulls = dict.fromkeys(SamplingBody.__struct_fields__)
    assert generate(text="a", sampling_params=nulls, stream=None).sampling == generate(text="a").sampling
    assert chat().sampling[0].max_new_tokens == 95, "what 100 tokens leave over after a prompt of 5"
    assert chat().sampling[0].temperature == 1.0
    assert chat(max_tokens=7).sampling[0].max_new_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=8).sampling[0].max_new_tokens == 8


def test_an_assistants_message_may_be_empty():
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
    assert chat(messages=said).prompts == chat().prompts


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts == chat().prompts


def test_samples_of_one_seed_have_different_seeds():
    seeds = [params.seed for params in completion(prompt=["a", "b"], n=2, seed=7).sampling]
    assert seeds == [7, 8, 7, 8]


ONE = {"bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}


def test_samples_share_their_room():
    job = completion(prompt="a", n=3, **ONE)
    assert [replace(handoff, prompt=b"") for handoff in job.handoffs] == [Handoff("10.0.0.1:8998", 5)] * 3


def test_more_sequences_than_a_room_takes_are_refused():
    assert len(completion(prompt="a", n=64, **ONE).handoffs) == 64
    with pytest.raises(RequestError, match="65 sequences share the room 5, at most 64") as caught:
        completion(prompt="a", n=65, **ONE)
    assert caught.value.param == "bootstrap_room"


def test_hand_off_has_digest_of_prompt_and_sampling():
    job = completion(prompt=["a", "b"], n=2, seed=7, **ONE)
    drawn = zip(job.prompts, job.sampling, strict=True)
    assert [handoff.prompt for handoff in job.handoffs] == [prompt_of(*one) for one in drawn]
    assert len({handoff.prompt for handoff in job.handoffs}) == 4


@pytest.mark.parametrize(
    "asked", [{"prompt": [[1] * (ROOM_FOR + 1), [2]]}, {"prompt": ["a" * (ROOM_FOR + 1), "b"]}], ids=str
)
def test_prompt_that_cannot_fit_gets_no_digest(asked, monkeypatch):
    read = []
    monkeypatch.setattr(request_body, "prompt_of", lambda tokens, _sampling: bytes([read.append(tokens) or len(read)]))
    assert [handoff.prompt for handoff in completion(**asked, n=2, **ONE).handoffs] == [b"", b"", b"\1", b"\2"]
    assert [len(tokens) for tokens in read] == [1, 1]


def test_prompt_is_read_once_for_all_samples(monkeypatch):
    read = []
    monkeypatch.setattr(request_body, "prompt_of", lambda tokens, _sampling: read.append(tokens) or b"digest")
    generate(text="a", sampling_params={"n": 3, "sampling_seed": 7}, **ONE)
    assert len(read) == 3
    assert all(tokens is read[0] for tokens in read)
    assert isinstance(read[0], np.ndarray)


@pytest.mark.parametrize("asked", [{"text": "a"}, {"input_ids": [1, 2]}], ids=str)
@pytest.mark.parametrize("listed", ["neither", "a list of one", "two samples"])
def test_generate_answers_lists_and_samples_with_list(asked, listed):
    if listed == "a list of one":
        asked = {name: [prompt] for name, prompt in asked.items()}
    body = decode_body(json.dumps(asked).encode(), GenerateBody)
    rids = ["r"] * (2 if listed == "two samples" else 1)
    whole = GenerateReply(rids, batch=body.batch).whole([Result(1) for _ in rids])
    assert isinstance(whole, dict if listed == "neither" else list)


def test_rooms_are_given_for_each_prompt():
    fields = {"bootstrap_host": ["h", "h"], "bootstrap_port": [1, 2], "bootstrap_room": [5, 6]}
    job = completion(prompt=["a", "b"], n=2, **fields)
    assert [(handoff.prefill, handoff.room) for handoff in job.handoffs] == [
        ("h:1", 5),
        ("h:1", 5),
        ("h:2", 6),
        ("h:2", 6),
    ]


def test_rooms_may_be_given_for_each_sample():
    job = chat(n=2, bootstrap_host=["h", "h"], bootstrap_port=[1, 1], bootstrap_room=[5, 6])
    assert [handoff.room for handoff in job.handoffs] == [5, 6]


def test_an_ipv6_host_gets_brackets():
    assert completion(prompt="a", **{**ONE, "bootstrap_host": "fd00::1"}).handoffs[0].prefill == "[fd00::1]:8998"
    assert completion(prompt="a", **{**ONE, "bootstrap_host": "[fd00::1]"}).handoffs[0].prefill == "[fd00::1]:8998"


def test_without_a_room_there_is_no_handoff():
    assert completion(prompt="a", n=2).handoffs == [None, None]


FIRST = Handoff("10.0.0.1:8998", 5)


@pytest.mark.parametrize(
    ("fields", "rid"),
    [
        ({"temperature": "hot"}, ""),
        ({"prompt": {"a": 1}, "rid": "r"}, "r"),
        ({"rid": ["r", "s"]}, "r"),
        ({"rid": 5}, ""),
        ({"rid": "r" * 257}, ""),
        ({"bootstrap_room": [5, 6], "bootstrap_host": ["10.0.0.1", "h"], "bootstrap_port": [8998, 1]}, ""),
    ],
    ids=str,
)
def test_hand_off_is_read_from_a_bad_body(fields, rid):
    assert first_handoff(json.dumps({**ONE, **fields}).encode()) == (rid, FIRST)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"bootstrap_room": 5}',
        b'{"bootstrap_room": [], "bootstrap_host": [], "bootstrap_port": []}',
        b'{"bootstrap_room": -1, "bootstrap_host": "h", "bootstrap_port": 1}',
        b'{"bootstrap_room": [5, 6], "bootstrap_host": ["h"], "bootstrap_port": 1}',
        b'{"bootstrap_room": 5, "bootstrap_host": "x y", "bootstrap_port": 1}',
    ],
    ids=lambda raw: repr(raw[:50]),
)
def test_body_without_right_hand_off_fields_names_none(raw):
    assert first_handoff(raw) is None

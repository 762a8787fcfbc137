"""Malformed requests, byte by byte over a socket: each gets a 4xx in OpenAI's form at once, and harms no other."""

import gzip
import json
import socket
import zlib
from urllib.parse import urlsplit

import pytest
from pdpool_reference.demo.launch import Children

from tests.integration.asking import load_of

SOON_S = 60.0
BODY = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}).encode()


PACKED = {
    "plain": BODY,
    "gzip": gzip.compress(BODY, mtime=0),
    "gzip cut short": gzip.compress(BODY, mtime=0)[:-6],
    "deflate": zlib.compress(BODY),
    "empty": b"",
}


@pytest.fixture(scope="module")
def engine():
    with Children() as children:
        yield children.engine("unified", model_path="tiny", extra=["--kv-pages", "64"])


def request(*headers, body=b"", line="POST /generate HTTP/1.1", length=True):
    """The bytes of a request."""
    lines = [line, "Host: x", "Content-Type: application/json", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def packed(name, body):
    return request(f"Content-Encoding: {name}", body=body)


def chunked(body, *headers, coding="chunked"):
    return request(f"Transfer-Encoding: {coding}", *headers, body=body, length=False)


def sized(length, *headers):
    return request(f"Content-Length: {length}", *headers, body=BODY, length=False)


def asking(body, path="/generate"):
    return request(body=body, line=f"POST {path} HTTP/1.1")


def sampling(field, value):
    return asking(b'{"text": "a", "sampling_params": {"%s": %s}}' % (field, value))


def answer(engine, data):
    """Status and body of the first answer to these bytes."""
    where = urlsplit(engine.url)
    with socket.create_connection((where.hostname, where.port), timeout=SOON_S) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as reader:
            status = int(reader.readline().split()[1])
            headers = dict(line.lower().split(b": ", 1) for line in iter(reader.readline, b"\r\n"))
            return status, reader.read(int(headers[b"content-length"]))


def check_refused(engine, data, *statuses):
    status, body = answer(engine, data)
    assert status in statuses
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["code"]


@pytest.mark.parametrize("name", ["gzip", "GZIP", "deflate", "br", "zstd", "compress", "gzip, gzip", "nonsense"])
@pytest.mark.parametrize("body", PACKED.values(), ids=list(PACKED))
def test_content_encoding_is_refused(engine, name, body):
    check_refused(engine, packed(name, body), 415)


def test_identity_encoding_is_read(engine):
    assert answer(engine, packed("identity", BODY))[0] == 200
    assert answer(engine, chunked(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        *(sized(length) for length in ("-1", "abc", "1e3", "+5", "5, 6", "0x10", "9" * 30, "")),
        sized(10),
        request("Content-Length: 5", body=BODY),
        request("Transfer-Encoding: chunked", body=b"5\r\nhello\r\n0\r\n\r\n"),
        *(
            chunked(b"5\r\nhello\r\n0\r\n\r\n", coding=coding)
            for coding in ("gzip", "identity", "chunked, chunked", "xchunked", "chunked, gzip", "")
        ),
        *(
            chunked(body + b"\r\n0\r\n\r\n")
            for body in (b"zz\r\nhello", b"-5\r\nhello", b"f" * 17 + b"\r\na", b"2\r\nabc")
        ),
        request(body=BODY, length=False),
        request(body=BODY, line="POST /generate HTTP/9"),
        request(line="B@D /generate HTTP/1.1"),
        request(line="get /generate HTTP/1.1"),
        request(line="GET /\xe9 HTTP/1.1"),
        request(line="GET /" + "a" * 9000 + " HTTP/1.1"),
        request("X: " + "a" * 9000, body=BODY),
        request(*(f"X{number}: a" for number in range(1000)), body=BODY),
        request("no colon here", body=BODY),
        request("X: a\x00b", body=BODY),
        b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"\x00\x01\x02\x03\r\n\r\n",
        b"\x16\x03\x01\x00\x50" + b"a" * 80 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda data: repr(data[:60]),
)
def test_bytes_that_are_not_http_are_refused(engine, data):
    check_refused(engine, data, 400)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_unknown_method_is_refused(engine, method):
    check_refused(engine, request(line=f"{method} /generate HTTP/1.1"), 405)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/generate/x", "//health", "/../etc/passwd", "/%zz%ff"])
def test_unknown_path_is_refused(engine, path):
    check_refused(engine, request(body=BODY, line=f"POST {path} HTTP/1.1"), 404, 405)


def test_an_expectation_that_cannot_be_met_is_refused(engine):
    check_refused(engine, request("Expect: miracles", body=BODY), 417)


@pytest.mark.parametrize(
    "value", [b"NaN", b"Infinity", b"1e400", b"1" * 5000, b"01", b'"\\ud800"', b'"\xff"', b"[" * 9999]
)
@pytest.mark.parametrize("field", [b"temperature", b"max_new_tokens", b"sampling_seed", b"n", b"stop_token_ids"])
def test_impossible_value_is_refused(engine, field, value):
    check_refused(engine, sampling(field, value), 400)


@pytest.mark.parametrize(
    "data",
    [
        asking(b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        asking(b'{"text": "a", "other": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}"),
        *(asking(b'{"text": %s}' % text) for text in (rb'"\ud800', b'"\xed\xa0\x80"', b'"\x01"', rb'"\x"', rb'"\u12"')),
        *(asking(body) for body in (b"", b"   ", b"5", b"[]", b"\x00", b"null", BODY + b"x", BODY + BODY)),
        asking(BODY.decode().encode("utf-16")),
        asking(b'{"input_ids": [[]]}'),
        asking(b'{"input_ids": [1e400]}'),
        asking(json.dumps({"text": ["a"] * 300_000}).encode()),
        asking(json.dumps({"prompt": ["a"] * 300_000}).encode(), "/v1/completions"),
        asking(json.dumps({"messages": [{"role": "user", "content": "a"}] * 50_000}).encode(), "/v1/chat/completions"),
        asking(b"{", "/abort_request"),
        asking(b'{"rid": 5}', "/abort_request"),
    ],
    ids=lambda data: repr(data[-30:]),
)
def test_malformed_body_is_refused(engine, data):
    check_refused(engine, data, 400)


def test_a_body_beyond_the_bound_is_refused(engine):
    check_refused(engine, asking(b'{"text": "' + b"a" * (17 << 20) + b'"}'), 413)


def test_a_lone_surrogate_is_no_reason_to_fail(engine):
    answered = answer(engine, asking(rb'{"text": "\ud800", "sampling_params": {"max_new_tokens": 2}}'))
    assert answered[0] in (200, 400)


def test_malformed_requests_leave_no_trace(engine):
    load = load_of(engine.url)
    assert load["num_running_reqs"] == load["num_used_tokens"] == 0
    assert answer(engine, asking(BODY))[0] == 200
    assert "Traceback" not in engine.log.read_text()

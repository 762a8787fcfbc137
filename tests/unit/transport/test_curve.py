import errno
import json
import threading
import time

import pytest
import zmq
from pdpool_connector.transport.curve import CurveAuthenticator, KeysError, make_key, read_keys


def written(tmp_path, content):
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def pair(key):
    return {"public": key.public.decode(), "secret": key.secret.decode()}


def test_keys_are_read_in_their_order(tmp_path):
    keys = (make_key(), make_key())
    assert read_keys(written(tmp_path, [pair(key) for key in keys])) == keys


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "must be a JSON list"),
        ([{"public": "short", "secret": "short"}], "must be a JSON list"),
        ([], "has 0 pairs of keys, must have 1..4"),
        ([{"public": "é" * 40, "secret": "é" * 40}], "must be a JSON list"),
    ],
)
def test_wrong_key_file_is_refused_without_content(tmp_path, content, why):
    with pytest.raises(KeysError, match=why):
        read_keys(written(tmp_path, content))


def test_public_key_of_another_pair_is_refused(tmp_path):
    mixed = pair(make_key()) | {"secret": make_key().secret.decode()}
    with pytest.raises(KeysError, match="does not belong to its secret key") as caught:
        read_keys(written(tmp_path, [mixed]))
    assert mixed["secret"] not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(KeysError, match="cannot be read: No such file"):
        read_keys(str(tmp_path / "none.json"))


def test_a_secret_key_is_not_shown():
    key = make_key()
    assert key.secret.decode() not in repr(key)
    assert key.secret.decode() not in f"{(key,)}"


def made_or_closed(call):
    """What came of a call that must not wait for a thread that is no more, in one that may."""
    came = []

    def attempt():
        try:
            came.append(call())
        except zmq.ZMQError as error:
            came.append(error)

    calling = threading.Thread(target=attempt, daemon=True)
    calling.start()
    calling.join(30)
    assert came, "it waits for ever"
    return came[0]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_interrupted_close_is_completed_by_the_next(monkeypatch):
    with zmq.Context() as context:
        keeper = CurveAuthenticator(context, [make_key()], 5.0)

        def interrupted():
            keeper._authenticator.thread.join()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(keeper._authenticator, "is_alive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                keeper.close()
        wait_until(lambda: not keeper._authenticator.pipe.poll(0, zmq.POLLOUT))  # zmq knows that nothing listens there
        assert made_or_closed(keeper.close) is None


def test_missing_socket_fails_and_leaves_nothing(monkeypatch):
    with zmq.Context() as context:
        make, pairs = context.socket, []

        def one_too_many(kind, **more):
            if kind == zmq.PAIR and pairs:
                raise zmq.ZMQError(errno.EMFILE)
            made = make(kind, **more)
            pairs.extend([made] if kind == zmq.PAIR else [])
            return made

        with monkeypatch.context() as patch:
            patch.setattr(context, "socket", one_too_many)
            assert made_or_closed(lambda: CurveAuthenticator(context, [make_key()], 5.0)).errno == errno.EMFILE
        # The address of the first is free once zmq has closed its socket, behind our back.
        wait_until(lambda: made_or_closed(lambda: CurveAuthenticator(context, [make_key()], 5.0).close()) is None)

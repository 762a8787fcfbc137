import json

import pytest
from pdpool_connector.transport.curve import KeysError, make_key, read_keys


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
def test_a_file_that_holds_no_keys_is_refused_without_telling_what_it_holds(tmp_path, content, why):
    with pytest.raises(KeysError, match=why):
        read_keys(written(tmp_path, content))


def test_a_public_key_of_another_pair_is_refused(tmp_path):
    mixed = pair(make_key()) | {"secret": make_key().secret.decode()}
    with pytest.raises(KeysError, match="does not belong to its secret key") as caught:
        read_keys(written(tmp_path, [mixed]))
    assert mixed["secret"] not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(KeysError, match="cannot be read: No such file"):
        read_keys(tmp_path / "none.json")


def test_a_secret_key_is_not_shown():
    key = make_key()
    assert key.secret.decode() not in repr(key)
    assert key.secret.decode() not in f"{(key,)}"

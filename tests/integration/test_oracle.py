"""The oracle itself: it says identical only where answers are, and its prompts are those that it promises."""

import subprocess
import sys

from pdpool_reference import tokenizer as tokenizers

from proof.oracle import BOUNDARY_LENGTHS, LONG_LENGTHS, Answer, Prompt, compare, make_prompts


def test_tiny_model_agrees_over_nixl():
    command = [sys.executable, "-m", "proof.oracle", "--model", "tiny", "--prompts", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "oracle: 60/60 identical"


def test_difference_and_errors_are_not_identical(capsys):
    prompts = [Prompt("kind", "/generate", {})] * 4
    good, other, error = Answer(True, ([1, 2], "length")), Answer(True, ([1, 3], "length")), Answer(False, (503, {}))
    assert compare(prompts, [good, good, good, error], [good, other, error, error]) == 1
    printed = capsys.readouterr().out
    assert "prompt 1 (kind)" in printed
    assert "[1, 3]" in printed


def test_prompts_vary_and_repeat():
    encode = tokenizers.load("tiny").encode
    prompts = make_prompts(encode, 100)
    assert prompts == make_prompts(encode, 100)
    assert len(prompts) == 100
    lengths = {len(prompt.body["input_ids"]) for prompt in prompts if "input_ids" in prompt.body}
    assert {*BOUNDARY_LENGTHS, *LONG_LENGTHS} <= lengths
    assert {prompt.path for prompt in prompts} == {"/generate", "/v1/completions", "/v1/chat/completions"}
    repeats = [prompt for prompt in prompts if prompt.kind == "repeated"]
    assert len(repeats) > 1
    assert all(repeat == repeats[0] for repeat in repeats)
    beginnings = {tuple(prompt.body["input_ids"][:40]) for prompt in prompts if prompt.kind == "common beginning"}
    assert len(beginnings) == 1

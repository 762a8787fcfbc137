"""`pdpool demo`: a question answered over a hand-off, on this machine, without root or cluster."""

import importlib.util
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pdpool_connector.installed import install_command
from rich.console import Console

from pdpool_reference import weights_fetch
from pdpool_reference.demo.launch import Child, Children, LaunchError, bytes_moved, check_free, pick_backend
from pdpool_reference.weights import WeightsError

ANSWER_TOKENS = 64
ANSWER_S = 120.0


def run_demo(question: str, *, model_path: str | None, backend: str, port: int, once: bool) -> int:
    """Start everything, ask, show the answer, and run until Ctrl-C unless `once`. Returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _Story(console).run(question, model_path=model_path, backend=pick_backend(backend), port=port, once=once)
    except (LaunchError, WeightsError, OSError) as error:
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        console.print(f"failed: {message}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: all processes have ended")
        return 130
    return 0


class _Story:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def run(self, question: str, *, model_path: str | None, backend: str, port: int, once: bool) -> None:
        if importlib.util.find_spec("sglang_router") is None:
            raise LaunchError(f"sglang-router is not installed; install it with: {install_command('demo')}")
        check_free(port)
        if model_path is None:
            self._say("model: SmolLM2-135M-Instruct")
            model_path = str(weights_fetch.smollm2_dir(self._say))
        with Children(self._say) as children:
            self._say(f"starting a prefill and a decode engine; the cache moves over {backend}")
            modes = ("prefill", "decode")
            begun = [children.begin_engine(mode, model_path=model_path, backend=backend) for mode in modes]
            prefill, decode = [children.listening(child) for child in begun]
            router = children.router([prefill], [decode], port=port)
            self._ask(router, decode, question)
            if not once:
                self._invite(router, prefill, decode, children.logs)
                children.wait_for_end_of_any()
        self._say("all processes have ended")

    def _ask(self, router: Child, decode: Child, question: str) -> None:
        self._console.print(f"\n[bold]> {question}[/bold]")
        began, first = time.monotonic(), None
        for text in stream_chat(router.url, question):
            first = first or time.monotonic()
            self._console.print(text, end="", markup=False)
        self._console.print("\n")
        if first is None:
            raise LaunchError("the model gave no answer")
        moved = bytes_moved(decode)
        self._say(f"first token after {1000 * (first - began):.0f} ms; {moved:,} bytes of KV cache moved to decode")

    def _invite(self, router: Child, prefill: Child, decode: Child, logs: Path) -> None:
        self._console.print(f"\nOpenAI-compatible URL: [bold]{router.url}/v1[/bold]")
        for child in (prefill, decode):
            self._console.print(f"{child.name:>8}: {child.url}/v1/loads   http://{child.addresses['admin']}/v1/state")
        self._console.print(f"{'logs':>8}: {logs}, with a record of each hand-off that fails")
        self._console.print("Ctrl-C ends everything.")

    def _say(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {line}", style="dim", markup=False)


def stream_chat(url: str, question: str) -> Iterator[str]:
    """Yield the pieces of a greedy chat answer. Raises LaunchError when it ends in an error or is incomplete."""
    body = {"model": "default", "messages": [{"role": "user", "content": question}], "stream": True}
    body |= {"temperature": 0, "max_tokens": ANSWER_TOKENS}
    request = urllib.request.Request(  # noqa: S310 - a loopback URL made here
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        response = urllib.request.urlopen(request, timeout=ANSWER_S)  # noqa: S310
    except urllib.error.HTTPError as error:
        with error:
            raise LaunchError(f"the answer was {error.code}: {error.read().decode(errors='replace')}") from None
    with response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data:
                continue
            if data == "[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise LaunchError(f"the answer ended in an error: {event['error']['message']}")
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    yield text
    raise LaunchError("the answer broke off: its stream ended without [DONE]")

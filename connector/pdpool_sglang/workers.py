"""The HTTP application of SGLang's tokenizer workers (`--tokenizer-worker-num`), which load no plugins by themselves.

SGLang imports it by the name in SGLANG_HTTP_SERVER_APP_PATH.
"""

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]

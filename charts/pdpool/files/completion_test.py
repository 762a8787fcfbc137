"""Request one completion from a router: `completion_test.py URL SECONDS`. On failure, print the answer and exit 1."""

import json
import sys
import urllib.error
import urllib.request
from typing import Any

router, seconds = sys.argv[1], float(sys.argv[2])
question = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


def call(path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401 -- the server's JSON
    """Send one request (POST where there is a body) and return the decoded answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(router + path, data, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310 -- a Service named by the values
        return json.load(answer)


try:
    model = call("/v1/models")["data"][0]["id"]
    answer = call("/v1/completions", {"model": model, **question})
    text = answer["choices"][0]["text"]
except urllib.error.HTTPError as error:
    sys.exit(f"{router}: HTTP {error.code}: {error.read().decode(errors='replace')}")
except (OSError, LookupError, ValueError) as error:
    sys.exit(f"{router}: {error!r}")
if not text.strip():
    sys.exit(f"{router}: model {model} answered an empty text: {answer}")
print(f"{router}: model {model} answered {text!r}")  # noqa: T201 -- `helm test --logs` shows the pod's log

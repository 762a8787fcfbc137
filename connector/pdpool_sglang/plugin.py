"""What SGLang runs in each of its processes: it registers the backend `pdpool`.

SGLang logs the error of a plugin and goes on without it. So a fault here ends the process, if it was started with our
backend; under another backend it is only logged.
"""

import os
import sys
from typing import Any, NoReturn

NAME = "pdpool"
FLAG = "--disaggregation-transfer-backend"
APP_PATH = "SGLANG_HTTP_SERVER_APP_PATH"


def register() -> None:
    """Register name, classes and hooks; SGLang's entry point."""
    try:
        _register()
    except Exception as error:
        if is_selected(sys.argv):
            _end(_reason(error))
        raise


def is_selected(arguments: list[str]) -> bool:
    """Whether a command line of SGLang's names our backend."""
    pairs = zip(arguments, [*arguments[1:], ""], strict=False)
    return any(one == f"{FLAG}={NAME}" or (one == FLAG and after == NAME) for one, after in pairs)


def _register() -> None:
    if is_selected(sys.argv):
        _check_environment()
    from . import surface

    surface.check_version(os.environ)
    surface.add_backend(NAME, _class)
    surface.add_hooks()
    os.environ.setdefault(APP_PATH, "pdpool_sglang.workers:app")


def _check_environment() -> None:
    """Raise ValueError for a PDPOOL_* variable without a usable value, before SGLang spends a minute on the model."""
    from pdpool_connector import ConnectorConfig

    ConnectorConfig.from_env(os.environ, advertise_host=os.environ.get("PDPOOL_ADVERTISE_HOST") or "127.0.0.1")


def _class(kind: str) -> Any:  # noqa: ANN401 - a class that SGLang makes objects of
    """The class of one kind: "manager", "sender", "receiver", "bootstrap_server"."""
    from . import manager

    return {
        "manager": manager.Manager,
        "sender": manager.Sender,
        "receiver": manager.Receiver,
        "bootstrap_server": manager.BootstrapServer,
    }.get(kind)


def _reason(error: Exception) -> str:
    """What went wrong and what to do, for the person who starts the engine."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("sglang"):
        # pdpool is on no package index, where another project may have its name. The missing module may be one that
        # `pdpool_connector.installed` needs.
        return f"{error}: run pip install 'WHEEL[sglang]' in SGLang's environment, with the file of pdpool's wheel"
    return str(error) or type(error).__name__


def _end(reason: str) -> NoReturn:
    sys.stderr.write(f"pdpool: the transfer backend cannot be used in process {os.getpid()}: {reason}\n")
    sys.stderr.flush()
    os._exit(1)

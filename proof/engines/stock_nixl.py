"""A plugin of SGLang that lets its own NIXL backend run on CPU: `register` is the entry point.

- Always: cache memory is registered as DRAM. SGLang takes it for memory of a GPU.
- With `PDPOOL_STOCK_NIXL=best`: NIXL's own progress thread, which takes a core, is replaced by one that runs each
  millisecond. This is the fastest setting of that backend on a machine without spare cores.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

PERIOD_S = 0.001


def register() -> None:
    """Register the hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", _around, HookType.AROUND)


def _around(original: Callable[..., None], manager: Any, args: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    if os.environ.get("PDPOOL_STOCK_NIXL") != "best":
        original(manager, args, *rest, **named)
        return
    from nixl import _api

    whole = _api.nixl_agent_config
    _api.nixl_agent_config = lambda **settings: whole(**settings, enable_prog_thread=False)
    try:
        original(manager, args, *rest, **named)
    finally:
        _api.nixl_agent_config = whole
    threading.Thread(target=_progress, args=(manager.agent,), name="nixl-progress", daemon=True).start()


def _progress(agent: Any) -> None:  # noqa: ANN401
    while True:
        agent.update_notifs()
        time.sleep(PERIOD_S)

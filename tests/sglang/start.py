"""Runs in SGLang's environment: what a scheduler process checks at its start. Prints one JSON line."""

import json

import sglang.srt.managers.scheduler  # noqa: F401 - as SGLang's own scheduler process has it by then
from pdpool_sglang import plugin, surface
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.plugins.hook_registry import HookRegistry


def failure(check, *arguments):
    """The text of the error that a check raises."""
    try:
        check(*arguments)
    except surface.SurfaceError as error:
        return str(error)
    return ""


def main():
    """Register, check, break something, check again."""
    plugin.register()
    HookRegistry.apply_hooks()
    from sglang.srt.disaggregation import utils

    facts = {
        "checked": failure(surface.check_scheduler),
        "classes": [
            utils.get_kv_class(TransferBackend("pdpool"), kind).__name__
            for kind in (KVClassType.KVARGS, KVClassType.MANAGER, KVClassType.SENDER, KVClassType.RECEIVER)
        ],
        "fake": utils.get_kv_class(TransferBackend.FAKE, KVClassType.SENDER).__name__,
        "version": [failure(surface.check_version, environ) for environ in ({}, {surface.ANY_VERSION: "1"})],
    }
    target = "sglang.srt.mem_cache.common.release_kv_cache"
    hook = surface.HOOKS[target]
    surface.HOOKS[target] = (*hook[:2], ("request", "cache"))
    facts["signature"] = failure(surface.check_scheduler)
    surface.HOOKS[target] = hook
    HookRegistry._patched.discard(target)
    facts["hook"] = failure(surface.check_scheduler)
    surface.VERSION = "0.5.99"
    facts["other"] = [failure(surface.check_version, environ) for environ in ({}, {surface.ANY_VERSION: "1"})]
    print(json.dumps(facts))  # noqa: T201 - its parent reads it


if __name__ == "__main__":
    main()

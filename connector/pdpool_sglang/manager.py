"""The manager of one scheduler process: it owns the connector."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

from pdpool_connector import Address, DecodeConnector, PrefillConnector

from . import surface
from .holds import Holds
from .memory import describe, instance_of
from .queues import QueueSampler
from .receiver import Receiver
from .sender import Sender

log = logging.getLogger(__name__)

RECOMPUTE_THREADS = 4
"""Requests under way to prefills, to compute retracted requests again."""


class BootstrapServer(surface.BaseKVBootstrapServer):
    """SGLang starts this in prefill's main process. The registry is served by the connector of rank 0."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port


class Manager(surface.BaseKVManager):
    """Describes the cache to the connector, starts it, and answers what SGLang's scheduler asks of a manager.

    Raises:
        ValueError: SGLang was started with something that this backend cannot do, or the memory cannot be described.
    """

    enable_deferred_decode_kv_release = True
    supports_deferred_decode_kv_release = True
    supports_host_destination = False
    supports_role_switch = False
    is_dummy_cp_rank = False

    def __init__(
        self,
        args: Any,  # noqa: ANN401 - KVArgs
        disaggregation_mode: Any,  # noqa: ANN401 - DisaggregationMode
        server_args: Any,  # noqa: ANN401 - ServerArgs
        is_mla_backend: bool | None = False,
    ) -> None:
        surface.check_scheduler()
        queue = surface.taken_queue()
        self.kv_args = args
        self.server_args = server_args
        self.scheduler = queue.scheduler
        engine = surface.read_engine(disaggregation_mode, queue)
        engine.refuse()
        self.dp_rank, self.dp_size = engine.dp_rank, engine.dp_size
        target, draft = surface.heads_of(queue, bool(is_mla_backend), engine.place.tp_size)
        memory = describe(
            args,
            model=surface.model_name(),
            place=engine.place,
            target=target,
            draft=draft,
            window_heads=surface.window_heads(queue),
            device=surface.device_of(server_args, args),
        )
        instance = instance_of(engine.place, memory)
        make = PrefillConnector if engine.role == "prefill" else DecodeConnector
        running = partial(surface.running, self.scheduler)
        self.connector: Any = make(engine.config(instance), memory, running=running)
        self.connector.start()
        self.holds = Holds()
        self.queues = QueueSampler(self.connector, time.monotonic)
        self.prefill_info_table = _PrefillTable(self)
        self._concluding: dict[int, list[Receiver]] = {}
        self._recompute: ThreadPoolExecutor | None = None
        surface.manager = self
        log.info(
            "pdpool: %s, rank %d of %d, data-parallel rank %d of %d, admin %s",
            engine.role,
            engine.place.rank,
            len(instance),
            self.dp_rank,
            self.dp_size,
            self.connector.admin_address,
        )

    def register_to_bootstrap(self) -> None:
        """The connector registers by itself, and renews it."""

    # --- Decode: prefills and their data-parallel ranks ---

    def dp_rank_of(self, bootstrap_addr: str, request: Any, room: int) -> int:  # noqa: ANN401
        """The data-parallel rank of prefill that has a request, as far as it is known; 0 where it is not."""
        if (named := surface.named_dp_rank(request)) is not None:
            return named
        info = self.prefill_info_table.get(bootstrap_addr)
        return room % info.dp_size if info is not None else 0

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether this prefill is known; never blocks. The connector asks its registry meanwhile."""
        return self.prefill_info_table.get(bootstrap_addr) is not None

    def submit_prefill_recompute(self, kv_receiver: Receiver, payload: dict[str, Any]) -> None:
        """Have prefill compute a retracted request again. One rank of decode asks; all of them receive."""
        if not surface.leads_instance():
            return
        info = self.prefill_info_table.get(kv_receiver.bootstrap_addr)
        if info is None or not info.prefill_http_port:
            kv_receiver.half.give_up(f"the HTTP port of prefill {kv_receiver.bootstrap_addr} is not known")
            return
        host = kv_receiver.bootstrap_addr.rpartition(":")[0].strip("[]")
        url = f"http://{Address(host, info.prefill_http_port)}/generate"
        self._ensure_prefill_recompute_executor().submit(
            _ask_recompute, url, payload, kv_receiver, self.connector.config.request_deadline_s
        )

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        if self._recompute is None:
            self._recompute = ThreadPoolExecutor(RECOMPUTE_THREADS, "pdpool-recompute")
        return self._recompute

    # --- Decode: pages of requests that failed ---

    def hold(self, receiver: Receiver) -> None:
        """A request was given up whose pages are offered."""
        concluding = self._concluding.setdefault(receiver.bootstrap_room or 0, [])
        if receiver not in concluding:
            concluding.append(receiver)

    def unhold(self, receiver: Receiver) -> None:
        """Its pages are back."""
        concluding = self._concluding.get(receiver.bootstrap_room or 0, [])
        if receiver in concluding:
            concluding.remove(receiver)
        if not concluding:
            self._concluding.pop(receiver.bootstrap_room or 0, None)

    def is_abort_release_safe(self, room: int, required_acks: int) -> bool:  # noqa: ARG002 - proof, not a count
        """Whether no prefill writes to pages of requests in this room that were given up."""
        return all(receiver.half.status.releasable for receiver in self._concluding.get(room, ()))

    def clear_deferred_abort_state(self, room: int) -> None:
        """Nothing is kept by room; `Receiver.clear` ends each."""


class _PrefillTable:
    """What is known of prefills, by bootstrap address, as SGLang looks it up."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def get(self, bootstrap_addr: str) -> Any:  # noqa: ANN401 - attributes of SGLang's PrefillServerInfo
        try:
            facts = self._manager.connector.facts(bootstrap_addr)
        except ValueError:  # the receiver fails with the same
            return None
        if facts is None:
            return None
        return SimpleNamespace(
            dp_size=_count(facts.get("dp_size"), 1),
            follow_bootstrap_room=True,
            prefill_http_port=_count(facts.get("http_port"), 0),
        )


def _count(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else default


def _ask_recompute(url: str, payload: dict[str, Any], receiver: Receiver, timeout_s: float) -> None:
    """In a thread of its own: prefill answers when it has sent the pages."""
    failure = surface.post(url, payload, timeout_s)
    if failure:
        log.error("prefill does not compute %s again: %s", payload.get("rid"), failure)
        receiver.half.give_up(f"prefill does not compute the request again: {failure}")


__all__ = ["BootstrapServer", "Manager", "Receiver", "Sender"]

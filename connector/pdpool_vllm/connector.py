"""The class that vLLM loads: `--kv-transfer-config` with `kv_connector_module_path` "pdpool_vllm.connector".

Tested with vLLM 0.32.0. vLLM calls its interface of connectors experimental, so other versions are refused unless
PDPOOL_VLLM_ANY_VERSION is 1.
"""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pdpool_connector import DecodeConnector, PrefillConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus
from vllm.version import __version__

from .memory import describe, instance_of
from .scheduler import ROOMS, DecodeScheduler, PrefillScheduler, Step
from .settings import Engine, registry_of
from .worker import DecodeWorker, PrefillWorker

log = logging.getLogger(__name__)

TESTED: Final = ("0.32.0",)
ANY_VERSION: Final = "PDPOOL_VLLM_ANY_VERSION"
COMPLETE: Final = frozenset({RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED})


def _log_as_vllm() -> None:
    """Show what pdpool logs as vLLM shows its own. vLLM configures only loggers below its own name."""
    for package in ("pdpool_vllm", "pdpool_connector"):
        logging.getLogger(package).parent = logging.getLogger("vllm")


class StepMetadata(Step, KVConnectorMetadata):
    """What vLLM carries from its scheduler to its workers."""


@dataclass
class Answered(KVConnectorWorkerMetadata):
    """For how many workers a request need not wait any more."""

    workers: Counter[str]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add what another worker knows."""
        assert isinstance(other, Answered)
        return Answered(self.workers + other.workers)


class PdpoolConnector(KVConnectorBase_V1):
    """One side of one vLLM engine.

    Raises:
        ValueError: vLLM was started with something that this connector cannot do.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)
        if __version__ not in TESTED and os.environ.get(ANY_VERSION) != "1":
            raise ValueError(
                f"vLLM {__version__} was not tested with PdpoolConnector: install {' or '.join(TESTED)}, or set "
                f"{ANY_VERSION}=1"
            )
        _log_as_vllm()
        self._engine = read_engine(vllm_config, kv_cache_config)
        self._engine.refuse()
        self._requests = 0
        self._connector: Any = None
        self._worker: Any = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)

    # --- Scheduler ---

    def _make_scheduler(self, block_tokens: int) -> PrefillScheduler | DecodeScheduler:
        if self._engine.role == "decode":
            return DecodeScheduler(block_tokens)
        registry, new_room = registry_of(self._engine.config(0)), partial(secrets.choice, ROOMS)
        return PrefillScheduler(block_tokens, registry, new_room, self._engine.tp_size)

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """A request has come."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """How many tokens come from prefill, and that they come between steps. None: ask again."""
        tokens = self._scheduler.remote_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ANN401, ARG002
        """A request's own blocks come, of every group."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """A request has blocks."""
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401, ARG002
        """What the workers do in this step."""
        return StepMetadata(**vars(self._scheduler.take_step()))

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """What the workers have reported."""
        if (news := connector_output.kv_connector_worker_meta) is not None:
            self._scheduler.answered(news.workers)
        self._scheduler.received(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """A request is over: whether its blocks are kept, and the parameters for decode."""
        return self._scheduler.finished(request, block_ids, complete=request.status in COMPLETE)

    # --- Worker ---

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ANN401
        """Heads before tokens: parts of a page then move in one piece between unequal tensor parallelism."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describe the cache to the connector, and start it."""
        place = self._engine.place(get_tensor_model_parallel_rank())
        blocks = self._kv_cache_config.num_blocks
        memory = describe(kv_caches, blocks=blocks, model=self._engine.model, place=place)
        config = self._engine.config(place.tp_rank, instance_of(place, memory.layers))
        sides: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
            "prefill": (PrefillConnector, PrefillWorker),
            "decode": (DecodeConnector, DecodeWorker),
        }
        make_connector, make_worker = sides[self._engine.role]
        self._connector = make_connector(config, memory, running=lambda: self._requests)
        self._connector.start()
        self._worker = make_worker(self._connector)
        log.info("pdpool: %s, admin %s", self._engine.role, self._connector.admin_address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Begin what the scheduler decided."""
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        self._requests = step.requests
        self._worker.do(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Pages move once their request is computed."""

    def wait_for_save(self) -> None:
        """Pages move once their request is computed."""

    def get_transfer_results(self, finished_req_ids: Collection[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """What is over since the last step."""
        results = self._worker.results()
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Requests that need not wait any more."""
        found = self._worker.answered()
        return Answered(Counter(found)) if found else None

    def shutdown(self) -> None:
        """Fail what is under way, inform peers, and stop all threads."""
        if self._connector is not None:
            self._connector.close()


def read_engine(vllm_config: Any, kv_cache_config: Any) -> Engine:  # noqa: ANN401
    """What the connector needs of vLLM's configuration."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    served = model.served_model_name
    return Engine(
        kv_role=vllm_config.kv_transfer_config.kv_role,
        version=__version__,
        host=get_ip(),
        tp_size=parallel.tensor_parallel_size,
        total_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        latent=model.use_mla,
        model=served if isinstance(served, str) else served[0],
        refusals=_refusals(parallel, kv_cache_config),
    )


def _refusals(parallel: Any, kv_cache_config: Any) -> dict[str, str]:  # noqa: ANN401
    one = "set it to 1"
    sizes = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size,
        "--nnodes": parallel.nnodes,
        "--data-parallel-size": max(parallel.data_parallel_size, parallel.data_parallel_index + 1),
    }
    refusals = {f"{flag} {size}": one for flag, size in sizes.items() if size > 1}
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        refusals[f"a cache of {kinds}"] = "use a model with full attention in all layers"
    return refusals

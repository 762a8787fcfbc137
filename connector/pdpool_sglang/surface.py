"""Everything of SGLang that is private and that the plugin touches. No other module imports SGLang.

Tested with SGLang 0.5.23. `check_version` refuses other versions, `check_scheduler` compares the signatures of all
functions that are hooked, in the process that needs them.
"""

import copy
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import requests
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVPoll,
    KVTransferMetric,
)
from sglang.version import __version__

from .memory import Heads, Placement
from .settings import Engine, data_parallel_rank

__all__ = ["BaseKVBootstrapServer", "BaseKVManager", "BaseKVReceiver", "BaseKVSender", "KVTransferMetric", "Poll"]

VERSION: Final = str(__version__)
TESTED: Final = ("0.5.23",)
ANY_VERSION: Final = "PDPOOL_SGLANG_ANY_VERSION"

_UTILS: Final = "sglang.srt.disaggregation.utils"
_PREFILL: Final = "sglang.srt.disaggregation.prefill"
_DECODE: Final = "sglang.srt.disaggregation.decode"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_CHECKER: Final = "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"

HOOKS: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    f"{_PREFILL}.PrefillBootstrapQueue.create_sender": (
        "BEFORE",
        "create_sender",
        ("self", "req", "num_kv_heads"),
    ),
    f"{_PREFILL}.PrefillBootstrapQueue._init_kv_manager": ("BEFORE", "init_kv_manager", ("self",)),
    f"{_PREFILL}.maybe_release_metadata_buffer": (
        "AROUND",
        "maybe_release_metadata_buffer",
        ("req", "allocator"),
    ),
    f"{_DECODE}.DecodePreallocQueue._create_receiver_and_enqueue": (
        "BEFORE",
        "create_receiver_and_enqueue",
        ("self", "req", "is_rebootstrap"),
    ),
    f"{_DECODE}.DecodePreallocQueue._init_kv_manager": ("BEFORE", "init_kv_manager", ("self",)),
    f"{_DECODE}.DecodePreallocQueue.__init__": ("AFTER", "prealloc_queue_init", ()),
    f"{_DECODE}.DecodeTransferQueue.__init__": ("AFTER", "transfer_queue_init", ()),
    f"{_UTILS}.prepare_abort": ("AROUND", "prepare_abort", ("req", "error_message", "status_code")),
    "sglang.srt.mem_cache.common.release_kv_cache": (
        "AROUND",
        "release_kv_cache",
        ("req", "tree_cache", "checkpoint"),
    ),
    f"{_SCHEDULER}.ingest_requests": ("AFTER", "ingest_requests", ("self", "stop_at_pause")),
    f"{_SCHEDULER}.is_fully_idle": ("AROUND", "is_fully_idle", ("self", "for_health_check", "ignore_waiting")),
    f"{_SCHEDULER}.on_idle": ("AFTER", "on_idle", ("self",)),
    f"{_CHECKER}._requests_owning_rows": ("AFTER", "requests_owning_rows", ("self",)),
}
"""By dotted name: when the hook runs, its name in `hooks`, and the parameters that it relies on (none: all)."""

manager: Any = None
"""The manager of this process, once it is made."""


class SurfaceError(RuntimeError):
    """SGLang is not as the plugin knows it."""


class Poll:
    """SGLang's numbers for the status of a half."""

    FAILED: Final = int(KVPoll.Failed)
    BOOTSTRAPPING: Final = int(KVPoll.Bootstrapping)
    WAITING: Final = int(KVPoll.WaitingForInput)
    TRANSFERRING: Final = int(KVPoll.Transferring)
    SUCCESS: Final = int(KVPoll.Success)


# --- Checks ---


def check_version(environ: Mapping[str, str]) -> None:
    """Raise SurfaceError unless this version of SGLang was tested, or the environment allows any."""
    if VERSION not in TESTED and environ.get(ANY_VERSION) != "1":
        raise SurfaceError(
            f"SGLang {VERSION} was not tested with this plugin: install {' or '.join(TESTED)}, or set {ANY_VERSION}=1"
        )


def check_scheduler() -> None:
    """Raise SurfaceError unless all hooks are in place in this process, around functions that we know."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target, (_, _, expected) in HOOKS.items():
        if target not in HookRegistry._patched:
            raise SurfaceError(f"the hook around {target} is not in place; SGLang's log of the start says why")
        found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
        if expected and found != expected:
            raise SurfaceError(f"{target} takes {found}, must take {expected}")
    for module in (_PREFILL, _DECODE, "sglang.srt.managers.scheduler"):
        for target in ("sglang.srt.mem_cache.common.release_kv_cache", f"{_UTILS}.prepare_abort"):
            name = target.rpartition(".")[2]
            copied = getattr(sys.modules.get(module), name, None)
            if copied is not None and copied is not pkgutil.resolve_name(target):
                raise SurfaceError(f"{module}.{name} is not hooked: {module} was imported in another order")


# --- Registration ---


def add_backend(name: str, class_of: Callable[[str], Any]) -> None:
    """Add a transfer backend to SGLang's arguments, to its Enum, and to the function that finds its classes."""
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([name])
    backends = utils.TransferBackend
    if name not in backends._value2member_map_:
        member = object.__new__(backends)
        member._name_, member._value_ = name.upper(), name
        member.__objclass__, member._sort_order_ = backends, len(backends)
        backends._member_map_[member._name_] = member
        backends._value2member_map_[name] = member
        backends._member_names_.append(member._name_)

    def get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:  # noqa: ANN401
        own = class_of(class_type.value) if transfer_backend.value == name else None
        return own if own is not None else original(transfer_backend, class_type)

    HookRegistry.register(f"{_UTILS}.get_kv_class", get_kv_class, HookType.AROUND)


def add_hooks() -> None:
    """Hook functions of modules that this process has imported. Only a scheduler has all of them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wanted = {target: hook for target, hook in HOOKS.items() if _module_of(target) in sys.modules}
    if not wanted:
        return
    from . import hooks

    for target, (when, name, _) in wanted.items():
        HookRegistry.register(target, getattr(hooks, name), HookType[when])


def _module_of(target: str) -> str:
    parts = target.split(".")
    return ".".join(part for part in parts[:-1] if not part[:1].isupper())


# --- What hooks put aside for constructors that SGLang calls right after them ---

_aside: dict[str, Any] = {}


def put_aside(**given: Any) -> None:  # noqa: ANN401
    """Keep what the next constructor takes."""
    _aside.update(given)


def taken_request() -> Any:  # noqa: ANN401
    """The request that a sender or receiver is made for."""
    return _aside.pop("request")


def taken_recomputed() -> bool:
    """Whether prefill has to compute that request again."""
    return bool(_aside.pop("recomputed", False))


def taken_queue() -> Any:  # noqa: ANN401
    """The queue that makes its manager: it has the pools and the scheduler."""
    return _aside.pop("queue")


# --- Requests ---


def rid_of(request: Any) -> str:  # noqa: ANN401
    """SGLang's id of a request, as long as the connector takes it."""
    return str(request.rid)[:256]


def prompt_tokens(request: Any) -> Sequence[int]:  # noqa: ANN401
    """Tokens of the prompt, before images are put in."""
    tokens: Sequence[int] = request.origin_input_ids_unpadded
    return tokens


def recomputed_tokens(request: Any) -> Sequence[int]:  # noqa: ANN401
    """The prompt that prefill gets for a retracted request: the old one and the output so far."""
    tokens: Sequence[int] = request.build_rebootstrap_payload()["input_ids"]
    return tokens


def named_dp_rank(request: Any) -> int | None:  # noqa: ANN401
    """The data-parallel rank of prefill that the client or router names."""
    rank: int | None = request.disagg_prefill_dp_rank
    return rank


def set_answer(request: Any, status: int) -> None:  # noqa: ANN401
    """Note the HTTP status for the client of a failed request."""
    request.pdpool_answer = status


def answer_of(request: Any) -> HTTPStatus | None:  # noqa: ANN401
    """The status that was noted."""
    status: int | None = getattr(request, "pdpool_answer", None)
    return HTTPStatus(status) if status is not None else None


def detach_kv(request: Any) -> Any:  # noqa: ANN401
    """Take the pages from a request, so that SGLang finds it released; return an owner that stands for it."""
    owner = copy.copy(request)
    request.kv = type(request.kv)()
    request.lock = None
    return owner


# --- Scheduler ---


def agree(scheduler: Any, flags: list[int]) -> Sequence[int]:  # noqa: ANN401
    """The minimum of each flag over the ranks that share a scheduler's decisions."""
    import torch
    from sglang.srt.disaggregation.utils import all_reduce_flags

    for group in (scheduler.attn_tp_cpu_group, scheduler.attn_cp_cpu_group):
        flags = all_reduce_flags(flags=flags, group=group, op=torch.distributed.ReduceOp.MIN)
    return flags


def queues(scheduler: Any) -> Mapping[str, list[str]]:  # noqa: ANN401
    """Ids of the requests in each hand-off queue. A request that waits for prefill's address is in none yet."""
    if scheduler.disaggregation_mode.value == "prefill":
        return {
            "prefill_bootstrap": [one.rid for one in scheduler.disagg_prefill_bootstrap_queue.queue],
            "prefill_inflight": [one.rid for one in scheduler.disagg_prefill_inflight_queue],
        }
    prealloc, transfer = scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue
    return {
        "decode_prealloc": [one.req.rid for one in prealloc.queue if one.waiting_for_input],
        "decode_transfer": [one.req.rid for one in transfer.queue],
    }


def under_way(scheduler: Any) -> list[str]:  # noqa: ANN401
    """Ids of all requests that the scheduler has; also read from the thread of the drain."""
    found = [one for ids in queues(scheduler).values() for one in ids]
    found += [one.rid for one in scheduler.waiting_queue]
    if scheduler.disaggregation_mode.value == "prefill":
        return found
    prealloc = scheduler.disagg_decode_prealloc_queue
    found += [one.req.rid for one in prealloc.queue if not one.waiting_for_input]
    found += [one.rid for one in (*prealloc.retracted_queue, *prealloc.held_rebootstrap_reqs)]
    return found + [one.rid for one in scheduler.running_batch.reqs]


def running(scheduler: Any) -> int:  # noqa: ANN401
    """Number of requests under way."""
    return len(under_way(scheduler))


def is_paused(scheduler: Any) -> bool:  # noqa: ANN401
    """Whether `/pause_generation` stopped the scheduler's work. Its loop goes on."""
    return bool(scheduler._engine_paused)


def waits_for_holds_only(scheduler: Any) -> bool:  # noqa: ANN401
    """Whether a scheduler has nothing to do but to wait for proof."""
    decode = scheduler.disaggregation_mode.value == "decode"
    holds = scheduler.disagg_decode_transfer_queue.has_pending_deferred_releases() if decode else manager.holds
    return bool(holds) and scheduler.chunked_req is None and not running(scheduler)


# --- Arguments ---


def model_name() -> str:
    """The name under which the model is served, the same on both sides."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().served_model_name)


def device_of(server_args: Any, args: Any) -> int | None:  # noqa: ANN401
    """Index of the device that holds the cache; None for host memory."""
    return None if str(server_args.device) == "cpu" else int(args.gpu_id)


def leads_instance() -> bool:
    """Whether this is the rank that speaks for its instance over HTTP."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return not (parallel.attn_tp_rank or parallel.attn_cp_rank)


def heads_of(queue: Any, latent: bool, tp_size: int) -> tuple[Heads, Heads | None]:  # noqa: ANN401
    """Heads of the model's cache and of its draft model's.

    A draft model's heads count as divided over all ranks. Where they are replicated, only equal TP sizes fit.
    """
    pool, draft = _full(queue.token_to_kv_pool), queue.draft_token_to_kv_pool
    if latent:
        target = Heads(1, 1, latent=True, element_bytes=pool.store_dtype.itemsize)
    else:
        total = queue.scheduler.model_config.get_total_num_kv_heads()
        target = Heads(pool.head_num, max(total, pool.head_num), element_bytes=pool.store_dtype.itemsize)
    if draft is None:
        return target, None
    draft = _full(draft)
    if not hasattr(draft, "head_num"):
        return target, Heads(1, 1, latent=True, element_bytes=draft.store_dtype.itemsize)
    return target, Heads(draft.head_num, draft.head_num * tp_size, element_bytes=draft.store_dtype.itemsize)


def window_heads(queue: Any) -> int:  # noqa: ANN401
    """Heads held of a sliding-window pool with K and V; 0 without one."""
    return int(getattr(getattr(queue.token_to_kv_pool, "swa_kv_pool", None), "head_num", 0))


def _full(pool: Any) -> Any:  # noqa: ANN401
    """The pool of full attention within a hybrid one."""
    return getattr(pool, "full_kv_pool", pool)


def read_engine(mode: Any, queue: Any) -> Engine:  # noqa: ANN401
    """Read SGLang's published configuration."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving
    from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

    parallel, disagg, serving = get_parallel(), get_disagg(), get_serving()
    host = get_local_ip_auto()
    leader = NetworkAddress.parse(parallel.dist_init_addr).resolved().host if parallel.dist_init_addr else host
    place = Placement(
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
        cp_rank=parallel.attn_cp_rank,
        cp_size=parallel.attn_cp_size,
    )
    return Engine(
        role=mode.value,
        version=VERSION,
        host=host,
        leader_host=leader,
        http_port=serving.port,
        bootstrap_port=disagg.disaggregation_bootstrap_port,
        place=place,
        dp_rank=data_parallel_rank(parallel.dp_rank, parallel.dp_size, parallel.attn_dp_rank),
        dp_size=parallel.num_dp_ranks,
        replicas=parallel.dp_size,
        world_rank=parallel.tp_rank,
        world_size=parallel.tp_size,
        nodes=parallel.nnodes,
        deadline_s=float(
            max(envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(), envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        ),
        refusals=_refusals(mode.value, queue),
    )


def _refusals(role: str, queue: Any) -> Mapping[str, str]:  # noqa: ANN401
    """Settings with which this backend would be wrong, and what to do."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_parallel

    args, parallel = queue.scheduler.server_args, get_parallel()
    layout = getattr(_full(queue.token_to_kv_pool), "kv_cache_layout", "nhd")
    spread = role == "prefill" and parallel.num_dp_ranks > 1 and parallel.nnodes > 1
    found = {
        "--pp-size above 1": (parallel.pp_size > 1, "use tensor parallelism"),
        "--enable-memory-saver": (args.enable_memory_saver, "the memory must stay registered"),
        "--enable-unified-memory": (getattr(args, "enable_unified_memory", False), "pages move while they are kept"),
        "SGLANG_DISAGG_STAGING_BUFFER": (envs.SGLANG_DISAGG_STAGING_BUFFER.get(), "the connector has its own"),
        "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": (
            envs.SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK.get(),
            "rooms name the rank",
        ),
        f"KV cache layout {layout}": (layout != "nhd", "use an attention backend with layout nhd"),
        "data parallelism of prefill over several nodes": (spread, "start one server for each node"),
        "--enable-kv-cache-sharding": (parallel.enable_kv_cache_sharding, "no rank has whole pages"),
        "--enable-dsa-cache-layer-split": (parallel.enable_dsa_cache_layer_split, "no rank has all layers"),
        "CP and TP in one group": (parallel.enable_cp_tp_group_sharing, "use separate groups"),
        "--load-balance-method": (
            role == "prefill" and parallel.num_dp_ranks > 1 and parallel.load_balance_method != "follow_bootstrap_room",
            "set it to follow_bootstrap_room",
        ),
    }
    return {setting: remedy for setting, (is_set, remedy) in found.items() if is_set}


# --- HTTP ---


def post(url: str, payload: Mapping[str, Any], timeout_s: float) -> str:
    """Post JSON, and return what failed; "" for success. SGLang uses `requests` for the same."""
    try:
        response = requests.post(url, json=payload, timeout=timeout_s)
    except requests.RequestException as error:
        return f"{url}: {error}"
    return "" if response.status_code < 400 else f"{url} answered {response.status_code}: {response.text[:200]}"

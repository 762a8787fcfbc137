"""Runs in SGLang's environment: publishes a configuration for each rank of an engine and reads it as the plugin does.

Prints one JSON line for each rank.
"""

import json
import os
import sys
from types import SimpleNamespace

from pdpool_sglang import surface
from pdpool_sglang.settings import offset_port
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

ENGINES = [
    # tensor, data, with DP attention
    (1, 1, False),
    (4, 1, False),
    (2, 2, False),
    (2, 2, True),
    (4, 2, True),
    (4, 4, True),
    (8, 2, True),
]

REFUSED = [
    # arguments, environment, layout of the cache
    ({"pp_size": 2}, {}, "nhd"),
    ({"enable_memory_saver": True}, {}, "nhd"),
    ({"dp_size": 2, "load_balance_method": "round_robin"}, {}, "nhd"),
    ({"tp_size": 2, "dp_size": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:5000"}, {}, "nhd"),
    ({}, {"SGLANG_DISAGG_STAGING_BUFFER": "1"}, "nhd"),
    ({}, {"SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": "1"}, "nhd"),
    ({}, {}, "hnd"),
]


def show(tensor, data, attention, *, replica, rank, named="", more=None, layout="nhd"):
    """Print what the plugin reads in the process of one rank."""
    settings = {"tp_size": tensor, "dp_size": data, "load_balance_method": "follow_bootstrap_room"} | (more or {})
    args = ServerArgs(
        model_path=sys.argv[1],
        enable_dp_attention=attention,
        disaggregation_mode="prefill",
        device="cpu",
        **settings,
    )
    os.environ.pop("SGLANG_DP_RANK", None)
    if named:
        os.environ["SGLANG_DP_RANK"] = named
        replica = int(named)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=replica))
    pool = SimpleNamespace(kv_cache_layout=layout)
    queue = SimpleNamespace(token_to_kv_pool=pool, scheduler=SimpleNamespace(server_args=args))
    engine = surface.read_engine(SimpleNamespace(value="prefill"), queue)
    print(  # noqa: T201 - its parent reads it
        json.dumps(
            {
                "engine": [tensor, data, attention, named],
                "dp": [engine.dp_rank, engine.dp_size],
                "place": [engine.place.tp_rank, engine.place.tp_size],
                "pod": [engine.pod_rank, engine.pod_ranks],
                "registry": engine.bootstrap_port + engine.dp_rank,
                "control": int(offset_port("9100", engine.pod_rank)),
                "refused": sorted(engine.refusals),
            }
        )
    )


def in_process(*engine, **rank):
    """As in SGLang, each rank has a process: a configuration is published once."""
    sys.stdout.flush()
    if not (child := os.fork()):
        show(*engine, **rank)
        sys.stdout.flush()
        os._exit(0)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(status)


for tensor, data, attention in ENGINES:
    for replica in [None] if attention or data == 1 else range(data):
        for rank in range(tensor):
            in_process(tensor, data, attention, replica=replica, rank=rank)
in_process(1, 1, False, replica=None, rank=0, named="3")
for more, environment, layout in REFUSED:
    os.environ.update(environment)
    in_process(1, 1, False, replica=0, rank=0, more=more, layout=layout)
    for name in environment:
        del os.environ[name]

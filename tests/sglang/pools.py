"""Runs in SGLang's environment: makes pools by SGLang's classes, KVArgs by its functions, and describes them.

Prints one JSON line for each case: what SGLang has, and what the connector is given.
"""

import json
import sys
from types import SimpleNamespace

import torch
from pdpool_connector import StateCut
from pdpool_sglang import surface
from pdpool_sglang.memory import Placement, describe
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import (
    MetadataBuffers,
    build_kv_layer_ids,
    get_kv_transfer_buf_infos,
    is_mla_backend,
    setup_state_kv_args,
)
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs

PAGE, TOKENS = 16, 16 * 31
FORM = {"dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}


def kv_args(pool, draft=None):
    """What `_init_kv_manager` of both queues fills in."""
    args = KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = map(list, get_kv_transfer_buf_infos(pool))
    args.num_draft_entries = 0
    if draft is not None:
        more = draft.get_contiguous_buf_infos()
        args.num_draft_entries = len(more[0])
        for have, add in zip((args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens), more, strict=True):
            have += add
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool,
        draft_token_to_kv_pool=draft,
        num_draft_entries=args.num_draft_entries,
        num_hidden_layers=4,
    )
    args.page_size, args.kv_cache_dtype_str, args.gpu_id = pool.page_size, "bfloat16", 0
    buffers = MetadataBuffers(8, hidden_size=64, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=16)
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = buffers.get_buf_infos()
    setup_state_kv_args(args, pool, draft, 4)
    args.buffers = buffers  # keeps them alive
    return args


def show(name, pool, tensors, *, draft=None, heads=0, tp=1, rank=0):
    """Describe a pool, and print what its own tensors are."""
    args = kv_args(pool, draft)
    config = SimpleNamespace(get_total_num_kv_heads=lambda: heads)
    queue = SimpleNamespace(
        token_to_kv_pool=pool, draft_token_to_kv_pool=draft, scheduler=SimpleNamespace(model_config=config)
    )
    latent = is_mla_backend(pool)
    target, drafts = surface.heads_of(queue, latent, tp)
    place = Placement(tp_rank=rank, tp_size=tp)
    memory = describe(
        args,
        model="m",
        place=place,
        target=target,
        draft=drafts,
        window_heads=surface.window_heads(queue),
        device=surface.device_of(SimpleNamespace(device="cpu"), args),
    )
    print(  # noqa: T201 - its parent reads it
        json.dumps(
            {
                "name": name,
                "tensors": [[one.data_ptr(), one.nbytes] for one in tensors],
                "kv": [[one.address, one.nbytes] for one in memory.kv],
                "pages": memory.pages,
                "heads": [memory.kv_heads, memory.first_head, memory.total_heads],
                "head_dim": memory.head_dim,
                "layers": [[one.kv_heads, one.head_dim] for one in memory.heads],
                "aux": [memory.aux_rows, len(memory.aux)],
                "state": [
                    {
                        "name": one.name,
                        "regions": [[region.address, region.nbytes] for region in one.regions],
                        "cuts": [[cut.outer, *cut.groups] if isinstance(cut, StateCut) else None for cut in one.cuts],
                        "share": [one.rank, one.ranks],
                    }
                    for one in memory.state
                ],
            }
        )
    )


def mamba(tp):
    """A pool of GDN state, as a rank of `tp` has it."""
    shape = Mamba2StateShape(
        conv=[(64 // tp, 3)],
        temporal=(8 // tp, 8, 4),
        intermediate_size=64 // tp,
        conv_dim=64 // tp,
        ssm_state_size=4,
        num_heads=8 // tp,
        head_dim=8,
        state_size=4,
        conv_kernel=4,
        conv_shard_groups=[16, 16, 32],
    )
    kind = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return MambaPool(
        size=7,
        spec_state_size=0,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2], dtype=kind),
        mamba_layer_ids=[0, 2],
        device="cpu",
    )


def main():
    """Show every case."""
    publish(ServerArgs(model_path=sys.argv[1], device="cpu", attention_backend="torch_native"), role="scheduler")
    mha = MHATokenToKVPool(TOKENS, PAGE, head_num=2, head_dim=32, layer_num=3, **FORM)
    pairs = [one for pair in zip(mha.k_buffer, mha.v_buffer, strict=True) for one in pair]
    show("mha", mha, pairs, heads=4, tp=2, rank=1)
    draft = MHATokenToKVPool(TOKENS, PAGE, head_num=1, head_dim=64, layer_num=1, **FORM)
    show("draft", mha, [*pairs, draft.k_buffer[0], draft.v_buffer[0]], draft=draft, heads=2)
    mla = MLATokenToKVPool(TOKENS, PAGE, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=3, **FORM)
    show("mla", mla, mla.kv_buffer, tp=2, rank=1)
    more = MLATokenToKVPool(TOKENS, PAGE, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=1, **FORM)
    show("mla draft", mla, [*mla.kv_buffer, *more.kv_buffer], draft=more, tp=2, rank=0)
    window = SWAKVPool(
        TOKENS, TOKENS // 2, PAGE, torch.bfloat16, 2, 32, [0, 2], [1, 3], "cpu", enable_memory_saver=False
    )
    full = window.full_kv_pool
    show("window", window, [one for pair in zip(full.k_buffer, full.v_buffer, strict=True) for one in pair], heads=2)
    for tp in (1, 2):
        hybrid = HybridLinearKVPool(
            TOKENS, torch.bfloat16, PAGE, 2, 32, [1, 3], "cpu", mamba(tp), enable_memory_saver=False
        )
        full = hybrid.full_kv_pool
        tensors = [one for pair in zip(full.k_buffer, full.v_buffer, strict=True) for one in pair]
        show(f"mamba tp{tp}", hybrid, tensors, heads=2 * tp, tp=tp, rank=tp - 1)


if __name__ == "__main__":
    main()

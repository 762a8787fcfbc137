"""Stands in for SGLang's package of compiled kernels, so that SGLang runs on any CPU.

`environment.py` copies this folder into the engines' environment. One kernel is real; the others can be imported and
raise when called. `torch.ops.sgl_kernel.convert_weight_packed` must stay undefined: without it SGLang takes its native
operators instead of the kernels for AMX.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__all__ = ["assign_req_to_token_pool_cpu"]

_LIBRARY = torch.library.Library("sgl_kernel", "DEF")
_LIBRARY.define("init_cpu_threads_env(str cpu_ids) -> str")
_LIBRARY.define("initialize(int size, int rank) -> ()")
_LIBRARY.impl("init_cpu_threads_env", lambda cpu_ids: cpu_ids, "CompositeExplicitAutograd")
_LIBRARY.impl("initialize", lambda _size, _rank: None, "CompositeExplicitAutograd")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Copy the new slots of each request into its row.

    Args:
        req_pool_indices: Row of each request, (requests).
        req_to_token: Slots of all requests, (rows, pool_len); changed in place.
        start_offset: First column of each request, (requests).
        end_offset: Column behind the last of each request, (requests).
        out_cache_loc: New slots of all requests, one request behind the other.
        pool_len: Columns of `req_to_token`.
    """
    taken = 0
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    for row, start, end in zip(rows, starts, ends, strict=True):
        if end > pool_len:
            raise ValueError(f"end_offset is {end}, must be at most pool_len, {pool_len}")
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> NoReturn:  # noqa: ANN401 - takes the place of any kernel
        raise NotImplementedError(f"the kernel sgl_kernel.{name} has no stand-in for CPU")

    return absent

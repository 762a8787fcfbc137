"""Reads the place and shape of tensors of torch and of arrays of numpy, without importing torch.

A tensor is read by its attributes only: `data_ptr()`, `shape`, `element_size()`, `device`, `is_contiguous()`, `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .regions import LayoutError, Region

Tensor: TypeAlias = Any
"""A torch tensor, or anything with the same attributes, or a numpy array."""


class TensorPlace(NamedTuple):
    """Where a contiguous tensor lies. `device`: None for host memory. `dtype`: name of the element type."""

    field: str
    address: int
    shape: tuple[int, ...]
    element_bytes: int
    dtype: str
    device: int | None

    def rows(self, items: int | None = None) -> Region:
        """The region whose items are the rows of the first dimension, or `items` equal parts of the tensor.

        Raises LayoutError for a tensor without elements, and where the elements are no multiple of `items`.
        """
        elements = math.prod(self.shape)
        count = items if items is not None else (self.shape[0] if self.shape else 0)
        if elements < 1 or count < 1 or elements % count:
            raise LayoutError(f"{self.field} has shape {self.shape}, must hold {count or 'one or more'} equal items")
        return Region(self.address, elements // count * self.element_bytes, count, self.device)


def read_tensor(field: str, tensor: Tensor) -> TensorPlace:
    """The place of a tensor; `field` names it in errors.

    Raises:
        LayoutError: it is no tensor, or it is not contiguous.
    """
    if isinstance(tensor, np.ndarray):
        _refuse_strided(field, tensor.flags.c_contiguous, tensor.shape, tensor.strides)
        return TensorPlace(field, tensor.ctypes.data, tensor.shape, tensor.itemsize, tensor.dtype.name, None)
    try:
        address, shape = int(tensor.data_ptr()), tuple(int(size) for size in tensor.shape)
        element_bytes, contiguous = int(tensor.element_size()), bool(tensor.is_contiguous())
        kind, index = str(tensor.device.type), tensor.device.index
        dtype, strides = str(tensor.dtype).removeprefix("torch."), tensor.stride()
    except (AttributeError, TypeError) as error:
        raise LayoutError(f"{field} is a {type(tensor).__name__}, must be a tensor or a numpy array: {error}") from None
    _refuse_strided(field, contiguous, shape, tuple(strides))
    device = None if kind == "cpu" else int(index or 0)
    return TensorPlace(field, address, shape, element_bytes, dtype, device)


def _refuse_strided(field: str, contiguous: bool, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if not contiguous:
        raise LayoutError(
            f"{field} has shape {shape} and strides {strides}, must be contiguous: give the tensor in the order in "
            "which it lies in memory"
        )


def kv_split(k: Sequence[Tensor], v: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs (K, V) for each layer from lists of K and of V, as engines have them that keep [K0..Kn, V0..Vn].

    Raises LayoutError when the lists have different lengths.
    """
    if len(k) != len(v):
        raise LayoutError(f"k has {len(k)} tensors and v {len(v)}, must be one of each for every layer")
    return list(zip(k, v, strict=True))


class CacheTensors(NamedTuple):
    """What the tensors of a KV cache say about it."""

    regions: tuple[Region, ...]
    page_tokens: int
    heads: tuple[tuple[int, int], ...]
    """For each layer (heads, elements of a head)."""
    dtype: str


def read_cache(
    kv: Sequence[Tensor | tuple[Tensor, Tensor]], *, layout: str, kv_order: str, page_tokens: int | None
) -> CacheTensors:
    """The regions and the shape of a cache. See `KVMemory.from_tensors`. Raises LayoutError."""
    if not kv:
        raise LayoutError("kv is empty, must have one entry for each layer")
    regions: list[Region] = []
    heads: list[tuple[int, int]] = []
    seen: dict[str, set[Any]] = {"page_tokens": set(), "dtype": set()}
    for layer, entry in enumerate(kv):
        paired = isinstance(entry, tuple | list)
        if paired and (len(entry) != 2 or kv_order != "separate"):
            raise LayoutError(
                f"kv[{layer}] has {len(entry)} tensors, must be a pair (K, V) in separate order (it is {kv_order!r})"
            )
        places = [
            read_tensor(f"kv[{layer}]" + (f"[{part}]" if paired else ""), tensor)
            for part, tensor in enumerate(entry if paired else [entry])
        ]
        pages = [page for place in places for page in _pages_of(place, layout, kv_order, page_tokens, paired)]
        regions += [page.region for page in pages]
        heads.append((pages[0].heads, pages[0].head_dim))
        for page in pages:
            seen["page_tokens"].add(page.page_tokens)
            if page.heads != pages[0].heads:
                raise LayoutError(f"kv[{layer}] has K of {pages[0].heads} heads and V of {page.heads}, must be as many")
        seen["dtype"].update(place.dtype for place in places)
    for name, values in seen.items():
        if len(values) != 1:
            raise LayoutError(f"{name} of the kv tensors is {sorted(values)}, must be the same for all")
    return CacheTensors(tuple(regions), seen["page_tokens"].pop(), tuple(heads), seen["dtype"].pop())


class _Pages(NamedTuple):
    region: Region
    page_tokens: int
    heads: int
    head_dim: int


def _pages_of(place: TensorPlace, layout: str, kv_order: str, page_tokens: int | None, paired: bool) -> list[_Pages]:
    """The regions of one tensor: two where it is [2, pages, ...], otherwise one."""
    shape = place.shape
    if kv_order == "interleaved":
        if len(shape) != 5 or shape[1] != 2:
            raise LayoutError(f"{place.field} has shape {shape}, must be [pages, 2, ...] of 5 dimensions: interleaved")
        return [_page(place, shape[0], shape[2:], layout)]
    if kv_order == "packed":
        if len(shape) != 4:
            raise LayoutError(f"{place.field} has shape {shape}, must have 4 dimensions, K and V in the last: packed")
        return [_page(place, shape[0], shape[1:], layout)]
    if len(shape) == 5 and shape[0] == 2 and not paired:
        half = math.prod(shape[1:]) * place.element_bytes
        halves = (place._replace(address=place.address + part * half, shape=shape[1:]) for part in (0, 1))
        return [_page(one, shape[1], shape[2:], layout) for one in halves]
    if len(shape) == 4:
        return [_page(place, shape[0], shape[1:], layout)]
    if len(shape) == 3 and page_tokens is not None:
        if shape[0] % page_tokens or (layout == "HND" and page_tokens > 1):
            raise LayoutError(
                f"{place.field} has shape {shape}, must be [tokens, heads, head_dim] with whole pages of page_tokens = "
                f"{page_tokens} in layout 'NHD' (it is {layout!r})"
            )
        return [_page(place, shape[0] // page_tokens, (page_tokens, *shape[1:]), "NHD")]
    if len(shape) == 3 and not paired:
        return [_page(place, shape[0], (shape[1], 1, shape[2]), "NHD")]
    raise LayoutError(
        f"{place.field} has shape {shape}, must be [pages, page_tokens, heads, head_dim] ('HND': heads before tokens), "
        "[tokens, heads, head_dim] with page_tokens given, [2, pages, ...] for K and V in one tensor, or "
        "[pages, page_tokens, latent]"
    )


def _page(place: TensorPlace, pages: int, page: tuple[int, ...], layout: str) -> _Pages:
    tokens, heads = page[:2] if layout == "NHD" else (page[1], page[0])
    return _Pages(place.rows(pages), tokens, heads, page[2])

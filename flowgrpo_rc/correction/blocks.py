"""Cuts a batch into blocks of rows, runs the kernel over each, and joins what comes out.

On the host blocks fit a core's cache and are spread over as many threads as torch may use there.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.buffers import cached
from flowgrpo_rc.correction.kernel import Array, Kernel
from flowgrpo_rc.correction.layout import Layout
from flowgrpo_rc.correction.ops import Ops, ops_for

# Elements per block: on the host, what stays in a core's cache; on a device, what keeps it busy at bounded memory.
HOST_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 19
# Below it a second thread costs more than it brings.
THREADED = 1 << 20


def run_blocks(
    p: Float[Tensor, "B T"], q: Float[Tensor, "B T"], m: Shaped[Tensor, "B T"] | None, layout: Layout
) -> tuple[Tensor | None, Tensor, Float[Tensor, "figures B"]]:
    """The weights (None without importance sampling), `mask * keep`, and the table of every row's figures."""
    can_reject = layout.plan.can_reject
    ops = ops_for(p.device, layout.dtype)
    weights = None
    if layout.plan.importance is not None:
        weights = ops.new(p.shape)
    if can_reject:
        kept = p.new_empty(p.shape, dtype=torch.bool if m is None else m.dtype)
    elif m is None:
        kept = p.new_ones(p.shape, dtype=torch.bool)
    else:
        kept = m.detach().clone(memory_format=torch.contiguous_format)
    run = _on_host if ops.on_host else _on_device
    table = run(ops, layout, p, q, m, weights, kept if can_reject else None)
    if ops.on_host:
        return None if weights is None else torch.from_numpy(weights), kept, torch.from_numpy(table)
    return weights, kept, table


@torch.no_grad()
def _on_device(
    ops: Ops, layout: Layout, p: Tensor, q: Tensor, m: Tensor | None, weights: Array, kept: Tensor | None
) -> Array:
    rows, columns = p.shape
    step = max(1, DEVICE_BLOCK // columns)
    table = ops.new((layout.height, rows))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        kernel = Kernel(layout, part.stop - start, columns, masked=m is not None, ops=ops, device=p.device)
        kernel.run(p[part], q[part], *(x if x is None else x[part] for x in (m, weights, kept)))
        table[:, part] = kernel.table
    return table


def _on_host(
    ops: Ops, layout: Layout, p: Tensor, q: Tensor, m: Tensor | None, weights: Array, kept: Tensor | None
) -> Array:
    rows, columns = p.shape
    inputs = ops.array(p), ops.array(q)
    others = [None if m is None else ops.array(m), weights, kept]
    step = max(1, HOST_BLOCK // columns)
    if step >= rows:
        masked = m is not None and not np.logical_and.reduce(others[0], axis=None)
        kernel = _kernel(ops, layout, rows, columns, masked)
        with np.errstate(all="ignore"):
            kernel.run(*inputs, *others)
        return kernel.table
    table = ops.new((layout.height, rows))

    def run(starts: range) -> None:
        with np.errstate(all="ignore"):
            for start in starts:
                part = slice(start, min(start + step, rows))
                kernel = _kernel(ops, layout, part.stop - start, columns, m is not None)
                kernel.run(*(x[part] for x in inputs), *(x if x is None else x[part] for x in others))
                table[:, part] = kernel.table

    workers = min(torch.get_num_threads(), -(-rows // step)) if rows * columns >= THREADED else 1
    if workers == 1:
        run(range(0, rows, step))
    else:
        shares = [range(i * step, rows, workers * step) for i in range(workers)]
        list(_pool(os.getpid(), workers).map(run, shares))
    return table


def _kernel(ops: Ops, layout: Layout, rows: int, columns: int, masked: bool) -> Kernel:
    """The kernel for blocks of this size; kept, for its buffers, unless they are large."""

    def make() -> Kernel:
        return Kernel(layout, rows, columns, masked=masked, ops=ops, device=torch.device("cpu"))

    return cached((layout, rows, columns, masked), make) if rows * columns <= 2 * HOST_BLOCK else make()


@lru_cache(maxsize=1)
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Worker threads; a forked process has none of its parent's and makes its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix=f"rollout-correction-{process}")

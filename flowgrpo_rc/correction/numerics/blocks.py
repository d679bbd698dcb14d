"""Cuts a batch into blocks of rows, runs the pass over each, and joins what comes out.

In host memory the C extension does it, on as many threads as torch may use there; elsewhere, and where it is not
built, torch.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from flowgrpo_rc.correction.numerics import native
from flowgrpo_rc.correction.numerics.kernel import Kernel
from flowgrpo_rc.correction.numerics.layout import Layout

# Elements per block: on the host, what stays in a core's cache; on a device, what keeps it busy at bounded memory.
HOST_BLOCK, DEVICE_BLOCK = 1 << 17, 1 << 19
# Below it a second thread costs more than it brings.
THREADED = 1 << 17


def run_blocks(
    p: Float[Tensor, "B T"], q: Float[Tensor, "B T"], m: Shaped[Tensor, "B T"] | None, layout: Layout
) -> tuple[Tensor | None, Tensor, Float[Tensor, "figures B"]]:
    """The weights (None without importance sampling), `mask * keep`, and the table of every row's figures."""
    plan = layout.plan
    weights = None if plan.importance is None else p.new_empty(p.shape, dtype=layout.dtype)
    table = p.new_empty((layout.height, p.shape[0]), dtype=layout.dtype)
    if plan.can_reject:
        kept = p.new_empty(p.shape, dtype=torch.bool if m is None else m.dtype)
    elif m is None:
        kept = p.new_ones(p.shape, dtype=torch.bool)
    else:
        kept = m.detach().clone(memory_format=torch.contiguous_format)
    run = _natively if p.device.type == "cpu" and native.is_built() and native.knows(m) else _in_torch
    run(layout, p, q, m, weights, kept if plan.can_reject else None, table)
    return weights, kept, table


@torch.no_grad()
def _in_torch(
    layout: Layout, p: Tensor, q: Tensor, m: Tensor | None, weights: Tensor | None, kept: Tensor | None, table: Tensor
) -> None:
    rows, columns = p.shape
    step = max(1, (HOST_BLOCK if p.device.type == "cpu" else DEVICE_BLOCK) // columns)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        kernel = Kernel(layout, part.stop - start, columns, masked=m is not None, device=p.device)
        kernel.run(p[part], q[part], *(x if x is None else x[part] for x in (m, weights, kept)))
        table[:, part] = kernel.table


def _natively(
    layout: Layout, p: Tensor, q: Tensor, m: Tensor | None, weights: Tensor | None, kept: Tensor | None, table: Tensor
) -> None:
    for name, x in (("log_prob", p), ("rollout_log_prob", q), ("mask", m)):
        if x is not None and x.data_ptr() == 0:
            raise ValueError(f"{name} is a tensor without memory (fake, or all zeros unwritten); give one with data.")
    rows, columns = p.shape
    workers = min(torch.get_num_threads(), rows) if rows * columns >= THREADED else 1
    plain = all(native.is_plain(x, layout.dtype) for x in (p, q)) and (m is None or native.is_plain(m, m.dtype))
    if workers == 1 and plain:
        native.run_rows(layout, p, q, m, weights, kept, table)
        return
    # what has to be converted is so block by block: a second copy of everything would take its memory
    step = min(-(-rows // workers), rows if plain else max(1, HOST_BLOCK // columns))

    def run(start: int) -> None:
        part = slice(start, start + step)
        p_part, q_part = (native.plain(x[part], layout.dtype) for x in (p, q))
        mask = None if m is None else native.plain(m[part], m.dtype)
        weights_part, kept_part = (x if x is None else x[part] for x in (weights, kept))
        native.run_rows(layout, p_part, q_part, mask, weights_part, kept_part, table[:, part])

    def run_share(worker: int) -> None:
        for start in range(worker * step, rows, workers * step):
            run(start)

    others = [_pool(os.getpid(), torch.get_num_threads()).submit(run_share, worker) for worker in range(1, workers)]
    run_share(0)
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _pool(process: int, workers: int) -> ThreadPoolExecutor:
    """Worker threads, started as they are needed; a forked process has none of its parent's and makes its own."""
    return ThreadPoolExecutor(workers, thread_name_prefix=f"rollout-correction-{process}")

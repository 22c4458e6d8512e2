"""What is measured: the rows, their inputs and floors, and the clocks."""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from implementations import IMPLEMENTATIONS, Call, Inputs

MIX = (12000, 37, 512, 1, 2048, 777, 4096, 64, 129, 3000)
ROWS: dict[str, tuple[int, ...]] = {
    "1x32768": (32768,),
    "1x8192": (8192,),
    "1x2048": (2048,),
    "2x16384": (16384,) * 2,
    "4x8192": (8192,) * 4,
    "8x4096": (4096,) * 8,
    "8x1024": (1024,) * 8,
    "mix": MIX,
}
HEADS = ("2/8", "8/32", "16/64", "16/48")
DIM = 128
DEVICE = "cuda"


@dataclass(frozen=True)
class Row:
    """One measured shape: the name of its lengths, key heads and value heads."""

    name: str
    heads_k: int
    heads_v: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return ROWS[self.name]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def flop(self, backward: bool) -> float:
        return (491_520.0 if backward else 163_840.0) * self.tokens * self.heads_v

    def bytes(self, backward: bool) -> float:
        """Every tensor of the pass moved once. Forward: q, k, v, g, beta, o, a state in and out. Backward: q, k, v, g, beta, do and five
        gradients, the incoming state, its gradient and that of the outgoing one."""
        group = self.heads_v / self.heads_k
        per_token = 1024 / group + 784 if backward else 512 / group + 520
        states = (3 if backward else 2) * 4 * len(self.lengths) * self.heads_v * DIM * DIM
        return self.tokens * self.heads_v * per_token + states

    def floor_ms(self, peak: float, bandwidth: float, backward: bool) -> float:
        return max(self.flop(backward) / peak, self.bytes(backward) / bandwidth) * 1e3


def draw(row: Row) -> Inputs:
    """Unit q and k, mild gates with a quarter of the heads at 0, a state in and a state out. Equal lengths are a dense batch."""
    torch.manual_seed(0)
    packed = len(set(row.lengths)) > 1
    batch, tokens = (1, row.tokens) if packed else (len(row.lengths), row.lengths[0])

    def unit(heads: int) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.randn(batch, tokens, heads, DIM, device=DEVICE), dim=-1).bfloat16()

    g = torch.nn.functional.logsigmoid(torch.randn(batch, tokens, row.heads_v, device=DEVICE)) / 16
    g[..., ::4] = 0
    offsets = torch.tensor([0, *row.lengths], device=DEVICE).cumsum(0) if packed else None
    return {
        "q": unit(row.heads_k),
        "k": unit(row.heads_k),
        "v": torch.randn(batch, tokens, row.heads_v, DIM, device=DEVICE).bfloat16(),
        "g": g,
        "beta": torch.rand(batch, tokens, row.heads_v, device=DEVICE),
        "initial_state": torch.randn(len(row.lengths), row.heads_v, DIM, DIM, device=DEVICE),
        "cu_seqlens": offsets,
    }


def ceilings() -> tuple[float, float]:
    """FLOP/s of a dense bf16 product and bytes/s of a copy, on random data."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = time_events(lambda: a @ b, 20)
    x = torch.randn(1 << 30, device=DEVICE, dtype=torch.float32)
    y = torch.empty_like(x)
    copy = time_events(lambda: y.copy_(x), 20)
    return 2 * 8192**3 / product * 1e3, 2 * 4 * (1 << 30) / copy * 1e3


def time_events(call: Call, repeats: int) -> float:
    """Median milliseconds of a call between two events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def time_graph(call: Call, calls: int = 5, repeats: int = 9) -> float:
    """Median milliseconds of a call inside a replayed graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return time_events(graph.replay, repeats) / calls


def time_host(call: Call, calls: int = 50) -> float:
    """Microseconds of host time of a call, the device far behind."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def measure_forward(prepare: Callable[[Inputs], Call], row: Row) -> dict[str, float]:
    call = prepare(draw(row))
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    return {"first_call_s": first, "graph_ms": time_graph(call), "eager_ms": time_events(call, 15), "host_us": time_host(call)}


def measure_backward(prepare: Callable[[Inputs], Call], row: Row) -> dict[str, float]:
    """Gradients of every input from do and dht, eager: of the backward pass alone, of a forward and backward step, and its memory."""
    inputs = draw(row)
    leaves = [x.requires_grad_() for x in inputs.values() if x is not None and x.is_floating_point()]
    call = prepare(inputs)
    start = time.perf_counter()
    kept = [call()]
    incoming = [torch.randn_like(x) for x in kept[0]]

    def backward(results: Any) -> None:
        torch.autograd.grad(results, leaves, incoming, retain_graph=True)

    backward(kept[0])
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    alone = time_events(lambda: backward(kept[0]), 15)
    kept.clear()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step = time_events(lambda: backward(call()), 15)
    peak = torch.cuda.max_memory_allocated() - before
    return {"first_call_s": first, "eager_ms": alone, "step_ms": step, "step_mib": peak / 2**20}


def worker(name: str, rows: list[Row], backward: bool) -> None:
    """Measures one implementation and prints a JSON line a row."""
    implementation = IMPLEMENTATIONS[name]
    start = time.perf_counter()
    module = importlib.import_module(implementation.package)
    facts = {"impl": name, "version": getattr(module, "__version__", "unknown"), "pass": "backward" if backward else "forward"}
    imported = time.perf_counter() - start
    measure = measure_backward if backward else measure_forward
    for i, row in enumerate(rows):
        result: dict[str, Any] = {**facts, "row": row.name, "heads_k": row.heads_k, "heads_v": row.heads_v}
        if i == 0:
            result["import_s"] = imported
        try:
            result |= measure(implementation.prepare, row)
        except Exception as error:  # a library that refuses a shape is a result, not the end of the run
            result["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(json.dumps(result), flush=True)

"""Results as tables and plots."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from measure import Row
from rich.console import Console
from rich.table import Table

OURS = "flash_qla"
Results = list[dict[str, Any]]


def _by_row(results: Results) -> dict[tuple[str, Row], dict[str, Any]]:
    return {(r["impl"], Row(r["row"], r["heads_k"], r["heads_v"])): r for r in results}


def _names(results: Results) -> list[str]:
    return list(dict.fromkeys(r["impl"] for r in results))


def show(console: Console, rows: list[Row], results: Results, floors: dict[Row, float], backward: bool) -> None:
    """A line a row, a column a library, and how ours compares with the floor and with the best of the others."""
    key = "eager_ms" if backward else "graph_ms"
    found, names = _by_row(results), _names(results)
    peers = [name for name in names if name != OURS]
    what = "backward: eager ms (step ms, step MiB)" if backward else "forward: graph ms (eager ms, host us)"
    table = Table(title=f"{what}, bf16, K = V = 128")
    for name in ("H_k/H_v : sequences", *names, "floor ms", "ours / floor", "best other / ours"):
        table.add_column(name, justify="left" if name.startswith("H_k") else "right", no_wrap=name.startswith("H_k"))
    gains = []
    for row in rows:
        cells, times = [], {}
        for name in names:
            r = found.get((name, row), {"error": "not reached"})
            if "error" in r:
                cells.append(r["error"].split(":")[0])
                continue
            times[name] = r[key]
            extra = f"{r['step_ms']:.3f}, {r['step_mib']:.0f}" if backward else f"{r['eager_ms']:.3f}, {r['host_us']:.0f}"
            cells.append(f"{r[key]:.3f} ({extra})")
        ours, others = times.get(OURS), [times[p] for p in peers if p in times]
        gain = min(others) / ours if ours and others else None
        if gain:
            gains.append(gain)
        cells += [f"{floors[row]:.3f}", f"{ours / floors[row]:.1f}" if ours else "-", f"{gain:.2f}" if gain else "-"]
        table.add_row(f"{row.heads_k}/{row.heads_v} : {row.name}", *cells)
    console.print(table)
    if gains:
        console.print(f"best other / ours, geometric mean of {len(gains)} rows: {statistics.geometric_mean(gains):.2f}")


def show_cold_start(console: Console, results: Results) -> None:
    """What a process waits for: the import, its first call, and the slowest first call of a later shape."""
    table = Table(title="cold start, seconds (torch imported already)")
    for name in ("library", "version", "import", "first call", "slowest later shape"):
        table.add_column(name, justify="left" if name == "library" else "right")
    for name in _names(results):
        mine = [r for r in results if r["impl"] == name]
        first = [r["first_call_s"] for r in mine if "first_call_s" in r]
        imported = next((r["import_s"] for r in mine if "import_s" in r), None)
        table.add_row(
            name,
            mine[0]["version"],
            "-" if imported is None else f"{imported:.2f}",
            f"{first[0]:.3f}" if first else "-",
            f"{max(first[1:]):.3f}" if len(first) > 1 else "-",
        )
    console.print(table)


def plot(path: Path, rows: list[Row], results: Results, floors: dict[Row, float], backward: bool) -> None:
    """Bars of time by row and library, a panel a head count, with the floor as a mark."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    key = "eager_ms" if backward else "graph_ms"
    found, names = _by_row(results), _names(results)
    heads = list(dict.fromkeys((r.heads_k, r.heads_v) for r in rows))
    figure, axes = plt.subplots(len(heads), 1, figsize=(10, 2.6 * len(heads)), squeeze=False)
    for ax, (hk, hv) in zip(axes[:, 0], heads, strict=True):
        shown = [r for r in rows if (r.heads_k, r.heads_v) == (hk, hv)]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            values = [found.get((name, r), {}).get(key) or 0 for r in shown]
            ax.bar([x + i * width for x in range(len(shown))], values, width, label=name)
        middle = [x + 0.4 - width / 2 for x in range(len(shown))]
        ax.plot(middle, [floors[r] for r in shown], "k_", markersize=24, label="floor")
        ax.set_xticks(middle, [r.name for r in shown])
        ax.set_yscale("log")
        ax.set_ylabel(f"{hk}/{hv} heads, ms")
    axes[0, 0].legend(ncols=len(names) + 1)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

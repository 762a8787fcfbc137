"""Writes `docs/benchmarks/sglang.md` and its plots from the figures of `bench`."""

import os
import time
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np

from proof.engines.bench import CONCURRENCIES, LENGTHS, RATE_NEW_TOKENS, RATE_TOKENS, SAMPLES, STORM, Figures, ratio
from proof.engines.launch import Backend

mpl.use("svg")
import matplotlib.pyplot as plt

NAMES: Final[dict[Backend, str]] = {
    "pdpool": "pdpool",
    "nixl": "stock NIXL at its best",
    "nixl-shipped": "stock NIXL as shipped",
}
TARGETS: Final = {"ttft": 1.05, "rps": 1.0}
TEXT: Final = """# SGLang with pdpool and with its own NIXL backend

`make engines PART=bench` wrote this page on {date}, on {cores} cores without a GPU. Real SGLang
0.5.23 servers run on CPU. Each side has one core. The load of the machine at the end was {load}.

- *pdpool*: SGLang with `--disaggregation-transfer-backend pdpool`.
- *stock NIXL at its best*: SGLang's own backend. NIXL's progress thread, which takes a core, is
  replaced by one that runs each millisecond.
- *stock NIXL as shipped*: the same with NIXL's own progress thread.

The first two are up at the same time and are measured in turn. The third runs alone afterwards,
because its thread would slow the others. Figures are medians [10th .. 90th percentile]. Ratios are
pdpool divided by stock NIXL at its best.

{table}

TTFT is the time from both requests to decode's first token ({samples}). Requests per second are
for prompts of {rate} tokens with {new} new tokens, by how many are under way. The storm has {storm}
aborted requests among others; a client hangs if it has no answer after 60 s.

The ratio over all cases is {ttft:.3f} for TTFT (target: at most 1.05) and {rps:.3f} for requests
per second (target: at least 1.0). The idle CPU of pdpool is {idle:.1f} % of a core (target: below 2 %).

![Time to the first token](sglang_ttft.svg)
![Requests per second](sglang_rps.svg)
![Idle CPU](sglang_idle.svg)
"""


def write(folder: Path, figures: dict[str, dict[Backend, Figures]], ratios: dict[str, float]) -> None:
    """Write the page and the plots."""
    _plot(folder / "sglang_ttft.svg", figures, [(m, f"ttft {n}") for m in SAMPLES for n in LENGTHS], "ms", 1e3)
    _plot(folder / "sglang_rps.svg", figures, [("tiny", f"rps {n}") for n in CONCURRENCIES], "requests/s", 1.0)
    _plot(folder / "sglang_idle.svg", figures, [("tiny", "idle")], "% of a core", 1.0)
    text = TEXT.format(
        date=time.strftime("%Y-%m-%d", time.gmtime()),
        cores=os.cpu_count(),
        load=f"{os.getloadavg()[0]:.0f}",
        table="\n".join(table(figures)),
        samples=", ".join(f"{count} samples with {model}" for model, count in SAMPLES.items()),
        rate=RATE_TOKENS,
        new=RATE_NEW_TOKENS,
        storm=STORM,
        ttft=ratios["ttft_ratio"],
        rps=ratios["rps_ratio"],
        idle=ratios["idle_cpu"],
    )
    (folder / "sglang.md").write_text(text)


def table(figures: dict[str, dict[Backend, Figures]]) -> list[str]:
    """Return the lines of the table."""
    lines = [f"| figure | {' | '.join(NAMES.values())} | ratio |", "|---|" + "---|" * (len(NAMES) + 1)]

    def row(label: str, cells: list[str], last: str = "") -> None:
        lines.append(f"| {label} | {' | '.join(cells)} | {last} |")

    for model in SAMPLES:
        for length in LENGTHS:
            name = f"ttft {length}"
            cells = [_cell(figures[model][backend][name], 1e3) for backend in NAMES]
            row(f"TTFT, {model}, {length} tokens, ms", cells, f"{ratio(figures[model], name):.3f}")
    tiny = figures["tiny"]
    for concurrency in CONCURRENCIES:
        name = f"rps {concurrency}"
        cells = [_cell(tiny[backend][name]) for backend in NAMES]
        row(f"requests/s, {concurrency} at a time", cells, f"{ratio(tiny, name):.3f}")
    row("idle CPU of prefill, decode, % of a core", [_pair(tiny[b]["idle"]) for b in NAMES])
    for label, key in (
        ("storm: seconds", "seconds"),
        ("storm: clients that hang", "hung"),
        ("storm: wrong answers", "wrong"),
        ("storm: KV tokens in use at its end", "kept"),
        ("storm: counters not zero 5 s later", "leftovers"),
    ):
        row(label, [f"{tiny[backend]['storm'][key]:.4g}" for backend in NAMES])
    row("prefill killed: decode's clients know after, s", [f"{tiny[b]['kill']['known_s']:.3g}" for b in NAMES])
    row("prefill killed: decode has its pages after, s", [f"{tiny[b]['kill']['released_s']:.3g}" for b in NAMES])
    return lines


def _cell(values: list[float], factor: float = 1.0) -> str:
    low, middle, high = np.percentile(np.array(values) * factor, (10, 50, 90))
    return f"{middle:.3g} [{low:.3g} .. {high:.3g}]"


def _pair(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _plot(
    path: Path, figures: dict[str, dict[Backend, Figures]], cases: list[tuple[str, str]], unit: str, factor: float
) -> None:
    """Draw a bar of each backend for each case: medians, with the 10th and 90th percentile."""
    plt.rcParams["svg.hashsalt"] = path.stem
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    at: Any = np.arange(len(cases))
    for number, (backend, label) in enumerate(NAMES.items()):
        found = [np.array(figures[model][backend][name]) * factor for model, name in cases]
        low, middle, high = np.array([np.percentile(values, (10, 50, 90)) for values in found]).T
        bars = axes.bar(at + (number - 1) * 0.27, middle, 0.25, yerr=(middle - low, high - middle), label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=3)
    axes.set_xticks(at, [f"{model}, {name}" for model, name in cases])
    axes.set_ylabel(unit)
    if unit == "ms":
        axes.set_yscale("log")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)

"""Draws one simulated day: arrivals, lengths of queues, and verdicts."""

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from proof.queue_sim.faults import HOUR_S
from proof.queue_sim.run import Picture

COLOURS = {
    "Stuck": "#b2182b",
    "Failing": "#d6604d",
    "NothingFinishes": "#f4a582",
    "Blocked": "#e6a700",
    "Saturated": "#4393c3",
    "Leaked": "#b2abd2",
    "Unknown": "#999999",
    "Starting": "#cccccc",
    "Draining": "#cccccc",
}


def draw(picture: Picture, path: Path) -> None:
    """Write an SVG file."""
    hours = [at / HOUR_S for at, *_ in picture.moments]
    figure, (rate, lengths, verdicts) = plt.subplots(3, 1, figsize=(10, 7), sharex=True, layout="constrained")
    rate.plot(hours, [arrivals for _, arrivals, _, _ in picture.moments], color="#333333", linewidth=0.8)
    rate.set_ylabel("requests per s")
    for name in ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer"):
        waiting = [sum(n for key, n in reqs.items() if key.endswith(name)) for _, _, reqs, _ in picture.moments]
        lengths.plot(hours, waiting, label=name, linewidth=0.8)
    lengths.set_yscale("symlog")
    lengths.set_ylabel("requests in queues")
    lengths.legend(fontsize=7, ncols=4, loc="upper left")
    names = sorted({name for *_, said in picture.moments for name in said})
    for row, name in enumerate(names):
        for verdict, colour in COLOURS.items():
            at = [hour for hour, (*_, said) in zip(hours, picture.moments, strict=True) if said.get(name) == verdict]
            verdicts.plot(at, [row] * len(at), "|", color=colour, markersize=14)
    verdicts.set_yticks(range(len(names)), names)
    verdicts.set_xlabel("hour of the day")
    handles = [Line2D([], [], color=colour, linewidth=5, label=verdict) for verdict, colour in COLOURS.items()]
    verdicts.legend(handles=handles, fontsize=7, ncols=8, loc="upper center", bbox_to_anchor=(0.5, 1.25))
    figure.savefig(path, metadata={"Date": None})

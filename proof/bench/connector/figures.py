"""The figures, one function each: what is measured, beside what, and the target."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from .memory import Shape
from .pair import Both, Pair
from .process import MOONCAKE, NIXL
from .results import Results, Row, spread
from .scheduler import Job

PLANES = (NIXL, MOONCAKE)
LARGE = Shape(layers=16, item_bytes=32768, pages=1024)
"""1 MiB a page, 1 GiB in all."""
TINY = Shape(layers=2, item_bytes=4096, pages=4096)
"""16 KiB a page: what SGLang's tiny test model has (page size 16)."""
CHUNK_MIB = 16


def latencies(times: Both) -> list[float]:
    """Seconds until decode's scheduler sees DONE, from the moment that both sides have done their part.

    That is the later one of prefill's last send and decode's offer.
    """
    prefill, decode = times
    return [decode.done[room] - max(prefill.sent[room], decode.offered[room]) for room in decode.done]


def fastest(bare: Sequence[dict[str, float]]) -> str:
    """The pattern of the bare engine with the shortest median."""
    return min(bare[0], key=lambda pattern: float(np.median([times[pattern] for times in bare])))


def paced(pairs: Sequence[Pair], rounds: int) -> Iterator[Pair]:
    """Every pair in turn, round by round; one round more at the front, which warms up (see `Pair.warm`)."""
    for number in range(rounds + 1):
        for pair in pairs:
            pair.warm = number > 0
            yield pair


def big(results: Results, stack: ExitStack) -> None:
    """Throughput of large requests, of that of the bare engine with its best pattern."""
    pairs = [Pair(stack, plane, LARGE) for plane in PLANES]
    for mib, rounds in ((16, 15), (128, 7), (1024, 3)):
        for scattered in (False, True):
            job = Job(0, 1, 1, mib, scattered=scattered)
            ours: dict[str, list[float]] = defaultdict(list)
            bare: dict[str, list[dict[str, float]]] = defaultdict(list)
            for pair in paced(pairs, rounds):
                raw, (spent,) = pair.raw(job), latencies(pair.run(job))
                if pair.warm:
                    ours[pair.plane.name].append(spent)
                    bare[pair.plane.name].append(raw)
            for pair in pairs:
                pair.check(job)
                _add_big(results, pair, job, ours[pair.plane.name], bare[pair.plane.name])
    _fit(results)


def _add_big(results: Results, pair: Pair, job: Job, ours: list[float], bare: list[dict[str, float]]) -> None:
    name, layout = pair.plane.name, "scattered" if job.scattered else "contiguous"
    best = fastest(bare)
    ratios = [times[best] / spent for times, spent in zip(bare, ours, strict=True)]
    rate = job.pages * LARGE.page_bytes / float(np.median(ours)) / 1e9
    ratio = float(np.median(ratios))
    results.add(
        Row(
            "big",
            name,
            f"{job.pages} MiB {layout}, of raw ({best})",
            ratio,
            "",
            spread(ratios),
            ">= 0.95",
            ratio >= 0.95,
            f"{rate:.2f} GB/s",
        )
    )
    results.series.setdefault("big", []).append((name, layout, job.pages, ratio, rate))


def _fit(results: Results) -> None:
    """Straight lines through the times of a plane and a layout: what a request costs, and what each of its MiB does."""
    times: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for name, layout, mib, ratio, rate in results.series["big"]:
        spent = mib * LARGE.page_bytes / rate / 1e6
        times[name, layout].append((mib, spent, spent * ratio))
    for key, points in times.items():
        size, ours, bare = np.array(points).T
        # Relative errors are alike over all sizes, so each weighs by its inverse.
        lines = [np.polyfit(size, spent, 1, w=1 / spent) for spent in (ours, bare)]
        results.series.setdefault("fit", {})[key] = tuple(float(line[at]) for line in lines for at in (1, 0))


def tiny(results: Results, stack: ExitStack) -> None:
    """One page, nothing else under way: from the last send, or the offer if that is later, to DONE at decode."""
    pairs = [Pair(stack, plane, TINY) for plane in PLANES]
    job = Job(0, 200, 1, 1)
    ours: dict[str, list[float]] = defaultdict(list)
    bare: dict[str, list[dict[str, float]]] = defaultdict(list)
    for pair in pairs:
        pair.check_raw(Job(0, 1, 1, TINY.pages))  # more ranges than a batch has, and every page
    early = replace(job, offer_after_s=0.002)
    waiting: dict[str, list[float]] = defaultdict(list)
    for pair in paced(pairs, 4):
        raw = [pair.raw(job) for _ in range(50)]
        spent, later = latencies(pair.run(job)), latencies(pair.run(early))
        if pair.warm:
            ours[pair.plane.name] += spent
            waiting[pair.plane.name] += later
            bare[pair.plane.name] += raw
    for pair, target in zip(pairs, (0.25, 0.40), strict=True):
        pair.check(job)
        times = [spent * 1e3 for spent in ours[pair.plane.name]]
        p50 = float(np.median(times))
        name = pair.plane.name
        best = fastest(bare[name])
        note = f"raw ({best}) {np.median([raw[best] for raw in bare[name]]) * 1e3:.3f} ms"
        results.add(Row("tiny", name, "p50", p50, "ms", spread(times), f"<= {target} ms", p50 <= target, note))
        times = [spent * 1e3 for spent in waiting[name]]
        what = "p50, memory offered 2 ms after the open"
        results.add(Row("early", name, what, float(np.median(times)), "ms", spread(times)))
        results.series.setdefault("tiny", {})[name] = times


def rate(results: Results, stack: ExitStack) -> None:
    """Hand-offs a second with 64 of them under way; and the CPU that each costs, by thread."""
    pairs = [Pair(stack, plane, TINY) for plane in PLANES]
    rates: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for pair in paced(pairs, 3):
        job = Job(0, 4000 if pair.warm else 500, 64, 1)
        before = [side.call("threads") for side in (pair.prefill, pair.decodes[0])]
        prefill, decode = pair.run(job)
        after = [side.call("threads") for side in (pair.prefill, pair.decodes[0])]
        if pair.warm:
            rates[pair.plane.name].append(job.count / max(prefill.wall_s, decode.wall_s))
            costs[pair.plane.name].append((prefill.cpu_s / job.count * 1e6, decode.cpu_s / job.count * 1e6))
            results.series.setdefault("threads", {})[pair.plane.name] = {
                f"{role} {name}": (used - old.get(name, 0.0)) / job.count * 1e6
                for role, old, new in zip(("prefill", "decode"), before, after, strict=True)
                for name, used in new.items()
            }
    for pair, target in zip(pairs, (6500, 4000), strict=True):
        name = pair.plane.name
        p50 = float(np.median(rates[name]))
        results.series.setdefault("rate", {})[name] = rates[name], target
        cost = np.median(costs[name], axis=0)
        note = f"CPU of a hand-off: prefill {cost[0]:.0f} us, decode {cost[1]:.0f} us"
        results.add(
            Row("rate", name, "hand-offs/s", p50, "/s", spread(rates[name]), f">= {target}", p50 >= target, note)
        )


def concurrent(results: Results, stack: ExitStack) -> None:
    """Eight large requests at once, of eight one after the other and of the bare engine; and how fairly they end."""
    pairs = [Pair(stack, plane, LARGE) for plane in PLANES]
    eight, one = Job(0, 8, 8, 64), Job(0, 8, 1, 64)
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    bare: dict[str, list[dict[str, float]]] = defaultdict(list)
    for pair in paced(pairs, 5):
        raw = pair.raw(eight)
        together, apart = pair.run(eight), pair.run(one)
        if pair.warm:
            spent = latencies(together)
            wall = max(together[1].done.values()) - min(together[0].sent.values())
            alone = sum(latencies(apart))
            found[pair.plane.name].append((wall, alone / wall, max(spent) / min(spent)))
            bare[pair.plane.name].append(raw)
    for name, values in found.items():
        walls, *columns = list(zip(*values, strict=True))
        best = fastest(bare[name])
        ratios = [raw[best] / wall for raw, wall in zip(bare[name], walls, strict=True)]
        of_raw, of_one, unfair = (float(np.median(column)) for column in (ratios, *columns))
        what = f"8 at once, of raw ({best})"
        results.add(Row("concurrent", name, what, of_raw, "", spread(ratios), ">= 1.0", of_raw >= 1.0))
        results.add(Row("concurrent 1", name, "8 at once, of 1 by 1", of_one, "", spread(columns[0])))
        results.series.setdefault("concurrent", {})[name] = (ratios, *columns)
        results.add(Row("fairness", name, "slowest / fastest", unfair, "", spread(columns[1]), "<= 1.5", unfair <= 1.5))


def idle(results: Results, stack: ExitStack) -> None:
    """CPU of connectors that are paired and have nothing to do."""
    for plane in PLANES:
        pair = Pair(stack, plane, TINY)
        time.sleep(1.0)  # the snapshot and the logs of the pairing are over
        sides = (pair.prefill, pair.decodes[0])
        windows: list[list[float]] = []
        for _ in range(5):
            before = [side.call("cpu") for side in sides]
            time.sleep(3.0)
            after = [side.call("cpu") for side in sides]
            windows.append(
                [(cpu - old) / (wall - since) * 100 for (wall, cpu), (since, old) in zip(after, before, strict=True)]
            )
        shares = np.median(windows, axis=0)
        most = [max(window) for window in windows]
        share = float(np.median(most))
        note = f"prefill {shares[0]:.2f}%, decode {shares[1]:.2f}%"
        results.series.setdefault("idle", {})[plane.name] = most
        results.add(Row("idle", plane.name, "idle CPU", share, "% of a core", spread(most), "< 2 %", share < 2, note))


def aborts(results: Results, stack: ExitStack) -> None:
    """From decode's abort in the midst of a transfer to the moment when its pages may be given away."""
    for plane in PLANES:
        pair = Pair(stack, plane, LARGE)
        plain = Job(0, 1, 1, 256)
        pair.run(plain)
        (whole,) = latencies(pair.run(plain))
        bare = [pair.raw(Job(0, 1, 1, CHUNK_MIB)) for _ in range(9)]
        chunk = float(np.median([raw[fastest(bare)] for raw in bare])) * 1e3
        spent: list[float] = []
        for _ in range(12):
            _, decode = pair.run(Job(0, 8, 1, 256, abort_share=1.0, abort_within_s=whole))
            spent += [
                (decode.failed[room] - decode.aborted[room]) * 1e3 for room in decode.aborted if room in decode.failed
            ]
        p50, most = float(np.median(spent)), max(spent)
        note = f"{len(spent)} aborts in flight; a chunk of {CHUNK_MIB} MiB takes {chunk:.2f} ms"
        results.add(
            Row("abort p50", plane.name, "release p50", p50, "ms", spread(spent), "<= a chunk", p50 <= chunk, note)
        )
        results.add(Row("abort max", plane.name, "release max", most, "ms", "", "<= 100 ms", most <= 100))
        held = [_frozen_abort(pair) for _ in range(5)]
        p50 = float(np.median(held))
        what = "release after a frozen writer runs again"
        results.add(Row("abort frozen", pair.plane.name, what, p50, "ms", spread(held), "<= 100 ms", p50 <= 100))
        results.series.setdefault("abort", {})[plane.name] = spent


def _frozen_abort(pair: Pair) -> float:
    """The same in ms while the writer is frozen, from when it runs again: nothing is released before."""
    frozen_s = 0.5
    first = pair.rooms(1)
    pair.prefill.begin("open_idle", first, 1, 256)
    pair.decodes[0].call("open_idle", first, 1, 256, pair.address)
    pair.prefill.finish()
    pair.prefill.begin("send_idle")
    pair.prefill.signal(signal.SIGSTOP)
    pair.decodes[0].begin("end_idle", True)
    time.sleep(frozen_s)
    early = pair.decodes[0].answered
    pair.prefill.signal(signal.SIGCONT)
    resumed = time.monotonic()
    done = pair.decodes[0].finish()
    spent = (time.monotonic() - resumed) * 1e3
    assert done or not early, "pages were released while their writer was frozen"
    pair.prefill.finish()
    pair.prefill.call("end_idle", False)
    return spent


def goodput(results: Results, stack: ExitStack) -> None:
    """Useful bytes a second while a share of the requests is aborted and pages are short."""
    for plane in PLANES:
        pair = Pair(stack, plane, LARGE)
        shares = (0.0, 0.1, 0.3, 0.6)
        measured: dict[float, list[tuple[float, float, float, float]]] = defaultdict(list)
        took = 0.0
        for number in range(4):
            for share in shares:
                job = Job(0, 40, 4, 64, abort_share=share, abort_within_s=took)
                _, decode = pair.run(job)
                if not share:
                    took = float(np.median([decode.done[room] - decode.opened[room] for room in decode.done]))
                if number:
                    useful = len(decode.done) * job.pages * LARGE.page_bytes / decode.wall_s / 1e9
                    part = len(decode.done) / job.count
                    # Requests always wait for pages here, so what an aborted one holds delays the next in its place.
                    delay_ms = decode.held_page_s / job.pages / job.count * 1e3
                    measured[share].append((useful, part, decode.held_page_s / decode.wall_s, delay_ms))
        base = float(np.median([useful for useful, *_ in measured[0.0]]))
        for share in shares:
            useful, part, held, delay_ms = (float(value) for value in np.median(measured[share], axis=0))
            kept, all_kept = useful / base, [each[0] / base for each in measured[share]]
            note = (
                f"{part:.0%} of the requests were useful; {held:.1f} of 256 pages wait for release, "
                f"which delays a request's admission by {delay_ms:.1f} ms on average"
            )
            what = f"goodput with {share:.0%} aborted"
            results.add(
                Row(
                    "goodput",
                    plane.name,
                    what,
                    kept,
                    "of that at 0 %",
                    spread(all_kept),
                    f">= {part:.2f}",
                    kept >= part,
                    note,
                )
            )
            results.series.setdefault("goodput", {}).setdefault(plane.name, []).append((share, kept, part))
            results.series.setdefault("held", {}).setdefault(plane.name, []).append((share, held, delay_ms))


FIGURES: dict[str, Callable[[Results, ExitStack], None]] = {
    "big": big,
    "tiny": tiny,
    "rate": rate,
    "concurrent": concurrent,
    "idle": idle,
    "aborts": aborts,
    "goodput": goodput,
}

"""Pure parts of `make engines`: comparison, schedule, ratios, record and last line."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from proof.engines.bench import ratios
from proof.engines.client import HUNG, Reply
from proof.engines.environment import EnginesError, Environment
from proof.engines.faults import AUX_BYTES, held_too_little
from proof.engines.launch import PORTS, Launch, Ports, command, variables
from proof.engines.prompts import difference, identical, make
from proof.engines.record import Record, summary
from proof.engines.report import write
from proof.engines.servers import free_ports
from proof.engines.storm import WAYS, schedule

RIGHT = (((1, 2, 3), "length"),)
FIGURES = {
    "tiny": {
        "pdpool": {"ttft 18": [1.0, 2.0, 9.0], "rps 1": [30.0], "idle": [1.0, 1.5]},
        "nixl": {"ttft 18": [4.0], "rps 1": [10.0], "idle": [9.0, 9.0]},
    },
    "smollm2": {"pdpool": {"ttft 18": [8.0]}, "nixl": {"ttft 18": [4.0]}},
}
STEPS = {
    "tokens TP1": {"identical": 50, "asked": 50, "leftovers": 0},
    "tokens DP2": {"identical": 52, "asked": 52, "leftovers": 0},
    "aborts 0": {"aborts": 60, "hung": 0, "wrong": 0, "leftovers": 0},
    "faults prefill killed 0": {"faults": 1, "recovered": 1, "hung": 0, "wrong": 0, "leftovers": 0},
}


def answer(*samples: tuple[list[int], str], status: int = 200) -> Reply:
    body = [{"output_ids": ids, "meta_info": {"finish_reason": {"type": why}}} for ids, why in samples]
    return Reply(status, body[0] if len(body) == 1 else body, 0.0)


class TestComparison:
    def test_same_tokens_agree(self):
        assert difference(RIGHT, answer(([1, 2, 3], "length"))) is None

    @pytest.mark.parametrize(
        ("reply", "named"),
        [
            (answer(([1, 9, 3], "length")), "differ from 3 at token 1"),
            (answer(([1, 2], "length")), "2 tokens, which differ from 3 at token 2"),
            (answer(([1, 2, 3], "stop")), "'stop', must be 'length'"),
            (answer(([1, 2, 3], "length"), ([1, 2, 3], "length")), "2 samples, must be 1"),
            (answer(([1, 2, 3], "abort")), "status 200"),
            (Reply(502, "peer_lost", 0.0), "status 502: peer_lost"),
            (Reply(HUNG, None, 0.0), "status -1"),
        ],
    )
    def test_other_answers_are_named(self, reply, named):
        assert named in difference(RIGHT, reply)

    def test_counts_and_names_differences(self):
        prompts = make(2, seed=1)
        replies = [answer(([1, 2, 3], "length")), answer(([4], "length"))]
        same, lines = identical(prompts, [RIGHT, RIGHT], replies)
        assert same == 1
        assert prompts[1].kind in lines[0]


class TestPrompts:
    def test_seed_repeats_prompts(self):
        assert make(52, seed=3) == make(52, seed=3)
        assert make(52, seed=3) != make(52, seed=4)

    def test_every_kind_is_asked(self):
        kinds = Counter(prompt.kind for prompt in make(52, seed=0))
        assert kinds["repeated"] == 4
        assert {"16 tokens", "129 tokens", "1300 tokens", "n=2, 150 tokens", "list of three"} <= kinds.keys()


class TestSchedule:
    def test_every_way_occurs_as_often(self):
        ways = Counter(case.way for case in schedule(100, seed=5))
        assert ways.keys() == WAYS.keys()
        assert ways.pop("none") == 15
        assert set(ways.values()) == {10}

    def test_halves_are_aborted_where_sent(self):
        assert all(set(sides) <= set(sent) for sent, _, sides in WAYS.values())


class TestRatios:
    def test_ratio_is_geometric_mean_of_medians(self):
        found = ratios(FIGURES)
        assert found["ttft_ratio"] == pytest.approx(1.0)
        assert found["rps_ratio"] == pytest.approx(3.0)

    def test_idle_is_busier_side(self):
        assert ratios(FIGURES)["idle_cpu"] == 1.5


class TestHolds:
    @pytest.mark.parametrize(("used", "early"), [(2400, False), (2399, True), (0, True)])
    def test_fewer_tokens_than_held_is_early(self, used, early):
        assert held_too_little(used, 2, 2400 * 1024 + 2 * AUX_BYTES) is early

    def test_nothing_held_is_never_early(self):
        assert not held_too_little(0, 0, 0)


class TestPage:
    def test_page_has_a_row_for_each_figure(self, tmp_path: Path):
        storm = {"seconds": 2.5, "hung": 0, "wrong": 0, "kept": 32, "leftovers": 0}
        one = {**{f"ttft {length}": [0.02, 0.04] for length in (18, 168, 1200)}}
        whole = {**one, "idle": [1.0, 1.5], "storm": storm, "kill": {"known_s": 0.2, "released_s": 1.0}}
        whole |= {f"rps {concurrency}": [10.0] for concurrency in (1, 8, 32)}
        backends = ("pdpool", "nixl", "nixl-shipped")
        figures = {"tiny": dict.fromkeys(backends, whole), "smollm2": dict.fromkeys(backends, one)}
        write(tmp_path, figures, ratios(figures))
        text = (tmp_path / "sglang.md").read_text()
        assert "| TTFT, smollm2, 1200 tokens, ms | 30 [22 .. 38] | 30 [22 .. 38] | 30 [22 .. 38] | 1.000 |" in text
        assert "| storm: KV tokens in use at its end | 32 | 32 | 32 |  |" in text
        assert {path.name for path in tmp_path.glob("*.svg")} == {
            f"sglang_{kind}.svg" for kind in ("ttft", "rps", "idle")
        }


class TestLastLine:
    def test_sums_steps_and_names_parts_not_run(self):
        fine, line = summary(STEPS)
        assert fine
        assert line == (
            "engines ok: sglang_tokens=102/102 aborts=60 hung=0 leftovers=0 recovered=1/1 "
            "ttft_ratio=not_run rps_ratio=not_run idle_cpu=not_run"
        )

    @pytest.mark.parametrize(
        ("step", "key"),
        [
            ("tokens TP1", "asked"),
            ("aborts 0", "hung"),
            ("aborts 0", "wrong"),
            ("aborts 0", "leftovers"),
            ("faults prefill killed 0", "faults"),
        ],
    )
    def test_any_defect_fails(self, step, key):
        steps = {**STEPS, step: {**STEPS[step], key: STEPS[step][key] + 1}}
        fine, line = summary(steps)
        assert not fine
        assert line.startswith("engines failed: ")
        assert ("wrong=1" in line) is (key == "wrong")

    def test_no_steps_fail(self):
        assert summary({})[0] is False


class TestRecord:
    def run(self, record: Record, value: int) -> dict[str, int]:
        async def step() -> dict[str, int]:
            return {"value": value}

        return asyncio.run(record.step("one", step))

    def test_interrupted_run_continues(self, tmp_path: Path):
        self.run(Record(tmp_path / "r.json", "code"), 1)
        assert self.run(Record(tmp_path / "r.json", "code"), 2) == {"value": 1}

    @pytest.mark.parametrize(
        ("digest", "fresh", "finished"), [("new", False, False), ("code", True, False), ("code", False, True)]
    )
    def test_other_run_starts_again(self, tmp_path: Path, digest, fresh, finished):
        first = Record(tmp_path / "r.json", "code")
        self.run(first, 1)
        if finished:
            first.finish()
        assert self.run(Record(tmp_path / "r.json", digest, fresh=fresh), 2) == {"value": 2}


class TestLaunch:
    def test_ports_of_ranks_do_not_meet(self):
        ports = Ports(20_000)
        several = (ports.bootstrap, ports.control, ports.admin)
        used = [ports.http, *(first + rank for first in several for rank in range(4))]
        assert len(set(used)) == len(used)
        assert max(used) < ports.first + PORTS

    def test_shipped_stock_keeps_its_progress_thread(self):
        ports = Ports(20_000)
        assert variables(Launch("decode", "nixl"), ports, None)["PDPOOL_STOCK_NIXL"] == "best"
        assert "PDPOOL_STOCK_NIXL" not in variables(Launch("decode", "nixl-shipped"), ports, None)

    def test_stock_is_named_as_sglang_names_it(self, tmp_path: Path):
        words = command(Launch("prefill", "nixl-shipped", core=1), Ports(20_000), Environment(tmp_path))
        assert words[words.index("--disaggregation-transfer-backend") + 1] == "nixl"

    @pytest.mark.parametrize("ranks", [{"tensor": 2}, {"data": 2}])
    def test_each_rank_has_a_core(self, ranks):
        found = variables(Launch("prefill", "pdpool", **ranks), Ports(20_000), None)
        assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


def test_servers_that_start_beside_each_other_get_ports_of_their_own() -> None:
    starting = range(20_000, 32_000, 40)
    for _ in range(20):
        first = free_ports(starting)
        assert all(abs(first - other) >= PORTS for other in starting)
    with pytest.raises(EnginesError, match="no 16 successive TCP ports are free"):
        free_ports(range(20_000, 32_000, PORTS))

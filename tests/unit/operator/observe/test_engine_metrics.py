"""Stock SGLang's `/metrics`: what is read of it, and that everything else stays unknown."""

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdpool_operator.api.engine import EngineType
from pdpool_operator.api.names import ENGINE_HTTP_PORT, Role
from pdpool_operator.engines.metric_names import SGLANG
from pdpool_operator.observe.engine_metrics import KEPT_BYTES, LINE_BYTES, METRICS_BYTES, Sieve, joined, parse_metrics
from pdpool_operator.observe.http import CHUNK, Unanswered
from pdpool_operator.observe.samples import Counters, EngineSample
from pdpool_operator.observe.targets import Target

from tests.serving import pod_address
from tests.stock_sglang import Stock, StockServer
from tests.unit.operator.observe.test_sampler import http, reader  # noqa: F401 - a fixture

LABELS = 'engine_type="decode",model_name="m",moe_ep_rank="0",pp_rank="{pp}",tp_rank="{tp}"'


def sifted(text: str, part: int = CHUNK) -> bytes:
    sieve, body = Sieve(SGLANG.all()), text.encode()
    return b"".join(sieve(body[at : at + part]) for at in range(0, len(body), part))


def read(text: str, role: Role = Role.DECODE):
    return parse_metrics(sifted(text), SGLANG, role)


def line(metric: str, value: object, *, pp: int = 0, tp: int = 0, more: str = "") -> str:
    return f"sglang:{metric}{{{LABELS.format(pp=pp, tp=tp)}{more}}} {value}\n"


class TestReading:
    def test_decode_answer_gives_lengths_and_counters_of_own_role(self):
        (reading,) = read(Stock("decode", {"decode_prealloc": 4}, running=7, tokens=61440).metrics()).values()
        assert reading.lengths == {"decode_prealloc": 4, "decode_transfer": 0}
        assert (reading.running, reading.waiting) == (7, 0)
        assert reading.counters == Counters({"decode_prealloc": 206, "decode_transfer": 205}, 61440, 200)

    def test_prefill_answer_leaves_cached_tokens_out(self):
        (reading,) = read(Stock("prefill", {"prefill_bootstrap": 4}, tokens=181422).metrics(), Role.PREFILL).values()
        assert reading.lengths == {"prefill_bootstrap": 4, "prefill_inflight": 0}
        assert reading.counters == Counters({"prefill_bootstrap": 210, "prefill_inflight": 205}, 181422, 200)

    @pytest.mark.parametrize("part", [1, 7, 1000])
    def test_text_in_small_parts_reads_the_same(self, part):
        text = Stock("decode").metrics()
        assert sifted(text, part) == sifted(text)

    def test_first_pipeline_and_tensor_rank_stands_for_a_data_rank(self):
        gauge = "num_decode_transfer_queue_reqs"
        text = line(gauge, 9, pp=1) + line(gauge, 3, tp=4, more=',dp_rank="1"') + line(gauge, 2)
        assert {rank: one.lengths for rank, one in read(text).items()} == {
            0: {"decode_transfer": 2},
            1: {"decode_transfer": 3},
        }

    def test_queue_of_one_priority_is_not_added_to_the_total(self):
        gauge = "num_decode_transfer_queue_reqs"
        text = line(gauge, 5, more=',priority=""') + line(gauge, 5, more=',priority="3"')
        assert read(text)[0].lengths == {"decode_transfer": 5}

    @pytest.mark.parametrize(
        ("metric", "role", "queue"),
        [
            ("num_prefill_prealloc_queue_reqs", Role.PREFILL, "prefill_bootstrap"),
            ("num_prefill_infight_queue_reqs", Role.PREFILL, "prefill_inflight"),
        ],
    )
    def test_names_of_earlier_versions_are_read(self, metric, role, queue):
        text = f'sglang:{metric}{{engine_type="unified",model_name="m"}} 6.0\n'
        assert read(text, role)[0].lengths == {queue: 6}

    def test_newest_name_goes_before_an_alias(self):
        text = line("num_prefill_prealloc_queue_reqs", 6) + line("num_prefill_bootstrap_queue_reqs", 2)
        assert read(text, Role.PREFILL)[0].lengths == {"prefill_bootstrap": 2}

    def test_transfers_count_where_stages_are_not_exported(self):
        text = line("kv_transfer_latency_ms_count", 31) + line("num_running_reqs", 0)
        assert read(text, Role.PREFILL)[0].counters.moved == {"prefill_inflight": 31}


class TestUnknown:
    def test_series_that_are_absent_are_unknown_and_not_zero(self):
        stock = Stock("decode", left={"decode_prealloc": None}, running=None, tokens=None, finished=None)
        (reading,) = read(stock.metrics()).values()
        assert reading.counters == Counters({"decode_transfer": 205})
        assert reading.running is None

    @pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "2.5"])
    def test_absurd_value_is_unknown(self, value):
        stock = Stock("decode", {"decode_prealloc": value}, {"decode_prealloc": value}, running=value, tokens=value)
        (reading,) = read(stock.metrics()).values()
        assert reading.lengths == {"decode_transfer": 0}
        assert reading.counters == Counters({"decode_transfer": 205}, finished=200)
        assert reading.running is None

    @pytest.mark.parametrize(
        "text",
        [
            pytest.param("", id="empty"),
            pytest.param("<html>not found</html>\n", id="a page"),
            pytest.param("vllm:num_requests_running 3\n", id="another engine"),
            pytest.param(line("num_requests_total", 3), id="no rank"),
            pytest.param(line("num_running_reqs", "many"), id="no number"),
            pytest.param("sglang:num_running_reqs{tp_rank=0} 1\n", id="no quotes"),
            pytest.param('sglang:num_running_reqs{tp_rank="0"\n', id="no end"),
            pytest.param(line("num_running_reqs", 1, tp=12345), id="absurd rank"),
            pytest.param(line("num_running_reqs", 1, more=',dp_rank="x"'), id="rank that is no number"),
            pytest.param("".join(line("num_running_reqs", 1, more=f',dp_rank="{n}"') for n in range(257)), id="ranks"),
        ],
    )
    def test_text_without_a_reading_is_refused(self, text):
        with pytest.raises(Unanswered, match=r"^invalid: "):
            read(text)

    def test_line_without_an_end_is_not_read(self):
        text = line("num_running_reqs", 1) + line("num_decode_transfer_queue_reqs", 123)[:-3]
        assert read(text)[0].lengths == {}

    def test_long_line_is_refused(self):
        with pytest.raises(Unanswered, match=f"a line of more than {LINE_BYTES} bytes"):
            sifted("x" * (LINE_BYTES + CHUNK + 1))

    def test_too_many_queue_metrics_are_refused(self):
        with pytest.raises(Unanswered, match="bytes of queue metrics"):
            sifted(line("num_running_reqs", 1) * (KEPT_BYTES // 80))

    @given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
    def test_no_text_raises_anything_else(self, noise):
        body = b"sglang:num_running_reqs{" + noise + b"\nsglang:num_queue_reqs " + noise + b"\n"
        with contextlib.suppress(Unanswered):
            parse_metrics(Sieve(SGLANG.all())(body), SGLANG, Role.DECODE)


class TestSources:
    def test_scheduler_goes_before_gauges_and_counters_are_added(self):
        loads = {0: EngineSample(1, 0, {"decode_transfer": 2})}
        (sample,) = joined(loads, read(Stock("decode", {"decode_transfer": 9}).metrics()), SGLANG).values()
        assert (sample.running, sample.queues, sample.lag_s) == (1, {"decode_transfer": 2}, 0.0)
        assert sample.counters.moved["decode_transfer"] == 205

    def test_gauges_stand_in_with_their_age(self):
        (sample,) = joined({}, read(Stock("decode", {"decode_transfer": 9}).metrics()), SGLANG).values()
        assert (sample.queues["decode_transfer"], sample.lag_s) == (9, 30.0)

    def test_gauges_without_running_requests_are_no_sample(self):
        assert joined({}, read(Stock("decode", running=None).metrics()), SGLANG) == {}


@pytest.fixture
async def pod() -> Iterator[tuple[StockServer, Target]]:
    ip = pod_address()
    server = await StockServer(Stock("decode", {"decode_transfer": 2}, running=1)).start(ip, ENGINE_HTTP_PORT)
    kind = EngineType.SGLANG
    target = Target("llm", "service/x", Role.DECODE, 0, "u1", ip, kind, has_connector=False, asks_metrics=True)
    yield server, target
    await server.stop()


class TestSampling:
    async def test_both_reports_of_a_stock_engine_are_read(self, http, pod):  # noqa: F811
        answers = set()
        (sample,) = await reader(http, on_answer=lambda _, *answer: answers.add(answer)).sample(pod[1])
        assert (sample.queues["decode_transfer"].reqs, sample.queues["decode_transfer"].moved_total) == (2, 205)
        assert (sample.engine.lag_s, sample.engine_error, sample.metrics_error) == (0.0, "", "")
        assert answers == {("engine", "ok"), ("metrics", "ok")}

    async def test_metrics_that_are_off_are_named(self, http, pod):  # noqa: F811
        pod[0].missing = ("/metrics",)
        (sample,) = await reader(http).sample(pod[1])
        assert (sample.queues["decode_transfer"].reqs, sample.queues["decode_transfer"].moved_total) == (2, None)
        assert (sample.engine_error, sample.metrics_error) == ("", "http 404")

    async def test_metrics_stand_in_for_a_missing_report(self, http, pod):  # noqa: F811
        pod[0].missing = ("/v1/loads",)
        (sample,) = await reader(http).sample(pod[1])
        assert (sample.engine.running, sample.queues["decode_transfer"].reqs, sample.engine.lag_s) == (1, 2, 30.0)
        assert sample.engine_error == ""

    async def test_engine_with_neither_is_unknown_with_both_reasons(self, http, pod):  # noqa: F811
        pod[0].missing = ("/v1/loads", "/metrics")
        (sample,) = await reader(http).sample(pod[1])
        assert (sample.engine, sample.engine_error, sample.metrics_error) == (None, "http 404", "http 404")

    async def test_answer_beyond_the_limit_is_refused(self, http, pod):  # noqa: F811
        text = "# a comment\n" * (METRICS_BYTES // 12 + 1)
        pod[0].stock.metrics = lambda: text  # type: ignore[method-assign]
        (sample,) = await reader(http).sample(pod[1])
        assert sample.metrics_error == f"invalid: more than {METRICS_BYTES} bytes"

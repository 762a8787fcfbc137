"""SGLang's queues in the connector's statistics."""

from pdpool_sglang.queues import SAMPLE_S, QueueSampler


class Shown:
    def __init__(self):
        self.rows = {}

    def set_queue(self, name, reqs, oldest_s, moved_total):
        self.rows[name] = (reqs, oldest_s, moved_total)


class TestSampler:
    def setup_method(self):
        self.now, self.shown = 100.0, Shown()
        self.sampler = QueueSampler(self.shown, lambda: self.now)

    def test_oldest_keeps_its_age(self):
        self.sampler.sample({"waiting": ["a"]}, "a")
        self.now += 3
        self.sampler.sample({"waiting": ["a", "b"]}, "ab")
        assert self.shown.rows["waiting"] == (2, 3.0, 0)

    def test_requests_elsewhere_went_on_and_missing_ones_ended(self):
        self.sampler.sample({"waiting": ["a", "b", "c"]}, "abc")
        self.sampler.sample({"waiting": ["b"], "next": ["a"]}, "ab")
        assert self.shown.rows["waiting"] == (1, 0.0, 1)
        self.sampler.sample({"waiting": [], "next": ["a"]}, "a")
        assert self.shown.rows["waiting"] == (0, None, 1)

    def test_samples_are_rare(self):
        assert self.sampler.is_due()
        self.sampler.sample({}, ())
        assert not self.sampler.is_due()
        self.now += SAMPLE_S
        assert self.sampler.is_due()

"""One engine's core, turned by hand, with a connector whose statuses the test sets."""

from types import SimpleNamespace

from pdpool_connector import Cause, Phase, TransferStatus
from pdpool_reference import tokenizer as tokenizers
from pdpool_reference import weights
from pdpool_reference.disaggregation import PrefillSide
from pdpool_reference.kv import PageAllocator, PagedKV
from pdpool_reference.metrics import Counters
from pdpool_reference.model import Model
from pdpool_reference.request import GenerationRequest, SamplingParams
from pdpool_reference.scheduler_batch import admit, compute
from pdpool_reference.scheduler_core import Core, Limits
from pdpool_reference.scheduler_queues import State
from prometheus_client import CollectorRegistry

TOKENIZER = tokenizers.load("tiny")
WAITING, READY = TransferStatus(Phase.WAITING), TransferStatus(Phase.READY)
DONE = TransferStatus(Phase.DONE, releasable=True)


class ScriptedTransfer:
    """A transfer that records its calls; the test sets its status."""

    def __init__(self):
        self.status, self.aborts = WAITING, []

    def abort(self, message, cause=Cause.ABORTED):
        self.aborts.append((message, cause))


class ScriptedPrefill(ScriptedTransfer):
    def __init__(self):
        super().__init__()
        self.sends = []

    def send(self, pages, *, start, last, aux_slot=None):
        self.sends.append((start, list(pages), last, aux_slot))


class ScriptedDecode(ScriptedTransfer):
    def __init__(self):
        super().__init__()
        self.pages, self.aux_slot = None, None

    def offer(self, pages, *, aux_slot):
        assert self.pages is None, "memory is offered once"
        self.pages, self.aux_slot = list(pages), aux_slot


class Scripted:
    """A connector of either side."""

    def __init__(self):
        self.transfers, self.queues = [], {}

    def set_queue(self, name, reqs, oldest_s, moved_total):
        self.queues[name] = (reqs, oldest_s, moved_total)

    def beat(self):
        pass


class Bench:
    def __init__(self, side, pages=64, **limits):
        config, loaded = weights.tiny()
        self.kv = PagedKV(config, pages)
        self.model = Model(config, loaded, self.kv)
        self.connector = Scripted()
        self._transfer = ScriptedPrefill if side is PrefillSide else ScriptedDecode
        self.pages, self.aux = PageAllocator(pages), PageAllocator(4)
        self.registry = CollectorRegistry()
        self.now = 1000.0
        self.core = Core(
            pages=self.pages,
            aux=self.aux,
            detokenizer=TOKENIZER.stream,
            eos_ids=frozenset(config.eos_ids),
            limits=Limits(**limits),
            counters=Counters(self.registry, "tiny", "x"),
            on_end=lambda _request: None,
            side=lambda core: side(core, self.connector, self.kv),
        )

    def ask(self, tokens, max_new_tokens=1):
        outputs = []
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        self.connector.transfers.append(transfer := self._transfer())
        request = GenerationRequest("rid", tuple(range(tokens)), sampling, outputs.append, transfer, self.now + 100)
        self.core.submit(request, self.now)
        return SimpleNamespace(request=request, outputs=outputs)

    def turn(self):
        self.core.advance(self.now)
        admit(self.core, self.now)
        worked = compute(self.core, self.model, self.now)
        self.core.side.beat(self.now)
        return worked

    def counts(self):
        return {state: self.core.queues.count(state) for state in State if self.core.queues.count(state)}

    def metric(self, name):
        return self.registry.get_sample_value(f"sglang:{name}", dict(zip(LABELS, LABEL_VALUES, strict=True)))


LABELS = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
LABEL_VALUES = ("tiny", "x", "0", "0", "0")


def failed(cause, *, releasable):
    return TransferStatus(Phase.FAILED, cause, "because", releasable=releasable)

"""Runs in SGLang's environment: our sender and receiver, as SGLang's scheduler calls them, over real connectors.

Prints one JSON line for each fact. The cache is host memory; with a GPU the same calls are made.
"""

import json
import time
from types import SimpleNamespace

import numpy as np
from pdpool_connector import ConnectorConfig, DecodeConnector, HostArena, PrefillConnector
from pdpool_sglang import surface
from pdpool_sglang.half import HandoffFailed
from pdpool_sglang.memory import Heads, Placement, describe
from pdpool_sglang.receiver import Receiver
from pdpool_sglang.sender import Sender
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll

PAGES, PAGE, HEADS, DIM, LAYERS = 32, 4, 2, 8, 2
LIMIT_S = 20.0


class Side:
    """Cache and manager of one side."""

    def __init__(self):
        shape = (2 * LAYERS, PAGES, PAGE, HEADS, DIM)
        cells = int(np.prod(shape))
        self.arena = HostArena(4 * cells + 8 * 64)
        self.cache = self.arena.array(0, shape, np.float32)
        self.aux = self.arena.array(4 * cells, (8, 16), np.uint32)
        self.args = KVArgs()
        self.args.kv_data_ptrs = [one.ctypes.data for one in self.cache]
        self.args.kv_data_lens = [one.nbytes for one in self.cache]
        self.args.kv_item_lens = [one[0].nbytes for one in self.cache]
        self.args.aux_data_ptrs, self.args.aux_data_lens = [self.aux.ctypes.data], [self.aux.nbytes]
        self.args.aux_item_lens, self.args.state_types = [self.aux[0].nbytes], []
        self.args.page_size, self.args.kv_cache_dtype_str = PAGE, "float32"
        place, heads = Placement(), Heads(HEADS, HEADS, element_bytes=4)
        self.memory = describe(self.args, model="m", place=place, target=heads)
        self.held = []

    def manager(self, connector):
        """What sender and receiver need of a manager."""
        return SimpleNamespace(
            connector=connector,
            kv_args=self.args,
            dp_rank=0,
            dp_size=1,
            dp_rank_of=lambda *_: 0,
            hold=self.held.append,
            unhold=lambda one: self.held.remove(one) if one in self.held else None,
        )


def request(tokens):
    """A request of SGLang's, as far as the plugin reads it."""
    return SimpleNamespace(rid="r", origin_input_ids_unpadded=tokens, disagg_prefill_dp_rank=None)


def until(condition):
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.002)


def say(name, **facts):
    """Report."""
    print(json.dumps({"name": name, **facts}), flush=True)  # noqa: T201 - its parent reads it


def halves(senders, receivers, address, room, tokens):
    """Both halves of one request."""
    surface.put_aside(request=request(tokens), recomputed=False)
    receiver = Receiver(receivers, address, room)
    surface.put_aside(request=request(tokens))
    return Sender(senders, address, room), receiver


def chunks(prefill, decode, senders, receivers, address):
    """A prefix at decode, an event of the overlap schedule, two chunks and the aux row."""
    sender, receiver = halves(senders, receivers, address, 7, list(range(24)))
    before = [sender.poll(), receiver.poll()]
    receiver.init(0)
    receiver.send_metadata(np.array([9, 3, 5], np.int32), 2, [], decode_prefix_len=3 * PAGE)
    until(lambda: sender.poll() == KVPoll.WaitingForInput)
    prefix = sender.pop_decode_prefix_len()
    sender.init(3, 1)
    event = SimpleNamespace(query=lambda: event.happened, happened=False)
    sender._early_send_wait_event = event
    prefill.cache[:, 20:23], prefill.aux[1], decode.cache[:] = 5.0, 42, 0.0
    sender.send(np.array([20, 21], np.int32), None, num_kv_tokens=8)
    sender.send(np.array([22], np.int32), [], num_kv_tokens=4)
    time.sleep(0.2)
    early = [bool(decode.cache.any()), sender.poll() == KVPoll.Success]
    event.happened = True
    until(lambda: sender.poll() == KVPoll.Success and receiver.poll() == KVPoll.Success)
    say(
        "chunks",
        before=before,
        prefix=prefix,
        early=early,
        landed=bool((decode.cache[:, [9, 3, 5]] == 5.0).all()),
        others=bool(decode.cache[:, [0, 1, 2, 4, 20, 21, 22]].any()),
        aux=int(decode.aux[2, 0]),
        bytes=sender.get_transfer_metric().transfer_total_bytes,
        hold=sender.must_hold,
    )
    sender.clear()
    receiver.clear()


def aborts(decode, senders, receivers, address):
    """Prefill's client leaves; decode receives the reason, and its pages count as kept until they are safe."""
    sender, receiver = halves(senders, receivers, address, 8, [1, 2, 3, 4])
    receiver.init(0)
    receiver.send_metadata(np.array([9], np.int32), 2, [], decode_prefix_len=0)
    until(lambda: sender.poll() == KVPoll.WaitingForInput)
    sender.init(1, 1)
    sender.abort()
    until(lambda: sender.poll() == KVPoll.Failed and receiver.poll() == KVPoll.Failed)
    answers = []
    for half in (sender, receiver):
        try:
            half.failure_exception()
        except HandoffFailed as error:
            answers.append([error.status, error.is_from_another_rank])
    receiver.ensure_abort_notified(force_arm=True)
    held = len(decode.held)
    until(lambda: receiver.half.status.releasable and sender.releasable)
    receiver.clear()
    say("abort", answers=answers, held=held, after=len(decode.held), hold=sender.must_hold)


def refusals(senders, receivers, address):
    """Room 0, a list of rooms, and an address that is none."""
    strange = [half for room in (0, [7, 8]) for half in halves(senders, receivers, address, room, [1])]
    rooms = [half.poll() for half in strange]
    for half in strange:
        half.clear()
    surface.put_aside(request=request([1]), recomputed=False)
    other = Receiver(receivers, "nowhere", 9)
    say("refused", polls=[*rooms, other.poll()], message=other.half.status.message)


def main():
    """Run every case."""
    prefill, decode = Side(), Side()
    config = ConnectorConfig("127.0.0.1")
    with (
        prefill.arena,
        decode.arena,
        PrefillConnector(config, prefill.memory) as sending,
        DecodeConnector(config, decode.memory) as receiving,
    ):
        address, senders, receivers = sending.bootstrap_address, prefill.manager(sending), decode.manager(receiving)
        chunks(prefill, decode, senders, receivers, address)
        aborts(decode, senders, receivers, address)
        refusals(senders, receivers, address)


if __name__ == "__main__":
    main()

"""The rule of the protocol: when an engine may give the pages of a hand-off back. One function for each side."""

from typing import TYPE_CHECKING

from pdpool_connector.protocol.states import DECODE_OVER, PREFILL_OVER

if TYPE_CHECKING:
    from pdpool_connector.protocol.attempt import DecodeAttempt
    from pdpool_connector.protocol.handoff import RankExchange


def prefill_may_release(exchange: "RankExchange") -> bool:
    """Whether the source pages are free as far as one decode rank is concerned.

    Two conditions hold together:

    1. The exchange is over: prefill submits no further write for it.

    2. It is settled: each write that was submitted has ended, and none ended as `UNSETTLED`. A fence of the decode
       process settles it as well: a dead process cannot take later contents of these pages for its own.

    The pages of a hand-off are free when this holds for each of its exchanges.
    """
    return exchange.state in PREFILL_OVER and exchange.settled


def decode_may_release(attempt: "DecodeAttempt") -> bool:
    """Whether the target pages of an attempt are free.

    The attempt is over, and one of these holds:

    1. Its memory was sent to no peer.

    2. Each writer has sent a settled `Ended`, or is fenced. So none can write to these pages any more.

    Neither a deadline nor the loss of a connection is such a proof: a write may still be on its way.
    """
    return attempt.state in DECODE_OVER and (not attempt.offered or not attempt.unsettled_peers)

"""The machines that a world runs, by direction."""

from collections.abc import Mapping
from typing import Literal

from pdpool_connector.protocol.decode import DecodeMachine
from pdpool_connector.protocol.decode_read import DecodeReadMachine
from pdpool_connector.protocol.prefill import PrefillMachine
from pdpool_connector.protocol.prefill_read import PrefillReadMachine

Direction = Literal["write", "read"]
AnyPrefill = PrefillMachine | PrefillReadMachine
AnyDecode = DecodeMachine | DecodeReadMachine
Machines = Mapping[Direction, tuple[type[AnyPrefill], type[AnyDecode]]]
"""Prefill's class and decode's for each direction."""

MACHINES: Machines = {
    "write": (PrefillMachine, DecodeMachine),
    "read": (PrefillReadMachine, DecodeReadMachine),
}

"""The scheduler's report on queues and cache, made at the end of a turn."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """Queues and cache at one moment. `held`: ended sequences whose pages are not free yet."""

    mode: str
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    max_tokens: int = 1
    prefill_bootstrap: int = 0
    prefill_inflight: int = 0
    decode_prealloc: int = 0
    decode_transfer: int = 0
    held: int = 0

    @property
    def token_usage(self) -> float:
        """Used share of the cache, 0 to 1."""
        return round(self.used_tokens / self.max_tokens, 4)

    @property
    def live(self) -> int:
        """Sequences anywhere in the engine."""
        return self.running + self.waiting + sum(self.queues().values())

    def queues(self) -> dict[str, int]:
        """The hand-off queues by name."""
        return {
            "prefill_bootstrap": self.prefill_bootstrap,
            "prefill_inflight": self.prefill_inflight,
            "decode_prealloc": self.decode_prealloc,
            "decode_transfer": self.decode_transfer,
        }

    def loads(self) -> dict[str, Any]:
        """Return the body of `GET /v1/loads`, in SGLang's form."""
        disaggregation: dict[str, Any] = {"mode": "null" if self.mode == "unified" else self.mode}
        disaggregation |= {f"{name}_queue_reqs": reqs for name, reqs in self.queues().items()}
        disaggregation["decode_retracted_queue_reqs"] = 0
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_used_tokens": self.used_tokens,
            "max_total_num_tokens": self.max_tokens,
            "token_usage": self.token_usage,
            "disaggregation": disaggregation,
        }
        return {"dp_rank_count": 1, "loads": [load]}

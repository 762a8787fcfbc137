"""Every timeout of the connector, in seconds, and the bounds of the protocol's tables, in rows or bytes."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """One set for a connector. The defaults suit pods in one cluster.

    Raises ValueError, naming field and value, for a value that is no number or not above 0. A timer of length 0 would
    be due for ever.
    """

    # --- Protocol ---
    match_s: float = 15.0
    """How long prefill keeps one half of a hand-off without the other. A router sends both halves at once."""
    engine_match_s: float = 3.0
    """The same for an attempt of decode, counted only while prefill's engine runs: it would have received the request.
    Five tries of the router then end within 20 s."""
    quiesce_s: float = 10.0
    """How long a failed hand-off waits for its writes to end before it is counted as held."""
    retry_first_s: float = 0.1
    """First interval between repetitions of a frame without an answer; far above one round trip in a cluster."""
    retry_max_s: float = 2.0
    """Longest interval between such repetitions; each interval is twice the one before."""
    query_s: float = 5.0
    """How often decode asks for an attempt that prefill has accepted, so that a lost `Ended` delays nothing longer."""
    result_s: float = 120.0
    """How long the end of an attempt is remembered and repeated while decode has not acknowledged it."""
    acked_s: float = 15.0
    """How long an acknowledged end is remembered: late frames of that attempt are still on their way."""
    max_attempts: int = 16_384
    """Live hand-offs of one side; at prefill one peer may have half of them."""
    max_tombstones: int = 262_144
    """Ends that prefill remembers; one peer may have half of them."""
    max_offered_bytes: int = 256 << 20
    """Bytes of page and state ids in live offers at prefill, 4 for each id; one peer may have half of them."""

    # --- Decode's connection to a prefill instance ---
    connect_s: float = 10.0
    """Decode tries to reach a prefill before it fails what waits for it; below `match_s`, after which prefill fails."""
    connect_again_s: float = 0.5
    """The same for a prefill that has not answered for `connect_s`: its requests end soon, and the try goes on."""
    silent_retry_s: float = 10.0
    """Pause between two tries to reach such a prefill that no request waits for."""
    silent_s: float = 600.0
    """Such a prefill is forgotten if no request has named it for this long."""
    refused_s: float = 1.5
    """An address that refuses connections for this long has no process: a client learns of it within 2 s."""
    connect_first_s: float = 0.05
    """First pause between two tries to reach a prefill; it doubles."""
    connect_max_s: float = 1.0
    """Longest such pause."""
    held_retry_s: float = 10.0
    """Pause between tries to reach a prefill that only pages which are held still need; these tries have no end."""
    registry_s: float = 2.0
    """One request to a bootstrap registry, its answer included."""
    hello_s: float = 3.0
    """From Hello to an answer, before both are tried again; prefill's backend connects meanwhile, and goes on."""
    lost_grace_s: float = 1.0
    """After a connection or a process has ended: a living process is back, and its last frames are read, by then."""

    # --- Prefill ---
    unknown_reply_s: float = 1.0
    """At most one answer in this time to a process that sends frames and is not paired."""
    data_retry_s: float = 2.0
    """After a data connection could not be made again, writes fail at once for this long."""
    ready_poll_s: float = 0.0002
    """Pause between two looks at sends whose pages are not ready: a layer takes longer to compute."""
    engine_look_s: float = 0.5
    """How often the machine learns how long the engine has run, while attempts wait for their requests."""
    engine_step_s: float = 1.0
    """In a longer pause between two beats the engine takes no requests. Only this much of it counts for
    `engine_match_s`."""
    lease_s: float = 5.0
    """A rank that has not renewed its registration for this long is missing; it renews three times in this time."""
    lease_retry_s: float = 0.5
    """Pause after a registration that failed."""

    # --- Transfer backends ---
    backend_connect_s: float = 10.0
    """A backend may take this long to reach a peer's memory: it opens connections and moves the first bytes."""
    backend_open_s: float = 2.0
    """Mooncake's peer that has just answered describes its memory within this; no other peer is served meanwhile."""
    backend_probe_s: float = 2.0
    """A silent Mooncake peer counts as gone after this."""
    backend_reap_s: float = 1.0
    """Mooncake ends a transfer by its own timeout; ours is longer by this, so that it is never the first."""

    # --- Threads, sockets, logs ---
    loop_idle_s: float = 0.25
    """Longest sleep of the connector's loop: how old the statistics of an idle connector can be."""
    loop_lag_window_s: float = 5.0
    """The longest turn of the loop within this time is its lag."""
    snapshot_s: float = 0.1
    """A busy connector publishes its statistics this often."""
    kernel_poll_first_s: float = 0.02
    """First pause between two looks at the kernel's tables for a lost peer; it doubles."""
    kernel_poll_max_s: float = 1.0
    """Longest such pause."""
    late_close_s: float = 0.5
    """An exiting process still waits this long for threads that `close` has left behind."""
    authenticator_close_s: float = 5.0
    """The thread that checks CURVE keys may take this long to end."""
    span_flush_s: float = 2.0
    """Closing waits this long for a collector that does not take the last spans."""
    keepalive_idle_s: int = 6
    """TCP keep-alive of control connections: silence before the first probe. Only a dead host fails the probes."""
    keepalive_interval_s: int = 3
    """Between two probes; the third without an answer ends the connection. Data that the other kernel has not
    acknowledged ends it after the same total time: its requests fail before the operator judges an engine Stuck."""
    drop_log_s: float = 10.0
    """Dropped frames are logged once for each reason in this time."""
    http_start_s: float = 5.0
    """Binding a port, and ending the HTTP thread."""
    http_body_s: float = 5.0
    """The body of a request has arrived by then."""
    http_first_s: float = 10.0
    """The first request of a connection has arrived by then."""
    http_idle_s: float = 75.0
    """A connection waits for its next request: longer than between two scrapes of the metrics."""
    http_unread_s: float = 10.0
    """A client may read nothing of an answer for this long; a slow one reads some of it all the time."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind, what = ((int,), "an int") if name.startswith(("max_", "keepalive_")) else ((int, float), "a number")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} is of type {type(value).__name__}: give {what}")  # noqa: TRY004
            if not value > 0:
                raise ValueError(f"{name} is {value}, must be above 0")


DEFAULTS = Timeouts()

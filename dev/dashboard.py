"""`python -m dev.dashboard [--check]`: write or check the chart's Grafana dashboard.

One row for each question of an operator on call. `ROWS` is the only source of panels and queries.
"""

import re
import sys
from dataclasses import dataclass

import click
from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from dev.paths import CHECKOUT

FILE = CHECKOUT / "charts" / "pdpool" / "files" / "dashboard.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
HERE = 'namespace=~"$namespace"'
WIDTH, HEIGHT = 8, 8
"""Size of a panel in Grafana's grid, which is 24 wide."""


@dataclass(frozen=True)
class Query:
    """One query of a panel. `legend` names labels as `{{label}}`."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is a name of Grafana's units, `help` what to conclude from it."""

    title: str
    help: str
    queries: tuple[Query, ...]
    unit: str = "short"


INSTANCE = "{{namespace}}/{{pool}} {{role}} {{instance}}"
RANK = f"{INSTANCE} rank {{{{rank}}}}"
POD = "{{namespace}}/{{pod}} rank {{rank}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Can it serve?": (
        Panel(
            "Serving parts of services",
            "A part at 0 fails every request. Compare it with the wanted number.",
            (
                Query(f"max by (namespace, service, part) (pdpool_service_serving{{{HERE}}})", "{{service}} {{part}}"),
                Query(
                    f"max by (namespace, service, part) (pdpool_service_wanted{{{HERE}}})",
                    "{{service}} {{part}} wanted",
                ),
            ),
        ),
        Panel(
            "Missing instances",
            "Wanted instances that do not serve. It is above 0 for a time during a roll-out.",
            (
                Query(
                    f"max by (namespace, pool, role) (pdpool_pool_wanted{{{HERE}}}) - "
                    f"max by (namespace, pool, role) (pdpool_pool_available{{{HERE}}})",
                    "{{namespace}}/{{pool}} {{role}}",
                ),
            ),
        ),
        Panel(
            "Operator leads",
            "At 0, or without a line, no operator judges, scales or repairs. Engines keep serving.",
            (Query("max by (namespace) (pdpool_leader)", "{{namespace}}"),),
        ),
    ),
    "Who is at fault?": (
        Panel(
            "Instances at fault",
            "Stuck or Failing: this instance is at fault itself. A line exists only while the verdict lasts.",
            (
                Query(
                    f"max by (namespace, pool, role, instance, verdict) (pdpool_instance_verdict{{{HERE}, "
                    'verdict=~"Stuck|Failing"})',
                    f"{INSTANCE} {{{{verdict}}}}",
                ),
            ),
        ),
        Panel(
            "Instances by verdict",
            "Blocked instances wait for the other side. Saturated ones need help by more instances.",
            (Query(f"count by (role, verdict) (pdpool_instance_verdict{{{HERE}}})", "{{role}} {{verdict}}"),),
        ),
        Panel(
            "Conditions that are not as they should be",
            "With their reasons. Stalled, RepairStopped and PeersUnreachable should be absent, the others True.",
            (
                Query(
                    f"max by (kind, namespace, name, type, reason) (pdpool_condition{{{HERE}, "
                    'type=~"Stalled|RepairStopped|PeersUnreachable", status="True"} or '
                    f"pdpool_condition{{{HERE}, "
                    'type!~"Stalled|RepairStopped|PeersUnreachable|Reconciling", status!="True"})',
                    "{{kind}} {{namespace}}/{{name}} {{type}}: {{reason}}",
                ),
            ),
        ),
    ),
    "Queues": (
        Panel(
            "Prefill: requests by queue",
            "A long queue is no fault while requests move on.",
            (
                Query(
                    f'sum by (namespace, pool, queue) (pdpool_queue_reqs{{{HERE}, role="prefill"}})',
                    "{{namespace}}/{{pool}} {{queue}}",
                ),
            ),
        ),
        Panel(
            "Decode: requests by queue",
            "A long queue is no fault while requests move on.",
            (
                Query(
                    f'sum by (namespace, pool, queue) (pdpool_queue_reqs{{{HERE}, role="decode"}})',
                    "{{namespace}}/{{pool}} {{queue}}",
                ),
            ),
        ),
        Panel(
            "Oldest request of a queue",
            "An age that grows as fast as time passes shows a queue that does not move.",
            (
                Query(
                    f"max by (namespace, pool, role, instance, queue) (pdpool_queue_oldest_seconds{{{HERE}}})",
                    f"{INSTANCE} {{{{queue}}}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Requests that move on",
            "0 beside a queue that is not empty means that nothing moves.",
            (
                Query(
                    "sum by (namespace, pool, role, queue) "
                    f"(rate(pdpool_queue_moved_total{{{HERE}}}[$__rate_interval]))",
                    "{{namespace}}/{{pool}} {{role}} {{queue}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Leaked requests",
            "An engine keeps these requests although their hand-offs have ended. A restart frees their memory.",
            (
                Query(
                    f"sum by (namespace, pool, role, instance, queue) (pdpool_queue_leaked_reqs{{{HERE}}}) > 0",
                    f"{INSTANCE} {{{{queue}}}}",
                ),
            ),
        ),
    ),
    "Hand-offs": (
        Panel(
            "Ended hand-offs by outcome",
            "Aborts are clients that left. Other outcomes than done are failures.",
            (
                Query(
                    f"sum by (namespace, outcome) (rate(pdpool_connector_ended_total{{{HERE}}}[$__rate_interval]))",
                    "{{namespace}} {{outcome}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Failed hand-offs by cause",
            "Peer_lost and timed_out point to the other side.",
            (
                Query(
                    f"sum by (namespace, cause) (rate(pdpool_connector_failures_total{{{HERE}}}[$__rate_interval]))",
                    "{{namespace}} {{cause}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Abort to release, p99",
            "How long pages of an ended hand-off stay unusable.",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le, namespace) "
                    f"(rate(pdpool_connector_release_seconds_bucket{{{HERE}}}[$__rate_interval])))",
                    "{{namespace}}",
                ),
            ),
            "s",
        ),
    ),
    "Holds": (
        Panel(
            "Memory held for lost peers",
            "It ends only by proof that the peer has ended. It takes cache from this rank.",
            (Query(f"max by (namespace, pool, role, instance, rank) (pdpool_held_bytes{{{HERE}}})", RANK),),
            "bytes",
        ),
        Panel(
            "Oldest hold",
            "Above ten minutes the operator has found no proof. The condition HoldsProvable says why.",
            (Query(f"max by (namespace, pool, role, instance, rank) (pdpool_held_oldest_seconds{{{HERE}}})", RANK),),
            "s",
        ),
        Panel(
            "Checksums that differ",
            "Any value above 0 is corrupted cache.",
            (
                Query(
                    f'sum by (namespace, pod, rank) (pdpool_connector_checksums_total{{{HERE}, outcome="mismatched"}})',
                    POD,
                ),
            ),
        ),
    ),
    "Transports": (
        Panel(
            "Peers by transport",
            "A transport that is not the one you paid for (tcp in place of rdma) is slow, not broken.",
            (
                Query(
                    f"count by (namespace, backend, transport) (pdpool_connector_transport_info{{{HERE}}})",
                    "{{namespace}} {{backend}} {{transport}}",
                ),
            ),
        ),
        Panel(
            "Bytes moved",
            "Cache that arrived or left, of each namespace.",
            (
                Query(
                    f"sum by (namespace) (rate(pdpool_connector_bytes_moved_total{{{HERE}}}[$__rate_interval]))",
                    "{{namespace}}",
                ),
            ),
            "Bps",
        ),
        Panel(
            "Connections that fail",
            "Time since a connection to a peer failed. 0: all connections work.",
            (Query(f"max by (namespace, pod, rank) (pdpool_connector_link_failing_seconds{{{HERE}}})", POD),),
            "s",
        ),
    ),
    "Repairs": (
        Panel(
            "Instances out of rotation",
            "pdpool's routers send no requests to these instances, except for short trials.",
            (
                Query(
                    f"1 - max by (namespace, pool, role, instance) (pdpool_instance_in_rotation{{{HERE}}}) > 0",
                    INSTANCE,
                ),
            ),
        ),
        Panel(
            "Repairs",
            "Purges, restarts and replacements of instances at fault: done, or proposed in mode Observe.",
            (
                Query(
                    "sum by (namespace, pool, role, action, outcome) "
                    f"(increase(pdpool_repair_actions_total{{{HERE}}}[$__rate_interval]))",
                    "{{namespace}}/{{pool}} {{role}} {{action}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "Repair budget",
            "Restarts that repair may still make within the hour, in mode Enforce. At 0, an instance at fault waits "
            "for a person.",
            (
                Query(
                    f"min by (namespace, pool, role) (pdpool_repair_budget_remaining{{{HERE}}})",
                    "{{namespace}}/{{pool}} {{role}}",
                ),
            ),
        ),
        Panel(
            "Fences by outcome",
            "Proofs that the operator gave to engines, so that they release memory of lost peers.",
            (
                Query(
                    "sum by (outcome) (increase(pdpool_fences_total[$__rate_interval]))",
                    "{{outcome}}",
                ),
            ),
        ),
        Panel(
            "Reconciles that fail",
            "Time since the first failed reconcile in a row. The object's status may be out of date.",
            (
                Query(
                    f"max by (kind, namespace, name) (pdpool_reconcile_failing_seconds{{{HERE}}})",
                    "{{kind}} {{namespace}}/{{name}}",
                ),
            ),
            "s",
        ),
    ),
}


def filled(query: Query) -> str:
    """Return an expression with Grafana's variables filled in as for all namespaces."""
    return query.expr.replace("$namespace", ".*").replace("$__rate_interval", "2m")


def queries() -> dict[str, str]:
    """Return every query by its panel and place."""
    return {
        f"{panel.title} {number}": filled(query)
        for panels in ROWS.values()
        for panel in panels
        for number, query in enumerate(panel.queries, 1)
    }


def text() -> str:
    """Return the dashboard as Grafana's JSON."""
    built = (
        dashboard.Dashboard("pdpool")
        .uid("pdpool")
        .tags(["pdpool"])
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Data source"))
        .with_variable(
            dashboard.QueryVariable("namespace")
            .label("Namespace")
            .datasource(SOURCE)
            .query("label_values(pdpool_condition, namespace)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, panels in ROWS.items():
        built.with_row(dashboard.Row(title))
        for panel in panels:
            built.with_panel(_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    shown = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.help)
        .unit(panel.unit)
        .min(0)
        .span(WIDTH)
        .height(HEIGHT)
        .datasource(SOURCE)
    )
    for number, query in enumerate(panel.queries):
        shown.with_target(
            prometheus.Dataquery()
            .expr(re.sub(r"\s+", " ", query.expr))
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
    return shown


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when the file differs.")
def main(check: bool) -> None:
    """Write charts/pdpool/files/dashboard.json."""
    wanted = text()
    if not check:
        FILE.write_text(wanted)
    elif not FILE.exists() or FILE.read_text() != wanted:
        sys.exit(f"dashboard: {FILE.relative_to(CHECKOUT)} differs from dev/dashboard.py; run `make generate`")


if __name__ == "__main__":
    main()

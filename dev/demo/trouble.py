"""Report after a failure: the state of the cluster, and how to continue."""

from dev.demo.install import POOLS, SYSTEM
from dev.demo.screen import Screen
from dev.demo.target import Target
from dev.shell import CommandError

CONDITIONS = (
    "{range .items[*]}{.kind}/{.metadata.name}{'\\n'}"
    "{range .status.conditions[*]}  {.type}={.status} {.reason}: {.message}{'\\n'}{end}{end}"
)
LOOK_AT = (
    ("get", "pods", "-A", "-o", "wide"),
    ("get", "pd", "-A"),
    ("get", "prefillpools,decodepools,disaggregatedservices", "-n", POOLS, "-o", f"jsonpath={CONDITIONS}"),
    ("get", "events", "-n", POOLS, "--sort-by=.metadata.creationTimestamp"),
    ("logs", "-n", SYSTEM, "deployment/pdpool-operator", "--tail=30"),
)
LINES = 40


def report(screen: Screen, target: Target, error: Exception) -> None:
    """Print what failed and the state of the cluster now."""
    screen.console.print(f"\n[bold red]demo failed[/] while: {screen.doing}", highlight=False)
    screen.console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
    try:
        target.kubectl("get", "--raw", "/readyz", timeout_s=15)
    except CommandError as second:
        screen.say(f"The cluster does not answer: {str(second).splitlines()[-1]}")
        return
    for arguments in LOOK_AT:
        screen.command("kubectl " + " ".join(arguments))
        try:
            found = target.kubectl(*arguments, timeout_s=20)
        except CommandError as second:
            found = str(second)
        screen.block("\n".join(found.rstrip().splitlines()[-LINES:]))
    screen.say(f"The cluster stays up. `{target.up}` again continues from here; `{target.down}` removes everything.")

"""The steps of `python -m dev.demo up`."""

from dataclasses import dataclass, field

from dev.demo import install, questions, stuck
from dev.demo.engine import DemoEngine
from dev.demo.install import POOLS, SERVICE
from dev.demo.oracle import unified_engine
from dev.demo.screen import DemoError, Screen
from dev.demo.target import Images, Target
from dev.prometheus import deploy

ADMIN_PORT = 9400
ROUTER_PORT = 8000


@dataclass
class Figures:
    """Figures for the last line."""

    ttft_ms: float = 0.0
    requests: int = 0
    asked: int = 0
    kv_bytes: int = 0
    apply_to_ready_s: float = 0.0
    freeze: stuck.Outcome = field(default_factory=stuck.Outcome)

    def line(self) -> str:
        """The last line of the demo."""
        return (
            f"demo ok: ttft_ms={self.ttft_ms:.0f} requests={self.requests}/{self.asked} kv_bytes={self.kv_bytes} "
            f"apply_to_ready_s={self.apply_to_ready_s:.1f} alert_fire_s={self.freeze.fire_s:.1f} "
            f"alert_resolve_s={self.freeze.resolve_s:.1f}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Names and values for the table."""
        return [
            ("apply until Ready", f"{self.apply_to_ready_s:.1f} s"),
            ("first token of the first answer", f"{self.ttft_ms:.0f} ms"),
            ("concurrent answers as unified", f"{self.requests} of {self.asked}"),
            ("KV cache moved", mebibytes(self.kv_bytes)),
            ("frozen until the alert fired", f"{self.freeze.fire_s:.1f} s"),
            ("unfrozen until it was resolved", f"{self.freeze.resolve_s:.1f} s"),
            (
                "requests that met the freeze",
                f"{self.freeze.completed} completed, {len(self.freeze.failed)} failed, 0 hang",
            ),
        ]


def mebibytes(count: int) -> str:
    """Format bytes for the demo's text and table. The last line, which programs read, has plain numbers."""
    return f"{count / 2**20:.1f} MiB"


def tell(screen: Screen, target: Target, engine: DemoEngine) -> Figures:
    """Run the whole story and return its figures.

    Raises:
        CommandError, TimeoutError, DemoError, openai.OpenAIError: a step failed. `screen.doing` names it.
    """
    figures = Figures()
    if engine.sizes:
        screen.say(engine.sizes)
    screen.step("A Kubernetes cluster")
    target.start()
    screen.step("Images: operator, engine with the model, router, Prometheus")
    images = target.bring_images("operator", engine.image, "router", "prometheus")
    screen.step("The operator, by its Helm chart")
    install.namespaces(screen, target)
    install.operator(screen, target, images)
    screen.step("Prometheus")
    install.prometheus(screen, target, images)
    screen.step("Two pools, a service and its router")
    install.remove_pools(screen, target)
    figures.apply_to_ready_s = install.pools(screen, target, images, engine)
    screen.say(f"Ready {figures.apply_to_ready_s:.1f} s after apply")
    with target.reach(POOLS, "service", f"{SERVICE}-router", ROUTER_PORT) as router:
        model = questions.model_name(router)
        _one_question(screen, router, model, figures)
        _many_questions(screen, target, images, engine, router, model, figures)
        screen.step("A decode engine's scheduler freezes: silence is not death")
        figures.freeze = stuck.play(screen, target, engine, router, model)
    _farewell(screen, target, figures)
    return figures


def _one_question(screen: Screen, router: str, model: str, figures: Figures) -> None:
    screen.step("A question, answered through router, prefill and decode")
    screen.say(f"POST {router}/v1/chat/completions, model {model}, streamed")
    screen.console.print(f"\n   > {questions.FIRST_QUESTION}\n   ", end="")
    _, seconds = questions.stream(router, model, questions.FIRST_QUESTION, screen.fragment)
    figures.ttft_ms = 1000 * seconds
    screen.console.print("\n")
    screen.say(f"first token after {figures.ttft_ms:.0f} ms")


def _many_questions(
    screen: Screen, target: Target, images: Images, engine: DemoEngine, router: str, model: str, figures: Figures
) -> None:
    asked = questions.questions()
    figures.asked = len(asked)
    screen.step(f"{len(asked)} concurrent chat requests, each compared with a unified engine's answer")
    with screen.counting(len(asked), "answered over the hand-off") as each:
        answers = questions.ask_all(router, model, asked, each=each)
    screen.say(f"{sum(answer.tokens for answer in answers)} tokens over the hand-off, for example:")
    shown = questions.EXAMPLE
    screen.block(f"> {asked[shown]}\n{answers[shown].text or answers[shown].error}")
    screen.say(
        "a model this small is often wrong; the test is that a unified engine gives the same answer, word for word"
    )
    path = target.get("prefillpool", SERVICE, "-n", POOLS)["spec"]["model"]["path"]
    with (
        unified_engine(screen, target, engine, images.product(engine.image), path, model) as url,
        screen.counting(len(asked), "answered by the unified engine") as each,
    ):
        expected = questions.ask_all(url, model, asked, each=each)
    differing = [
        f"{question!r}: disaggregated {got}, unified {want}"
        for question, got, want in zip(asked, answers, expected, strict=True)
        if got != want or got.error
    ]
    figures.requests = len(asked) - len(differing)
    figures.kv_bytes = moved_bytes(target)
    if differing:
        raise DemoError(
            f"{len(differing)} of {len(asked)} answers differ from the unified engine's; first: {differing[0]}"
        )
    if not figures.kv_bytes:
        raise DemoError("no KV cache was moved: the answers did not come over the hand-off")
    screen.say(f"{figures.requests} of {len(asked)} equal; {mebibytes(figures.kv_bytes)} of KV cache moved")


def moved_bytes(target: Target) -> int:
    """Return the bytes of KV cache that the decode engines have received, as their connectors count them."""
    pods = target.get("pods", "-n", POOLS, "-l", f"pdpool.dev/pool={SERVICE},pdpool.dev/role=decode")["items"]
    total = 0
    for pod in pods:
        total += int(target.ask_pod(POOLS, pod["metadata"]["name"], ADMIN_PORT, "/v1/state")["bytes_moved_total"])
    return total


def _farewell(screen: Screen, target: Target, figures: Figures) -> None:
    screen.figures(figures.rows())
    screen.console.print()
    screen.say("The cluster stays up. To look around:")
    if target.hint:
        screen.command(target.hint)
    screen.command(f"kubectl get pd -n {POOLS}")
    screen.command(f"kubectl port-forward -n {deploy.NAMESPACE} service/prometheus 9090")
    screen.command(f"kubectl port-forward -n {POOLS} service/{SERVICE}-router {ROUTER_PORT}")
    screen.say(f"`{target.down}` removes what this made.")
    screen.console.print()

"""`python -m dev.sync_chart [--check]`: update or check the chart's copies of the generated CRDs.

Helm packs only files inside a chart. Users without Helm apply `crds/` at the root.
"""

import sys
from pathlib import Path

import click

from dev.paths import CHECKOUT

SOURCE = CHECKOUT / "crds"
COPIES = CHECKOUT / "charts" / "pdpool" / "files" / "crds"


def read_folder(folder: Path) -> dict[str, str]:
    """Return the text of every YAML file in `folder` by its name."""
    return {path.name: path.read_text() for path in sorted(folder.glob("*.yaml"))}


def differences(source: dict[str, str], copies: dict[str, str]) -> list[str]:
    """Return one sentence for each copy that is missing, superfluous or different."""
    found = [f"{name} is missing" for name in source.keys() - copies.keys()]
    found += [f"{name} is left over" for name in copies.keys() - source.keys()]
    found += [f"{name} differs" for name in source.keys() & copies.keys() if source[name] != copies[name]]
    return sorted(found)


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when a copy differs.")
def main(check: bool) -> None:
    """Copy crds/*.yaml into the chart."""
    source = read_folder(SOURCE)
    if not source:
        sys.exit(f"sync_chart: no CRDs in {SOURCE}; run `make generate`")
    found = differences(source, read_folder(COPIES))
    if check:
        if found:
            sys.exit("sync_chart: charts/pdpool/files/crds: " + ", ".join(found) + "; run `make generate`")
        return
    COPIES.mkdir(parents=True, exist_ok=True)
    for leftover in COPIES.glob("*.yaml"):
        if leftover.name not in source:
            leftover.unlink()
    for name, text in source.items():
        (COPIES / name).write_text(text)
    print(f"sync_chart: {len(source)} CRDs in the chart, {len(found)} changed")


if __name__ == "__main__":
    main()

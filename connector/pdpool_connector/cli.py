"""`pdpool`: the command line. Other packages add commands through the entry-point group `pdpool.commands`."""

from importlib.metadata import entry_points

import click

from pdpool_connector.console.commands import connector
from pdpool_connector.hwcheck.command import hwcheck


@click.group()
@click.version_option(package_name="pdpool")
def main() -> None:
    """Prefill/decode disaggregated LLM serving."""


main.add_command(connector)
main.add_command(hwcheck)
for _entry in entry_points(group="pdpool.commands"):
    main.add_command(_entry.load(), _entry.name)


if __name__ == "__main__":
    main()

"""Entry point of `kubectl pdpool`, which kubectl finds as `kubectl-pdpool`, and of `python -m pdpool_kubectl`."""

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from .cli import cli
    except ModuleNotFoundError as error:
        needed = (
            "kubectl pdpool needs the extra `operator`: pip install 'WHEEL[operator]', with the file of pdpool's wheel"
        )
        sys.exit(f"{error.name} is not installed; {needed}")
    cli(prog_name="kubectl pdpool")


if __name__ == "__main__":
    main()

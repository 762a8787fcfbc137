"""One target under atheris: `python -m proof.fuzz.target NAME CORPUS [libFuzzer's options]`. Ends with the process."""

import hashlib
import sys
from pathlib import Path

import atheris


def main(name: str, corpus: Path, options: list[str]) -> None:
    # Instrumentation works on imports, so nothing of ours is imported before.
    with atheris.instrument_imports(include=["pdpool_connector"]):
        from proof.fuzz.targets import make
    fuzz, seeds = make(name)
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    atheris.Setup([sys.argv[0], *options, str(corpus)], fuzz)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

"""Names the wheel or checkout that pdpool was installed from.

pdpool is on no package index: another project may own its name there.
"""

import importlib.metadata
import urllib.request

import msgspec

FILE = "file://"


class _DirectUrl(msgspec.Struct):
    """`direct_url.json` of an installed package (PEP 610)."""

    url: str
    dir_info: dict[str, bool] = msgspec.field(default_factory=dict)


def install_command(extra: str) -> str:
    """Return the command that installs pdpool with `extra` from the source of the present installation.

    An installer may not have recorded the source. The command then has the word WHEEL in its place.
    """
    try:
        recorded = importlib.metadata.distribution("pdpool").read_text("direct_url.json")
        source = msgspec.json.decode(recorded or "", type=_DirectUrl)
    except (importlib.metadata.PackageNotFoundError, msgspec.DecodeError):
        return f"pip install 'WHEEL[{extra}]'"
    if not source.url.startswith(FILE):
        return f"pip install 'pdpool[{extra}] @ {source.url}'"
    path = urllib.request.url2pathname(source.url.removeprefix(FILE))
    return f"pip install {'-e ' if source.dir_info.get('editable') else ''}'{path}[{extra}]'"

"""Addresses as "host:port" and "[v6]:port", and which of them may be contacted."""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
"""Host names as DNS has them, underscores allowed; IPv4 addresses are of this form too."""


class AddressError(ValueError):
    """A text that is no address, or an address that must not be contacted; the message says which and why."""


class Address(NamedTuple):
    """A host (name or IP, without brackets) and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written in URLs: an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@lru_cache(maxsize=1024)  # each hand-off names its prefill
def parse_address(text: str) -> Address:
    """Read "host:port" or "[v6]:port". Raises AddressError."""
    if "://" in text:
        raise AddressError(f"{text[:300]!r} is no address: give host:port, without a scheme")
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise AddressError(f"{text!r}: write an IPv6 host in brackets, as in [::1]:8998")
    if not colon or not is_host(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) <= 65535:
        raise AddressError(f"{text[:300]!r} is no address: give host:port")
    return Address(host, int(port))


def is_host(text: str) -> bool:
    """Whether it can be looked up at all: a name, an IPv4 or an IPv6 address."""
    if ":" not in text:
        return _NAME.fullmatch(text) is not None
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_ip(host: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def pick_allowed(address: Address, ips: Sequence[str], networks: Sequence[str]) -> Address:
    """The first of the addresses that a host has which lies in an allowed network; it alone is to be contacted.

    Raises AddressError when there is none.
    """
    for ip in ips:
        if is_allowed(ip, networks):
            return Address(ip, address.port)
    raise AddressError(f"{address} ({', '.join(ips)}) is in none of the allowed networks {', '.join(networks)}")


def is_allowed(ip: str, networks: Sequence[str]) -> bool:
    """Whether an IP address lies in one of the CIDR blocks."""
    plain = ipaddress.ip_address(ip.partition("%")[0])
    mapped = plain.ipv4_mapped if isinstance(plain, ipaddress.IPv6Address) else None
    return any((mapped or plain) in ipaddress.ip_network(network) for network in networks)

"""Which addresses FluidPD may be told to call: what a worker or a peer says of itself must not lead into the infrastructure.

Never resolves a name: whoever does, brings every address that it found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*")
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]*|[0-9]+")
# Cloud metadata that lies outside link-local, and the ranges in which an IPv6 address hides an IPv4 one.
_METADATA = tuple(ip_network(n) for n in ("fd00:ec2::254/128", "100.100.100.200/32", "168.63.129.16/32"))
_LOOPBACK = IPv6Address("::1")
_EMBEDS = tuple(ip_network(n) for n in ("::ffff:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))


class Refused(Exception):
    """This address is not called. The sentence says why."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Networks and host names that may be called; `anything`: whatever is not refused everywhere."""

    networks: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()
    anything: bool = False
    loopback: bool = False

    @classmethod
    def of(cls, entries: Iterable[str], *, loopback: bool) -> Allowed:
        """From settings: `10.0.0.0/8`, `10.1.2.3` or `worker-1.example`. None at all: anything. Raises ValueError."""
        networks: list[Network] = []
        hosts: set[str] = set()
        for entry in entries:
            try:
                networks.append(ip_network(entry))
            except ValueError:
                if _NAME.fullmatch(entry) is None or _is_number(entry) or "/" in entry:
                    raise ValueError(f"{entry!r} is neither a network such as 10.0.0.0/8 nor a host name") from None
                hosts.add(entry.lower())
        return cls(tuple(networks), frozenset(hosts), not networks and not hosts, loopback)


def literal(host: str) -> Address | None:
    """The address that `host` is; None for a name. Raises Refused for what resolvers read in more than one way."""
    if "%" in host or not host.isascii() or not host:
        raise Refused(f"{host!r} is no plain host name or address")
    try:
        return ip_address(host)
    except ValueError:
        pass
    if _is_number(host) or _NAME.fullmatch(host.removesuffix(".")) is None:
        raise Refused(f"{host!r} is no plain host name or address: write 10.0.0.5, [fd00::5] or worker-1.example")
    return None


def _is_number(host: str) -> bool:
    """Whether some resolver would read it as an IPv4 address: 2130706433, 0x7f.1, 127.1, 0177.0.0.1, 127.0.0.1."""
    return _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]) is not None


def plain(host: str) -> None:
    """What can be said of an address in a settings file without looking it up. Raises Refused."""
    address = literal(host)
    if address is not None and (why := never(address)) is not None:
        raise Refused(f"{host}: {why}")


def judge(host: str, found: Iterable[Address], allowed: Allowed) -> Address:
    """The address to call. All that the name has must be allowed: another lookup would find the bad one. Raises Refused."""
    addresses = tuple(found)
    if not addresses:
        raise Refused(f"{host!r} has no address")
    for address in addresses:
        if (why := never(address)) is not None:
            raise Refused(f"{host} is {address}: {why}")
        if address.is_loopback and not allowed.loopback:
            raise Refused(f"{host} is {address}: this machine itself, which nobody elsewhere may name")
    if host.lower() not in allowed.hosts and not allowed.anything:
        for address in addresses:
            if not any(address in network for network in allowed.networks if network.version == address.version):
                raise Refused(f"{host} is {address}: not among the addresses that are allowed")
    return addresses[0]


def never(address: Address) -> str | None:
    """Why nobody may name this address, or None."""
    if address.is_unspecified:
        return "unspecified"
    if address.is_multicast:
        return "multicast"
    if address.is_link_local:
        return "link-local, where clouds keep their metadata"
    if any(address in network for network in _METADATA if network.version == address.version):
        return "a cloud's metadata service"
    if isinstance(address, IPv6Address):
        if address.scope_id:
            return "an address with a zone"
        if address != _LOOPBACK and any(address in network for network in _EMBEDS if network.version == 6):
            return "an IPv4 address in disguise: write it as IPv4"
    elif address in IPv4Network("0.0.0.0/8") or int(address) == 0xFFFFFFFF:
        return "no address of a host"
    return None

"""
The addresses to which webhooks may be sent.

A subscriber chooses the address of its sink, and the server connects to it from inside its network. So
only public addresses are allowed, unless `--webhook-allow` lists a network or a host: loopback, private
and link-local ones lead to services that trust every client that can reach them, and to cloud metadata.
IPv6 addresses that wrap an IPv4 address (mapped, NAT64, 6to4, Teredo) would lead there as well.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

from virta.server.access.hosts import ANY, read_host

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

# Entries of --webhook-allow.
RULES_MAX = 100

# IANA's special-purpose registry, and the address of Azure's host agent, which looks public.
_NOT_PUBLIC_4 = [
    ip_network(text)
    for text in [
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    ]
]
# Of IPv6 only global unicast is public, except for what wraps IPv4 (2001::/32, 2002::/16) or is special.
_GLOBAL_6 = ip_network("2000::/3")
_NOT_PUBLIC_6 = [
    ip_network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]


def read_rule(text: str) -> str | None:
    """Return an entry of `--webhook-allow` in its normal form, or None if it is invalid."""
    lowered = text.strip().lower()
    try:
        return str(ip_network(lowered.removeprefix("[").removesuffix("]"), strict=False))
    except ValueError:
        name = read_host(lowered)
        return None if name == ANY else name


class SinkRules:
    """Decides whether an address may be connected to for a host."""

    def __init__(self, allowed: tuple[str, ...] | None = None) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._hosts: set[str] = set()
        for rule in allowed or ():
            try:
                self._networks.append(ip_network(rule))
            except ValueError:
                self._hosts.add(rule)

    def permits(self, host: str, address: str) -> bool:
        """Return whether the server may connect to `address`, to which `host` was resolved."""
        if host.lower().removesuffix(".") in self._hosts:
            return True
        number = ip_address(address.partition("%")[0])
        mapped = number.ipv4_mapped if isinstance(number, IPv6Address) else None
        meant = (number,) if mapped is None else (number, mapped)
        if any(one in network for network in self._networks for one in meant):
            return True
        return _is_public(number)


def _is_public(number: IPv4Address | IPv6Address) -> bool:
    if isinstance(number, IPv4Address):
        return not any(number in network for network in _NOT_PUBLIC_4)
    return number in _GLOBAL_6 and not any(number in network for network in _NOT_PUBLIC_6)

"""Which addresses a server may be sent to by somebody who only wrote a URL."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address

# Listed here rather than asked of `ipaddress`, whose answers changed between patch releases of Python.
CLOSED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",
        "100.64.0.0/10",  # carriers' NAT; some clouds' metadata
        "127.0.0.0/8",
        "168.63.129.16/32",  # looks public, and is what a virtual machine of one cloud configures itself from
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments; some clouds' metadata
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
GLOBAL_V6 = IPv6Network("2000::/3")
CLOSED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
MAPPED, NAT64, SIX_TO_FOUR = IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"), IPv6Network("2002::/16")


def is_public(address: Address) -> bool:
    """Whether it is one host of the public internet.

    Of IPv6 only what has been given out (2000::/3) is, and an address that stands for an IPv4 one (mapped, NAT64, 6to4)
    is what that one is. So loopback, private, link-local, multicast, reserved, unspecified and clouds' metadata
    addresses are not, in any spelling.
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in CLOSED_V4)
    if address in MAPPED or address in NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    if address in SIX_TO_FOUR:
        return is_public(IPv4Address(int(address) >> 80 & 0xFFFFFFFF))
    return address in GLOBAL_V6 and not any(address in network for network in CLOSED_V6)

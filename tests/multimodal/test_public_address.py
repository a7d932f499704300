"""Which addresses belong to the public internet."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from multimodal.public_address import is_public

CLOSED = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.1.2.3 168.63.129.16
169.254.0.1 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 192.168.255.255
198.18.0.1 198.19.255.255 198.51.100.7 203.0.113.7 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255
:: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe
64:ff9b:1::1 100::1 2001::1 2001:0:53aa:64c::1 2001:10::1 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe::1 2002:c0a8:1::1
3fff::1 5f00::1 fc00::1 fd00::1 fd00:ec2::254 fe80::1 fe80::1%1 fec0::1 ff02::1 ff05::2
""".split()
OPEN = """
1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.1 100.63.255.255 100.128.0.1 126.255.255.255 128.0.0.1 169.253.255.255
169.255.0.1 172.15.255.255 172.32.0.1 192.167.255.255 192.169.0.1 198.17.255.255 198.20.0.1 223.255.255.255
2001:200::1 2001:4860:4860::8888 2606:4700::1111 2a00:1450:4001::1
::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1
""".split()


@pytest.mark.parametrize("address", CLOSED)
def test_addresses_of_no_public_host_are_closed(address):
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", OPEN)
def test_addresses_beside_the_closed_ranges_are_public(address):
    assert is_public(ip_address(address))

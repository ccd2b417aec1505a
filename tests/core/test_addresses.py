"""Which addresses may be called: what leads into the infrastructure is refused, however it is written."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from fluidpd.addresses import Allowed, Refused, judge, literal

ANYTHING = Allowed(anything=True)


def found(*addresses: str) -> tuple[object, ...]:
    return tuple(ip_address(a) for a in addresses)


NEVER = [
    "169.254.169.254",
    "169.254.0.1",
    "fe80::1",
    "fd00:ec2::254",
    "100.100.100.200",
    "0.0.0.0",
    "::",
    "0.1.2.3",
    "224.0.0.1",
    "ff02::1",
    "255.255.255.255",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
]


@pytest.mark.parametrize("address", NEVER)
def test_addresses_of_the_infrastructure_are_refused_even_where_anything_is_allowed(address: str) -> None:
    everywhere = Allowed.of(("0.0.0.0/0", "::/0"), loopback=True)
    for allowed in (Allowed(anything=True, loopback=True), everywhere):
        with pytest.raises(Refused):
            judge("worker-1", found(address), allowed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "127.1",
        "0177.0.0.1",
        "10.0.0.256",
        "127.0.0.1.",
        "1.2.3",
        "%31%32%37.0.0.1",
        "１２７.0.0.1",
        "fe80::1%eth0",
        "a b",
        "",
        "worker_.-",
        "w..1",
    ],
)
def test_what_resolvers_read_in_more_than_one_way_is_refused_unresolved(host: str) -> None:
    with pytest.raises(Refused):
        literal(host)


@pytest.mark.parametrize("host", ["worker-1", "worker_1.pool.svc.cluster.local", "d1.test", "w1.", "localhost", "7up.example"])
def test_plain_names_are_left_to_the_resolver(host: str) -> None:
    assert literal(host) is None


def test_one_bad_address_among_good_ones_refuses_the_name() -> None:
    with pytest.raises(Refused, match=r"169\.254\.169\.254"):
        judge("worker-1", found("10.0.0.5", "169.254.169.254"), ANYTHING)  # type: ignore[arg-type]


def test_loopback_is_for_those_who_are_there() -> None:
    with pytest.raises(Refused, match="this machine itself"):
        judge("localhost", found("127.0.0.1"), ANYTHING)  # type: ignore[arg-type]
    assert str(judge("localhost", found("127.0.0.1"), Allowed(anything=True, loopback=True))) == "127.0.0.1"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("host", "address", "allowed", "good"),
    [
        ("w1", "10.1.2.3", ("10.0.0.0/8",), True),
        ("w1", "11.1.2.3", ("10.0.0.0/8",), False),
        ("w1", "fd12::5", ("fd12::/16",), True),
        ("w1", "fd12::5", ("10.0.0.0/8",), False),
        ("w1", "11.1.2.3", ("w1",), True),
        ("W1", "11.1.2.3", ("w1",), True),
        ("w2", "11.1.2.3", ("w1",), False),
        ("w1", "127.0.0.1", ("w1",), False),
        ("w1", "8.8.8.8", (), True),
    ],
)
def test_what_is_listed_is_allowed_and_nothing_else(host: str, address: str, allowed: tuple[str, ...], good: bool) -> None:
    listed = Allowed.of(allowed, loopback=False)
    if good:
        judge(host, found(address), listed)  # type: ignore[arg-type]
        return
    with pytest.raises(Refused):
        judge(host, found(address), listed)  # type: ignore[arg-type]


def test_a_name_without_an_address_is_refused() -> None:
    with pytest.raises(Refused, match="no address"):
        judge("w1", (), ANYTHING)


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "a b", "http://x", "10.0.0.1/8", "300.1.1.1"])
def test_a_setting_that_is_no_address_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ValueError, match="neither a network"):
        Allowed.of((entry,), loopback=False)

"""Signed requests and sealed frames: what was altered, repeated, late or left out is not taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.signing import NotProven, Seal, Signed, Verifier, is_sealed, session_key, signature, token_id, unverified

KEY = b"the fleet's secret"
NOW = 1_700_000_000.0
CLAIM = Signed("POST", "/peer/claim", b'{"id":"c1"}', "http://10.0.0.2:8090", 7)


def signed(request: Signed = CLAIM, *, key: bytes = KEY, at: float = NOW, nonce: str = "nonce-nonce-nonce") -> str:
    return signature(key, request, at_wall_s=at, nonce=nonce)


def judged(verifier: Verifier, header: str, request: Signed = CLAIM, at: float = NOW) -> Signed:
    return verifier.judge(header, request.method, request.path, request.body, request.sender, at)


def test_a_signed_request_is_taken_once_and_says_its_epoch() -> None:
    verifier, header = Verifier(KEY), signed()
    assert judged(verifier, header).epoch == 7
    with pytest.raises(NotProven) as refused:
        judged(verifier, header)
    assert refused.value.rule == "replay"


ALTERED = [
    Signed("GET", CLAIM.path, CLAIM.body, CLAIM.sender, 7),
    Signed("POST", "/peer/handoff", CLAIM.body, CLAIM.sender, 7),
    Signed("POST", CLAIM.path, b'{"id":"c2"}', CLAIM.sender, 7),
    Signed("POST", CLAIM.path, CLAIM.body, "http://10.0.0.9:8090", 7),
]


@pytest.mark.parametrize("altered", ALTERED, ids=["method", "path", "body", "sender"])
def test_whatever_is_altered_on_the_way_breaks_the_signature(altered: Signed) -> None:
    with pytest.raises(NotProven) as refused:
        judged(Verifier(KEY), signed(), altered)
    assert refused.value.rule == "signature_wrong"


@pytest.mark.parametrize(("was", "becomes"), [("e=7", "e=9"), ("t=1700000000", "t=1700000001"), ("n=nonce", "n=eonce")])
def test_the_time_the_nonce_and_the_epoch_are_signed_too(was: str, becomes: str) -> None:
    header = signed().replace(was, becomes)
    with pytest.raises(NotProven) as refused:
        judged(Verifier(KEY), header, at=NOW + 1)
    assert refused.value.rule == "signature_wrong"


@pytest.mark.parametrize("header", ["", "v1", "v2," + signed()[3:], signed() + " ", signed(nonce="short"), "Bearer s3cret"])
def test_a_header_that_is_no_signature_is_said_to_be_missing(header: str) -> None:
    with pytest.raises(NotProven) as refused:
        judged(Verifier(KEY), header)
    assert refused.value.rule == "signature_missing"


@pytest.mark.parametrize(("age_s", "taken"), [(60, True), (61, False), (-60, True), (-61, False)])
def test_a_minute_either_way_is_what_clocks_may_differ(age_s: float, taken: bool) -> None:
    header = signed(at=NOW - age_s)
    if taken:
        judged(Verifier(KEY), header)
        return
    with pytest.raises(NotProven, match="clocks right") as refused:
        judged(Verifier(KEY), header)
    assert refused.value.rule == "signature_old"


def test_another_secret_proves_nothing() -> None:
    with pytest.raises(NotProven):
        judged(Verifier(KEY), signed(key=b"another"))


@given(st.lists(st.tuples(st.integers(-3600, 3600), st.integers(0, 9)), max_size=40))
def test_no_jump_of_the_wall_clock_lets_a_request_in_twice(jumps: list[tuple[int, int]]) -> None:
    """The receiver's clock goes anywhere; each of ten requests is sent again and again."""
    verifier = Verifier(KEY)
    taken: list[int] = []
    for offset, which in jumps:
        try:
            judged(verifier, signed(nonce=f"nonce-nonce-nonce-{which}"), at=NOW + offset)
        except NotProven:
            continue
        taken.append(which)
    assert len(taken) == len(set(taken))


def test_memory_is_bounded_and_says_so() -> None:
    verifier = Verifier(KEY, keep=2)
    for n in range(2):
        judged(verifier, signed(nonce=f"nonce-nonce-nonce-{n}"))
    with pytest.raises(NotProven) as refused:
        judged(verifier, signed(nonce="nonce-nonce-nonce-9"))
    assert refused.value.rule == "too_many_requests"
    later = NOW + 200
    judged(verifier, signed(at=later, nonce="nonce-nonce-nonce-9"), at=later)


# ---------------------------------------------------------------- frames


def seals(challenge: str = "c" * 16, nonce: str = "n" * 16, worker: str = "w1") -> tuple[Seal, Seal]:
    key = session_key(KEY, challenge, nonce, worker)
    return Seal(key, "sidecar"), Seal(key, "sidecar")


@given(st.lists(st.text(max_size=40), min_size=1, max_size=8))
def test_frames_arrive_as_they_were_sent(texts: list[str]) -> None:
    sender, receiver = seals()
    assert [receiver.open(sender.close(text)) for text in texts] == texts


@pytest.mark.parametrize("trouble", ["altered", "repeated", "left out", "swapped", "of another connection", "sent back"])
def test_what_happens_to_frames_on_the_way_is_noticed(trouble: str) -> None:
    sender, receiver = seals()
    first, second = sender.close('{"type":"sample","seq":1}'), sender.close('{"type":"sample","seq":2}')
    arriving = {
        "altered": [first.replace("1}", "3}")],
        "repeated": [first, first],
        "left out": [second],
        "swapped": [second, first],
        "of another connection": [seals(nonce="m" * 16)[0].close("{}")],
        "sent back": [Seal(session_key(KEY, "c" * 16, "n" * 16, "w1"), "controller").close("{}")],
    }[trouble]
    with pytest.raises(NotProven):
        for frame in arriving:
            receiver.open(frame)


def test_a_sealed_frame_is_told_from_a_plain_one() -> None:
    sender, _ = seals()
    frame = sender.close('{"type":"hello"}')
    assert is_sealed(frame) and unverified(frame) == '{"type":"hello"}'
    assert not is_sealed('{"type":"hello"}') and not is_sealed("") and not is_sealed("{" + "x" * 63 + " {}")


def test_the_id_of_a_token_gives_neither_it_nor_its_hash_away() -> None:
    digest = "ab" * 32
    assert len(token_id(digest)) == 12 and token_id(digest) not in digest

"""Token text: the same everywhere, different where it must differ."""

from sidecar.emulator.text import (
    TOKEN_CHARS,
    chat_prompt,
    expected_chat_text,
    expected_text,
    ids_digest,
    prompt_digest,
    prompt_tokens,
    token_id,
    token_text,
)


def test_a_token_depends_on_the_prompt_and_its_place_alone() -> None:
    digest = prompt_digest("hello world")
    assert token_text(digest, 3) == token_text(digest, 3)
    assert token_text(digest, 3) != token_text(digest, 4)
    assert token_text(digest, 3) != token_text(prompt_digest("hello word"), 3)


def test_every_token_has_the_same_length_and_needs_no_escaping() -> None:
    digest = prompt_digest("x")
    for i in range(200):
        text = token_text(digest, i)
        assert len(text) == TOKEN_CHARS and text.endswith(" ") and text[:-1].isalnum()
        assert 0 <= token_id(text) < 128_000


def test_the_expected_text_can_start_anywhere() -> None:
    whole = expected_text("a b c", 40)
    assert expected_text("a b c", 25) + expected_text("a b c", 40, start=25) == whole


def test_token_ids_are_a_prompt_too() -> None:
    assert expected_text([1, 2, 3], 4) == "".join(token_text(ids_digest([1, 2, 3]), i) for i in range(4))
    assert ids_digest([1, 2, 3]) != ids_digest([12, 3])


def test_one_word_is_one_token_and_an_empty_prompt_has_one() -> None:
    assert prompt_tokens("one two  three\nfour") == 4
    assert prompt_tokens("") == 1


def test_a_chat_of_text_parts_is_the_same_prompt_as_plain_text() -> None:
    plain = [{"role": "user", "content": "hello there"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
    assert chat_prompt(plain) == chat_prompt(parts)
    assert expected_chat_text(plain, 3) == expected_text("user: hello there", 3)

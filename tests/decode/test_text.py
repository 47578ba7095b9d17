"""Text comes out as soon as it is final, never half a character or part of a stop string."""

import pytest
from tokenizers import Tokenizer, decoders, models

from shardmill.decode import DecodeError, text_after
from shardmill.decode.text import TextStream


def from_bytes(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def feed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(from_bytes, stop)  # type: ignore[arg-type]
    return [stream.push(b) for b in text.encode()], stream


def test_characters_of_several_tokens_come_out_whole() -> None:
    pieces, stream = feed("aé€😀z")
    assert [p for p in pieces if p] == ["a", "é", "€", "😀", "z"]
    assert stream.flush() == ""


def test_long_texts_lose_nothing() -> None:
    text = "naïve – 😀 text, " * 20
    pieces, stream = feed(text)
    assert "".join(pieces) + stream.flush() == text


def test_a_stop_string_over_several_tokens_never_shows() -> None:
    pieces, stream = feed("one. END two", stop=("END", "STOP"))
    assert "".join(pieces) == "one. "
    assert stream.stopped
    assert stream.flush() == ""


def test_the_earliest_stop_string_wins() -> None:
    stream = TextStream(lambda tokens: "a STOP b END"[: len(tokens) * 12], ("END", "STOP"))
    assert stream.push(0) == "a "


def test_text_that_only_began_a_stop_string_is_given_back() -> None:
    pieces, stream = feed("the E", stop=("END",))
    assert "".join(pieces) == "the "
    assert stream.flush() == "E"
    assert not stream.stopped


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    stream = TextStream(from_bytes)  # type: ignore[arg-type]
    assert stream.push(0xE2) == ""
    assert stream.flush() == "\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(DecodeError, match="empty stop string"):
        TextStream(from_bytes, ("",))  # type: ignore[arg-type]


def test_text_is_that_of_the_whole() -> None:
    """Tokenizers that write a word's space by what precedes it keep it where the prompt ends and new text begins."""
    words = Tokenizer(models.WordLevel({"\u2581the": 0, "\u2581end": 1}, unk_token="\u2581the"))
    words.decoder = decoders.Metaspace()
    assert words.decode([1]) == "end"
    assert text_after(words.decode, [0])([1]) == " end"

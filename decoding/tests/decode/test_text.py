"""Text comes out as soon as it is final, never half a character or part of a stop string."""

import random
from collections.abc import Callable, Sequence

import pytest
from drafted_decoding import DecodeError
from drafted_decoding.text import TextStream
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


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
    assert streamed(words.decode, [1], prompt=[0]) == " end"


def byte_level() -> Tokenizer:
    """One token per byte, as GPT-2 writes them, and a few words."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"Ġthe": 256, "end": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Token b is byte b; words begin with SentencePiece's space, of which a text loses its first."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "end": 257, "▁": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def byte_tokens(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """A token for each byte."""
    if tokenizer.token_to_id("<0x00>") is not None:
        return list(content)
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    symbols = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}  # GPT-2's
    return [tokenizer.token_to_id(symbols[byte]) for byte in content]


def streamed(decode: Callable[[Sequence[int]], str], tokens: Sequence[int], prompt: Sequence[int] = ()) -> str:
    """All that a stream gives; never more than three characters are held back."""
    stream, out = TextStream(decode, prompt=prompt), ""
    for token in tokens:
        out += stream.push(token)
        assert len(stream._text) - stream._done <= 3
    return out + stream.flush()


WORDS = [[256], [257], [256, 257]]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_text_of_the_whole(make: Callable[[], Tokenizer], seed: int) -> None:
    """Words, characters of one to four byte tokens in runs of any length, and at the ends of runs bytes of none."""
    tokenizer, rng = make(), random.Random(seed)
    tokens: list[int] = []
    for _ in range(40):
        characters = "".join(rng.choice("é€😀東z") for _ in range(rng.choice((1, 2, 30))))
        wrong = rng.choice(((0xFF, 0xE2, 0xF0), (0x80,)))  # no two of which make a character
        stray = bytes(rng.choice(wrong) for _ in range(rng.choice((1, 2, 5, 60))))
        begun = "😀".encode()[: rng.randrange(1, 4)]
        content = rng.choice((characters.encode(), stray, begun, stray + characters.encode()))
        tokens += byte_tokens(tokenizer, content) + rng.choice(WORDS)
    assert streamed(tokenizer.decode, tokens) == tokenizer.decode(tokens)
    prompt = [256, 257, *byte_tokens(tokenizer, "東東東東".encode())]
    whole = tokenizer.decode([*prompt, 256, *tokens])
    assert streamed(tokenizer.decode, [256, *tokens], prompt) == whole[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("stray", [b"\xff", b"\x80", b"\xe2", b"\xf0\x9f"])
def test_bytes_that_are_no_character_are_not_held_back(make: Callable[[], Tokenizer], stray: bytes) -> None:
    """However many come, and the cost of each is bounded: neither calls nor tokens grow."""
    tokenizer, decoded = make(), list[int]()

    def decode(tokens: Sequence[int]) -> str:
        decoded.append(len(tokens))
        return str(tokenizer.decode(list(tokens)))

    tokens = [257, *byte_tokens(tokenizer, stray * 800)]
    stream, out = TextStream(decode), ""
    for i, token in enumerate(tokens):
        decoded.clear()
        out += stream.push(token)
        assert sum(decoded) <= 150, i
    assert len(tokenizer.decode(tokens)) - len(out) <= 3
    assert out + stream.flush() == tokenizer.decode(tokens)


def test_what_is_out_stays_out() -> None:
    """Byte fallback takes a whole run of bytes back when one is wrong; nobody can wait for the end of every run."""
    tokenizer = byte_fallback()
    tokens = [*"€".encode(), 0xFF, 257]
    assert tokenizer.decode(tokens) == "\ufffd" * 4 + "end"
    stream = TextStream(tokenizer.decode)  # type: ignore[arg-type]
    assert "".join(map(stream.push, tokens)) + stream.flush() == "€\ufffdend"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_that_the_prompt_began_is_completed(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    content = byte_tokens(tokenizer, "😀".encode())
    for cut in range(1, 4):
        assert streamed(tokenizer.decode, [*content[cut:], 257], [257, *content[:cut]]) == "😀end"
        assert streamed(tokenizer.decode, [257], [257, *content[:cut]]) == "end"

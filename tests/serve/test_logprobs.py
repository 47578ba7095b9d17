"""Log-probabilities of a stop string never leave, whatever bytes stand before it and wherever in a token it begins."""

from __future__ import annotations

import random

from drafted_decoding import TokenEvent
from drafted_decoding.text import TextStream
from tokenizers import Tokenizer, decoders, models

from shardmill.serve.logprobs import LogprobLog, TokenLogprob
from shardmill.serve.model import Vocabulary

WORDS = ["▁two", "three", "a", "▁", "é", "st", "op", "stop"]
BYTES = [0xE2, 0x82, 0xAC, 0xC3, 0xA9, 0xFF, 0x41]  # a euro sign, an é, no character at all, an A
STOPS = ["stop", "ee", "€", "é", "st", "\ufffd", "wo th", "op st"]


def byte_fallback() -> Tokenizer:
    """Words and single bytes, as SentencePiece has them: each byte of a wrong run becomes a U+FFFD of its own."""
    symbols = [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def answered(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> tuple[TextStream, str, list[TokenLogprob]]:
    """The stream, its text up to the stop string, and the tokens whose log-probabilities left."""
    stream, log = TextStream(tokenizer.decode, stop, tokenizer.encode("a").ids), LogprobLog(Vocabulary(tokenizer), ())
    text, out = "", []
    for token in tokens:
        start = stream.final
        text += stream.push(token)
        log.push(TokenEvent(token, False, logprob=-1.0, start=start, end=stream.length))
        out += log.release(len(text))
        if stream.stopped:
            break
    return stream, text, out


def test_wrong_bytes_before_a_stop_string_do_not_let_it_out() -> None:
    """Counted as fewer characters than they are in the text, they would."""
    tokenizer, draw, stopped = byte_fallback(), random.Random(1), 0
    for _ in range(3000):
        tokens = [draw.choice([draw.choice(BYTES), 256 + draw.randrange(len(WORDS))]) for _ in range(12)]
        stream, text, out = answered(tokenizer, tokens, draw.sample(STOPS, 2))
        if stream.stopped:
            stopped += 1
            alone = TextStream(tokenizer.decode, (), tokenizer.encode("a").ids)
            left = "".join(alone.push(token) for token in tokens[: len(out)]) + alone.flush()
            assert text.startswith(left), (tokens, text, left)
    assert stopped > 1000


def test_a_character_of_several_tokens_has_one_place() -> None:
    """All its tokens end where it ends, so a stop string right after it holds none of them back."""
    tokenizer = byte_fallback()
    tokens = [256 + WORDS.index("a"), *"€".encode(), 256 + WORDS.index("stop")]
    stream, text, out = answered(tokenizer, tokens, ["stop"])
    assert stream.stopped and text == "a€"
    assert [(token.offset, token.end) for token in out] == [(0, 1), (1, 2), (1, 2), (1, 2)]

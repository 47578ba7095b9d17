"""The bytes of single tokens, in both notations that tokenizers use."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shardmill.serve.model import Vocabulary, byte_alphabet

from .fake import END, byte_tokenizer


def test_the_byte_alphabet_is_the_library_s() -> None:
    """256 characters, those that tokenizers itself uses, each for the byte that it encodes."""
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))
    vocabulary, text = Vocabulary(byte_tokenizer()), "aé 東🙂\n\t\x00\x7f\xad"
    assert b"".join(vocabulary.bytes(t) for t in byte_tokenizer().encode(text).ids) == text.encode()


def test_byte_fallback_and_spaces() -> None:
    """SentencePiece's notation."""
    tokenizer = Tokenizer(models.BPE(vocab={"<0xE6>": 0, "▁the": 1, "é": 2}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = Vocabulary(tokenizer)
    assert [vocabulary.bytes(i) for i in range(3)] == [b"\xe6", b" the", "é".encode()]
    assert vocabulary.text(0) == "\ufffd"


def test_added_and_unknown_tokens() -> None:
    """An added token is its text as it stands; a model may have more logits than the tokenizer has tokens."""
    vocabulary = Vocabulary(byte_tokenizer())
    assert vocabulary.bytes(END) == b"<|end|>"
    assert vocabulary.bytes(100_000) == b""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("Ġ", special=False)])
    assert Vocabulary(tokenizer).bytes(1) == "Ġ".encode()

"""Text of a growing token sequence, and stop strings in it.

A token may end in the middle of a character, and a stop string in the middle of a token. So text is held back until it
can neither change nor begin a stop string.

The output equals the decoding of all tokens at once, with one exception. Tokenizers with byte fallback turn a whole run
of byte tokens into U+FFFD if any byte in the run is wrong, which is certain only at the end of the run. Here the
characters before the wrong byte have been emitted by then, and stay.
"""

from collections.abc import Callable, Sequence
from os.path import commonprefix

from drafted_decoding.engine import DecodeError

Detokenize = Callable[[Sequence[int]], str]
_UNKNOWN = "\ufffd"  # tokenizers write it for bytes that are not, or not yet, a character
_UNFINISHED = 3  # at most this many at the end may become a character, which has up to four bytes
_WINDOW = 8  # tokens that are decoded again with each new one, at least; at most four times as many
_SEAM = 8  # prompt tokens that are decoded together with the new ones


class TextStream:
    """A stream from tokens to final text. The cost of a token is bounded for a text of any length.

    Args:
        detokenize: tokens -> text; bytes that are no character become U+FFFD.
        stop: strings that end the text; the text stops before the first occurrence.
        keep_stop: the text stops after it.
        prompt: the tokens before the text: some tokenizers write a space depending on the previous token. A character
            that the prompt begins and the tokens complete belongs to their text.

    Raises:
        DecodeError: a stop string is empty.
    """

    def __init__(
        self, detokenize: Detokenize, stop: Sequence[str] = (), prompt: Sequence[int] = (), *, keep_stop: bool = False
    ) -> None:
        if any(not s for s in stop):
            raise DecodeError("an empty stop string would stop at once: leave it out")
        self._detokenize = detokenize
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._held = ""  # final, but it may begin a stop string
        self._released = 0  # characters that `push` has returned
        self.stopped = False
        self._tokens = _seam(detokenize, prompt)  # the window: the last tokens
        self._text = detokenize(self._tokens) if self._tokens else ""  # the text of the window
        self._done = len(self._text)  # characters of _text that have been handed on
        self._whole = len(self._tokens)  # tokens of the window whose text has been handed on entirely
        self._begun = _unfinished(self._text)  # characters at the end of the prompt that tokens may still complete

    def push(self, token: int) -> str:
        """Append a token and return the text that became final; set `stopped` when a stop string is complete."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._detokenize(self._tokens)
        out = self._text[: self._done]
        same = self._done if text.startswith(out) else len(commonprefix((out, text)))
        if same < self._done - self._begun:  # the tokenizer revises emitted text, which stays as emitted
            self._restart(self._tokens[self._whole :])
        else:
            self._text, self._done = text, same
        self._hand_on()
        if len(self._tokens) > 2 * _WINDOW:
            self._shorten()
        return self._release()

    @property
    def final(self) -> int:
        """Return the number of characters that no further token can change, including a stop string."""
        return self._released + len(self._held)

    @property
    def length(self) -> int:
        """Return the number of characters of all tokens so far; it falls if several turn out to be one character."""
        return self.final + len(self._text) - self._done

    def flush(self) -> str:
        """Return the text that was held back, at the end of the request."""
        if self.stopped:
            return ""
        rest = self._held + self._text[self._done :]
        self._held = ""
        self._restart([])
        return rest

    def _restart(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._text = self._detokenize(tokens) if tokens else ""
        self._done = self._whole = self._begun = 0

    def _hand_on(self) -> None:
        """Append the text that no further token can change to the held text."""
        text = self._text
        end = len(text) - _unfinished(text)
        if end > self._done:
            self._held += text[self._done : end]
            self._done, self._begun = end, 0
        if self._done == len(text):
            self._whole = len(self._tokens)

    def _shorten(self) -> None:
        """Drop the window's first tokens, if the text of the others does not depend on them."""
        pending = len(self._text) - self._done
        for count in range(_WINDOW, _WINDOW + _UNFINISHED + 1):
            text = self._detokenize(self._tokens[-count:])
            if pending <= len(text) and self._text.endswith(text) and self._stays(text, self._tokens[-count:]):
                break
        else:
            if len(self._tokens) <= 4 * _WINDOW:
                return  # try again with the next token
        self._whole = max(0, self._whole - (len(self._tokens) - count))
        self._tokens = self._tokens[-count:]
        self._text = text
        self._done = max(0, len(text) - pending)

    def _stays(self, text: str, tokens: Sequence[int]) -> bool:
        """Return whether the beginning of `text` is final: no wrong bytes that only lack preceding tokens."""
        beginnings = (self._detokenize(tokens[:count]) for count in range(1, _UNFINISHED + 2))
        return not text.startswith(_UNKNOWN) or all(part.startswith(_UNKNOWN) for part in beginnings)

    def _release(self) -> str:
        stops = [(i, len(s)) for s in self._stop if (i := self._held.find(s)) >= 0]
        if stops:
            self.stopped = True
            start, length = min(stops)
            end = start + length if self._keep_stop else start
        else:
            end = len(self._held) - self._pending_stop()
        out, self._held = self._held[:end], self._held[end:]
        self._released += len(out)
        return out

    def _pending_stop(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0


def _unfinished(text: str) -> int:
    """Return how many characters at the end of `text` may still change."""
    return min(_UNFINISHED, len(text) - len(text.rstrip(_UNKNOWN)))


def _seam(decode: Detokenize, prompt: Sequence[int]) -> list[int]:
    """Return the prompt's last tokens, starting at the beginning of a character if one can be found."""
    for count in range(_SEAM, _SEAM + _UNFINISHED + 1):
        seam = list(prompt[-count:])
        if not seam or not decode(seam).startswith(_UNKNOWN):
            return seam
    return list(prompt[-_SEAM:])

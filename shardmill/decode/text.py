"""Text of a growing token sequence, and stop strings in it.

A token may end in the middle of a character, and a stop string in the middle of a token, so text is held back until it
can neither change nor turn out to begin a stop string.

What comes out is what decoding all tokens at once gives, with one exception. Tokenizers with byte fallback turn a whole
run of byte tokens into U+FFFD if any byte of it is wrong. To know that one would have to wait for the end of the run;
here the characters before the wrong byte are out by then, and stay.
"""

from collections.abc import Callable, Sequence
from os.path import commonprefix

from shardmill.decode.errors import DecodeError

Detokenize = Callable[[Sequence[int]], str]
_UNKNOWN = "\ufffd"  # what tokenizers write for bytes that are no character, or not yet
_UNFINISHED = 3  # of these at the end may still become a character: it has four bytes at most
_WINDOW = 8  # tokens that are decoded again with each new one, at least; at most four times as many
_SEAM = 8  # prompt tokens that are decoded together with the new ones


class TextStream:
    """Takes tokens, gives text as soon as it is final. The cost of a token is bounded, whatever came before it.

    Args:
        detokenize: tokens -> text; bytes that are no character become U+FFFD.
        stop: strings that end the text; the first to appear does, and is not part of it.
        prompt: what the tokens follow: some tokenizers write a space by what precedes it. A character that the prompt
            begins and the tokens complete belongs to their text.

    Raises:
        DecodeError: a stop string is empty.
    """

    def __init__(self, detokenize: Detokenize, stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> None:
        if any(not s for s in stop):
            raise DecodeError("an empty stop string would stop at once: leave it out")
        self._detokenize = detokenize
        self._stop = tuple(stop)
        self._held = ""  # final, but it may begin a stop string
        self._released = 0  # characters that `push` has returned
        self.stopped = False
        self._tokens = _seam(detokenize, prompt)  # the window: the last tokens
        self._text = detokenize(self._tokens) if self._tokens else ""  # theirs
        self._done = len(self._text)  # characters of it that have been handed on
        self._whole = len(self._tokens)  # tokens of the window whose text was handed on to its end
        self._begun = _unfinished(self._text)  # characters at the end of the prompt that tokens may still complete

    def push(self, token: int) -> str:
        """Text that has become final; sets `stopped` when a stop string is complete."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._detokenize(self._tokens)
        out = self._text[: self._done]
        same = self._done if text.startswith(out) else len(commonprefix((out, text)))
        if same < self._done - self._begun:  # the tokenizer takes back what is out: that stays
            self._restart(self._tokens[self._whole :])
        else:
            self._text, self._done = text, same
        self._hand_on()
        if len(self._tokens) > 2 * _WINDOW:
            self._shorten()
        return self._release()

    @property
    def final(self) -> int:
        """Characters that no further token can change, those of a stop string included."""
        return self._released + len(self._held)

    @property
    def length(self) -> int:
        """Characters of all tokens so far. It falls where several of them turn out to be one character."""
        return self.final + len(self._text) - self._done

    def flush(self) -> str:
        """What was held back, at the end of the request."""
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
        """Adds to the held text what no further token can change."""
        text = self._text
        end = len(text) - _unfinished(text)
        if end > self._done:
            self._held += text[self._done : end]
            self._done, self._begun = end, 0
        if self._done == len(text):
            self._whole = len(self._tokens)

    def _shorten(self) -> None:
        """Drops the window's first tokens, if the text of the others does not depend on them."""
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
        """Whether `text` of `tokens` begins as it always will: not with bytes that are wrong for want of others."""
        beginnings = (self._detokenize(tokens[:count]) for count in range(1, _UNFINISHED + 2))
        return not text.startswith(_UNKNOWN) or all(part.startswith(_UNKNOWN) for part in beginnings)

    def _release(self) -> str:
        found = [i for s in self._stop if (i := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            end = min(found)
        else:
            end = len(self._held) - self._pending_stop()
        out, self._held = self._held[:end], self._held[end:]
        self._released += len(out)
        return out

    def _pending_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0


def _unfinished(text: str) -> int:
    """How many characters at the end of `text` may still become others."""
    return min(_UNFINISHED, len(text) - len(text.rstrip(_UNKNOWN)))


def _seam(decode: Detokenize, prompt: Sequence[int]) -> list[int]:
    """The prompt's last tokens, from the beginning of a character on where that can be found."""
    for count in range(_SEAM, _SEAM + _UNFINISHED + 1):
        seam = list(prompt[-count:])
        if not seam or not decode(seam).startswith(_UNKNOWN):
            return seam
    return list(prompt[-_SEAM:])

"""Text of a growing token sequence, and stop strings in it.

A token may end in the middle of a character, and a stop string in the middle of a token, so text is held
back until it can neither change nor turn out to begin a stop string.
"""

from collections.abc import Callable, Sequence

from shardmill.decode.errors import DecodeError

Detokenize = Callable[[Sequence[int]], str]
_WINDOW = 16  # tokens decoded anew each time: long enough for any character split over tokens
_SEAM = 8  # prompt tokens decoded together with the new ones: some tokenizers write a space by what precedes it


def text_after(decode: Detokenize, prompt: Sequence[int]) -> Detokenize:
    """A detokeniser of the tokens that follow `prompt`, made of one of whole texts."""
    seam = list(prompt[-_SEAM:])
    known = len(decode(seam))
    return lambda tokens: decode([*seam, *tokens])[known:]


class TextStream:
    """Feeds on tokens, gives text as soon as it is final.

    Args:
        detokenize: tokens -> text; incomplete characters become U+FFFD, as every byte-level tokenizer does.
        stop: strings that end the text; the first to appear does, and is not part of it.
    """

    def __init__(self, detokenize: Detokenize, stop: Sequence[str] = ()) -> None:
        if any(not s for s in stop):
            raise DecodeError("an empty stop string would stop at once: leave it out")
        self._detokenize = detokenize
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._known = ""  # text of the tokens that are decoded again next time
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Text that has become final; sets `stopped` when a stop string is complete."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._detokenize(self._tokens)
        if text.endswith("\ufffd"):
            return ""
        self._held += text[len(self._known) :]
        self._known = text
        if len(self._tokens) > 2 * _WINDOW:
            del self._tokens[:-_WINDOW]
            self._known = self._detokenize(self._tokens)
        return self._release()

    def flush(self) -> str:
        """What was held back, at the end of the request."""
        if self.stopped:
            return ""
        rest = self._held + self._detokenize(self._tokens)[len(self._known) :]
        self._held, self._tokens, self._known = "", [], ""
        return rest

    def _release(self) -> str:
        found = [i for s in self._stop if (i := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            end = min(found)
        else:
            end = len(self._held) - self._pending_stop()
        out, self._held = self._held[:end], self._held[end:]
        return out

    def _pending_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0

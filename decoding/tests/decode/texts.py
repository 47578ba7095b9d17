"""Random texts of few tokens, which repeat themselves."""

import random


def text(seed: int, length: int = 300, vocab: int = 6) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]

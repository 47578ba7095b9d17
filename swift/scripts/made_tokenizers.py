"""Small tokenizer.json files of every kind that the Swift package reads, and texts that are hard for tokenizers.

    python swift/scripts/made_tokenizers.py

writes swift/Tests/Vectors/tokenizers.json: each kind, with what the package `tokenizers` makes of some texts. The files
are made from a few sentences, always the same ones, by the plainest training: the most frequent pair first.
"""

from __future__ import annotations

import itertools
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

VECTORS = Path(__file__).parents[1] / "Tests" / "Vectors" / "tokenizers.json"
SENTENCES = """\
The old miller said that the mill wouldn't grind on Sundays, and they'd heard it before; I'LL say it's 12345 turns.
def turn(stone, times=100):\n    for i in range(times):\n        stone.turn(i)  # it's slow\n    return stone\n
naïve café, Straße, ÅNGSTRÖM, Ünïcödé; Привет, мир! 日本語の文章です。 안녕하세요 세계 مرحبا ٣٤ नमस्ते ½ x² 3.14
HTMLParser parseJSONFile camelCase snake_case __init__ https://example.com/a?b=c&d=e  <p>two  spaces</p>\t\ttabs\r\n
"""
GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = GPT2 | {"use_regex": False}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace("{1,3}", "")
_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LOWER}{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{_SHORT}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}"
)
TEKKEN = O200K.replace(_SHORT, "").replace("{1,3}", "")
MARK = "\u2581"
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
UNSPACE = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}


def _split(regex: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def _chain(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def _added(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"content": content, **plain, **flags}


def _around(first: str, last: str = "") -> dict[str, Any]:
    def special(name: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": 0}}] if name else []

    single = [*special(first), {"Sequence": {"id": "A", "type_id": 0}}, *special(last)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "names": [n for n in (first, last) if n]}


BYTES_BACK = _chain("decoders", UNSPACE, {"type": "ByteFallback"}, {"type": "Fuse"})
STRIPPED = _chain(
    "decoders",
    UNSPACE,
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
END = _added("<|end|>", special=True)
FLAGGED = [
    END,
    _added("<mask>", lstrip=True, special=True),
    _added("[GO]", rstrip=True),
    _added("turn", single_word=True),
    _added("Stone", normalized=True),
    _added("<|end|>>"),
    _added("both", lstrip=True, rstrip=True, single_word=True, normalized=True),
]
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
LOWER = {"type": "Lowercase"}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"pre_tokenizer": GPT2, "added": [END], "post_processor": GPT2},
    "roberta": {
        "pre_tokenizer": GPT2 | {"add_prefix_space": True},
        "added": [_added("<s>", special=True), _added("</s>", special=True), *FLAGGED],
        "post_processor": {"type": "RobertaProcessing", "trim_offsets": True, "add_prefix_space": True},
    },
    "llama3": {
        "pre_tokenizer": _chain("pretokenizers", _split(CL100K), PLAIN),
        "model": {"ignore_merges": True},
        "added": [_added("<|begin|>", special=True), END],
        "post_processor": _chain("processors", GPT2, _around("<|begin|>")),
    },
    "qwen": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": _chain("pretokenizers", _split(QWEN), PLAIN),
        "added": FLAGGED,
    },
    "o200k": {"pre_tokenizer": _chain("pretokenizers", _split(O200K), PLAIN), "added": [END]},
    "tekken": {"pre_tokenizer": _chain("pretokenizers", _split(TEKKEN), PLAIN), "added": [END]},
    "digits": {
        "pre_tokenizer": _chain("pretokenizers", {"type": "Digits", "individual_digits": True}, GPT2),
        "added": [END],
    },
    "runs": {
        "normalizer": _chain("normalizers", {"type": "NFKC"}, LOWER),
        "pre_tokenizer": _chain("pretokenizers", {"type": "Digits", "individual_digits": False}, PLAIN),
        "added": FLAGGED,
    },
    "llama2": {
        "normalizer": _chain("normalizers", {"type": "Prepend", "prepend": MARK}, SPACE),
        "decoder": STRIPPED,
        "added": [_added("<s>", special=True), _added("</s>", special=True)],
        "post_processor": _around("<s>"),
    },
    "metaspace": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False},
        "decoder": STRIPPED,
        "added": [_added("<s>", special=True), *FLAGGED],
        "post_processor": _around("<s>"),
    },
    "marked": {
        "pre_tokenizer": {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "always", "split": True},
        "added": FLAGGED,
    },
    "gemma": {
        "normalizer": SPACE,
        "pre_tokenizer": _split(" ", "MergedWithPrevious") | {"pattern": {"String": " "}},
        "decoder": BYTES_BACK,
        "added": [_added("<bos>", special=True), _added("\n\n"), _added("  ")],
        "post_processor": _around("<bos>"),
    },
    "unknown": {
        "normalizer": _chain(
            "normalizers", {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "NFD"}
        ),
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"byte_fallback": False, "fuse_unk": False},
        "decoder": {"type": "Fuse"},
    },
    "fused": {
        "normalizer": {"type": "NFKD"},
        "pre_tokenizer": _chain(
            "pretokenizers", {"type": "WhitespaceSplit"}, {"type": "Punctuation", "behavior": "MergedWithPrevious"}
        ),
        "model": {"byte_fallback": False},
        "decoder": {"type": "Fuse"},
    },
    **{
        f"split_{behavior}_{invert}".lower(): {
            "pre_tokenizer": _chain("pretokenizers", _split(r"\s|\d|[aeiou]+", behavior, invert), PLAIN),
            "model": {},
        }
        for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
        for invert in (False, True)
    },
    "bert": {
        "normalizer": BERT | {"lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "added": [
            _added("[CLS]", special=True),
            _added("[SEP]", special=True),
            _added("[MASK]", lstrip=True, special=True),
        ],
        "post_processor": _around("[CLS]", "[SEP]"),
    },
    "cased": {
        "normalizer": BERT | {"lowercase": False},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "added": [_added("[CLS]", special=True), _added("[SEP]", special=True)],
        "post_processor": {"type": "BertProcessing"},
    },
}


def made(name: str, merges: int = 150) -> dict[str, Any]:
    """Return a tokenizer.json of one of the KINDS."""
    kind = KINDS[name]
    bare = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None}
    byte_level = "ByteLevel" in json.dumps(kind.get("pre_tokenizer"))
    bare |= {"normalizer": kind.get("normalizer"), "pre_tokenizer": kind.get("pre_tokenizer")}
    bare |= {"decoder": kind.get("decoder", GPT2), "model": {"type": "BPE", "vocab": {}, "merges": []}}
    words = _words(Tokenizer.from_str(json.dumps(bare)))
    tokens = [added["content"] for added in kind.get("added", []) if not added["normalized"]]
    if kind.get("decoder", {}).get("type") == "WordPiece":
        pieces = sorted({c for word in words for c in word} | {f"##{c}" for word in words for c in word[1:]})
        pieces += [word for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0])) if len(word) > 1]
        pieces += ["##" + word[2:] for word in sorted(words) if len(word) > 3]
        model: dict[str, Any] = {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 20,
            "vocab": _numbered(["[UNK]", *tokens, *pieces]),
        }
    else:
        alphabet = _byte_letters() if byte_level else ["<unk>", *sorted({c for word in words for c in word})]
        if not byte_level and kind.get("model", {}).get("byte_fallback", True):
            alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
        pairs = _merges(words, merges)
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if byte_level else "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": not byte_level,
            "byte_fallback": not byte_level,
            "ignore_merges": False,
            "vocab": _numbered([*tokens, *alphabet, *(a + b for a, b in pairs)]),
            "merges": [list(pair) for pair in pairs],
            **kind.get("model", {}),
        }
        if kind.get("model", {}).get("ignore_merges"):  # a word that no merge leads to
            model["vocab"]["grind"] = len(model["vocab"])
    ids = dict(model["vocab"])
    for added in kind.get("added", []):
        ids.setdefault(added["content"], len(ids))
    bare["added_tokens"] = [{"id": ids[added["content"]], **added} for added in kind.get("added", [])]
    return bare | {"model": model, "post_processor": _resolved(kind.get("post_processor"), ids)}


def _words(tokenizer: Tokenizer) -> Counter[str]:
    """Return the words of the sentences, as a tokenizer without merges divides them."""
    text = SENTENCES if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(SENTENCES)
    if tokenizer.pre_tokenizer is None:
        return Counter(text.replace(MARK, f" {MARK}").split())
    return Counter(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text) if word)


def _merges(words: Counter[str], count: int) -> list[tuple[str, str]]:
    """Return the pairs to merge: each the most frequent one of its time, of equals the first by its letters."""
    split = {word: list(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in split.items():
            for pair in itertools.pairwise(symbols):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for symbols in split.values():
            at = 0
            while at + 1 < len(symbols):
                if (symbols[at], symbols[at + 1]) == best:
                    symbols[at : at + 2] = ["".join(best)]
                at += 1
    return merges


def _byte_letters() -> list[str]:
    """Return the letters that stand for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: place for place, token in enumerate(dict.fromkeys(tokens))}


def _resolved(post: dict[str, Any] | None, ids: dict[str, int]) -> dict[str, Any] | None:
    """Return a post-processor with the ids of the tokens that it adds."""
    if post is None or post["type"] == "ByteLevel":
        return post
    if post["type"] == "Sequence":
        return post | {"processors": [_resolved(step, ids) for step in post["processors"]]}
    if post["type"] == "TemplateProcessing":
        special = {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in post["names"]}
        return {key: value for key, value in post.items() if key != "names"} | {"special_tokens": special}
    first, last = ("<s>", "</s>") if post["type"] == "RobertaProcessing" else ("[CLS]", "[SEP]")
    return post | {"sep": [last, ids[last]], "cls": [first, ids[first]]}


WORDS = [
    "def ",
    "return",
    "the ",
    "don't",
    "I'LL",
    "'s",
    "123456",
    "3.14",
    " \n\n",
    "\t\t",
    "    ",
    "\r\n",
    "\n/",
    "<s>",
    "</s>",
    "<|end|>",
    "<|end|>>",
    "<mask>",
    "[GO]",
    "turn",
    "Stone",
    "stone",
    "both",
    "<bos>",
    "[MASK]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    "<unk>",
    "<0x41>",
    "\xe9",
    "e\u0301",
    "\xc5",
    "A\u030a",
    "\uac00",
    "\u1100\u1161",
    "\ufb01",
    "\u0130",
    "\xdf",
    "\u017f",
    "K",
    "www.example.com",
    "x_y",
    "__init__",
    "\u65e5\u672c\u8a9e",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "...",
    "!!!",
    "na\xefve",
    "\u01c5",
    "\xbd",
    "\xb2",
    "\u0663\u0664",
    "\u2167",
    "\u2581",
    "\u2581the",
    "HTMLParser",
    "parseJSON",
    "\xc5NGSTR\xd6M",
    "grind",
    "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\uc548\ub155",
    "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0301",
    "\xa0",
    "\u3000",
    "\x85",
    "\u2028",
    "\u200b",
    "\ufeff",
    "\x00",
    "\ufffd",
    "'Ll",
    "'tS",
    "1234567890",
    "\u0663\u0664\u0665\u0666",
    "'Re",
    "don\u2019t",
    "$100",
    "&amp;",
    "://",
    "\x1c",
    "'\u017f",
    "'\u017fa",
    "\u0301A",
    "A\u0301b",
    "\u02b0",
    "\u01c5a",
    "\x0b\x0c",
    " 'm",
    " n't",
    " .",
    "a\xad b",
    "a" * 90,
    " " * 70,
    ",",
    ", ",
    "the" * 30,
    "\n" * 9,
    "9" * 40,
]
RANGES = [
    (32, 127),
    (0xA0, 0x250),
    (0x370, 0x600),
    (0x900, 0x980),
    (0x4E00, 0x4F00),
    (0x1F300, 0x1F650),
    (0x300, 0x370),
]


def nasty_texts(count: int, seed: int = 7) -> Iterator[str]:
    """Yield texts of hard pieces and assigned characters of many scripts."""
    rng = random.Random(seed)

    def piece() -> str:
        if rng.random() < 0.55:
            return rng.choice(WORDS)
        while True:
            character = chr(rng.randrange(*rng.choice(RANGES)))
            if unicodedata.category(character) not in ("Cn", "Cs", "Co"):
                return character

    for _ in range(count):
        yield "".join(piece() for _ in range(rng.randrange(14)))


def cases(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield each kind's file, the ids of texts, their places in characters, and the texts of ids."""
    for name in KINDS:
        file = json.dumps(made(name, merges=60), ensure_ascii=False)
        tokenizer = Tokenizer.from_str(file)
        encoded = [tokenizer.encode(text) for text in texts]
        ids = [one.ids for one in encoded]
        places = [[list(place) for place in one.offsets] for one in encoded]
        decoded = [tokenizer.decode(one, skip_special_tokens=False) for one in ids]
        yield {"name": name, "file": file, "texts": list(texts), "ids": ids, "places": places, "decoded": decoded}


if __name__ == "__main__":
    recorded = cases(list(nasty_texts(30, seed=3)))
    lines = ",\n".join(json.dumps(case) for case in recorded)
    VECTORS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")

"""A conversation with pictures: the tokens of transformers' processors, with a number for each row.

What looks like a placeholder in somebody's text stays text, in whatever field it stands.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from shardmill.errors import MediaError
from shardmill.media.image_rules import Area, ImageRules, Placeholder, Tiles
from shardmill.media.prompt import MediaPrompt, SeenPicture, see_picture

from .hostile import photo, saved

AROUND = "<fake_token_around_image>"
QWEN = ImageRules(
    patch=8,
    merge=2,
    filter="bicubic",
    scale=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    size=Area(16 * 16, 64 * 64),
    text=Placeholder(mark="<|image_pad|>", row="<|image_pad|>"),
)
TILED = ImageRules(
    patch=8,
    merge=2,
    filter="lanczos",
    scale=1 / 255,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    size=Tiles(64, 32, 4096),
    text=Placeholder(
        mark="<image>",
        row="<image>",
        after=AROUND,
        tile=AROUND + "<row_{row}_col_{column}>",
        tile_row_end="\n",
        tiles_end="\n",
        whole=AROUND + "<global-img>",
    ),
)
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<image>", AROUND, "<global-img>", "<row_1_col_1>"]
SPECIAL += ["<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>", "<|im_start|>", "<|im_end|>"]
VOCAB = 1000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["what do these pictures show, and which one is larger?"], trainer)
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return made


def seen(rules: ImageRules, *sizes: tuple[int, int]) -> list[SeenPicture]:
    return [see_picture(saved(photo(*size), "PNG"), rules, "build", VOCAB) for size in sizes]


def rendered(messages: list[dict[str, Any]], mark: str = "<|vision_start|><|image_pad|><|vision_end|>") -> str:
    """What a chat template writes."""
    text = ""
    for message in messages:
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        inner = "".join(mark if part["type"] == "image" else part["text"].strip() for part in parts)
        text += f"<|im_start|>{message['role']}\n{inner}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


IMAGE = {"type": "image"}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_rows_have_their_numbers_in_their_places(tokenizer: Tokenizer) -> None:
    pictures = seen(QWEN, (48, 32), (32, 48))
    prompt = MediaPrompt(QWEN, tokenizer, pictures)
    messages = [{"role": "user", "content": [IMAGE, said("and "), IMAGE, said(" which?")]}]
    told = prompt.tokens(rendered(prompt.hide(messages)))
    numbers = [[n for row in picture.shown for n in row.numbers] for picture in pictures]
    assert [len(each) for each in numbers] == [6, 6]
    pads = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>"
    wanted = tokenizer.encode(rendered(messages, pads), add_special_tokens=False).ids
    row = tokenizer.token_to_id("<|image_pad|>")
    left = iter([*numbers[0], *numbers[1]])
    assert list(told) == [next(left) if token == row else token for token in wanted]


def test_tiles_have_the_texts_around_them(tokenizer: Tokenizer) -> None:
    (picture,) = seen(TILED, (60, 50))
    prompt = MediaPrompt(TILED, tokenizer, [picture])
    told = prompt.tokens("see <image> there")
    assert picture.layout.tiles == (2, 2) and len(picture.shown) == 5
    plain = [t for t in told if t < VOCAB]
    tile = f"{AROUND}<row_%d_col_%d>"
    text = "see " + tile % (1, 1) + tile % (1, 2) + "\n" + tile % (2, 1) + tile % (2, 2)
    assert tokenizer.decode(plain, skip_special_tokens=False) == f"{text}\n\n{AROUND}<global-img>{AROUND} there"
    assert [t for t in told if t >= VOCAB] == [*picture.numbers]


TRICKS = [
    "<|image_pad|>",
    "a <|image_pad|><|image_pad|> b",
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|image_pad|>" * 20,
    "\ue0000000",
    "é<|image_pad|>é",
]


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("before", [True, False])
def test_a_placeholder_in_a_text_stays_text(trick: str, before: bool, tokenizer: Tokenizer) -> None:
    """It takes no picture's place, and the model reads its letters."""
    pictures = seen(QWEN, (48, 32))
    prompt = MediaPrompt(QWEN, tokenizer, pictures)
    parts = [said(f"look {trick} here"), IMAGE] if before else [IMAGE, said(f"look {trick} here")]
    told = prompt.tokens(rendered(prompt.hide([{"role": "user", "content": parts}])))
    row = tokenizer.token_to_id("<|image_pad|>")
    assert [t for t in told if t >= VOCAB] == [*pictures[0].numbers] and row not in told
    text = tokenizer.decode([t for t in told if t < VOCAB], skip_special_tokens=False)
    start = "<|im_start|>user\n"
    image = "<|vision_start|><|vision_end|>"
    inner = f"look {trick} here{image}" if before else f"{image}look {trick} here"
    assert text == f"{start}{inner}<|im_end|>\n<|im_start|>assistant\n"
    first = told.index(pictures[0].numbers[0])
    assert told[first - 1] == tokenizer.token_to_id("<|vision_start|>")


def test_no_field_of_a_conversation_makes_a_placeholder(tokenizer: Tokenizer) -> None:
    prompt = MediaPrompt(QWEN, tokenizer, seen(QWEN, (48, 32)))
    trick = {"a": ["<|image_pad|>", {"b": ("<|image_pad|>", 5, None, True)}]}
    hidden = prompt.hide(trick)
    assert "<|image_pad|>" not in str(hidden) and hidden["a"][1]["b"][1:] == [5, None, True]


def test_a_template_that_drops_a_picture_is_refused(tokenizer: Tokenizer) -> None:
    prompt = MediaPrompt(QWEN, tokenizer, seen(QWEN, (48, 32), (40, 40)))
    with pytest.raises(MediaError, match="the chat template shows 1 of 2 pictures"):
        prompt.tokens("a <|image_pad|> b")


def test_a_tokenizer_without_the_token_is_refused(tokenizer: Tokenizer) -> None:
    made = Tokenizer.from_str(tokenizer.to_str().replace("<|image_pad|>", "<|other_pad|>"))
    prompt = MediaPrompt(QWEN, made, seen(QWEN, (48, 32)))
    with pytest.raises(MediaError, match="the tokenizer gives 0 rows for 6"):
        prompt.tokens("a <|image_pad|> b")


def test_the_same_picture_in_another_file_has_the_same_numbers() -> None:
    """What decides is what the model sees: another format of the same pixels is the same picture."""
    image = photo(48, 32)
    for form, more in (("PNG", {"compress_level": 1}), ("WEBP", {"lossless": True})):
        file = BytesIO()
        image.save(file, form, **more)
        assert see_picture(file.getvalue(), QWEN, "build", VOCAB).numbers == seen(QWEN, (48, 32))[0].numbers
    assert {*seen(QWEN, (48, 32))[0].numbers}.isdisjoint(seen(QWEN, (48, 31))[0].numbers)

"""What the server serves: its settings, and a built model as requests see it, loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from drafted_decoding import (
    ContextPolicy,
    Detokenize,
    Engine,
    GrammarTokenizer,
    LabelCalibration,
    Session,
    choose_layout,
)
from drafted_decoding.drafters import TrainedEngine

from shardmill import machine
from shardmill.checkpoint.tokenizer import encode_beginning, read_tokenizer
from shardmill.errors import ShardmillError
from shardmill.files import digest, load_json, parse_json
from shardmill.runtime import process
from shardmill.runtime.adapters import adapter_names
from shardmill.runtime.manifest import read_manifest, verify_width
from shardmill.serve.pictures import PictureReader, picture_reader
from shardmill.serve.protocol import invalid
from shardmill.serve.requests import ChatRequest, GenerationRequest
from shardmill.serve.sounds import SoundReader, sound_reader
from shardmill.serve.tools import ToolFormat, find_format
from shardmill.templates.render import ChatTemplate, TemplateFacts, load_template, turn_end
from shardmill.templates.thoughts import CHANNEL, ThoughtFormat, find_thoughts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Map byte-level BPE's characters to bytes: printable Latin-1 to itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """A lookup of single tokens in a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = parse_json(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))}
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self._tokenizer = tokenizer

    def bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of the token; empty if the tokenizer does not know the number."""
        if token in self._added:
            return self._added[token].encode()
        symbol = self._tokenizer.id_to_token(token)
        if symbol is None:
            return b""
        if self._alphabet is not None and all(c in self._alphabet for c in symbol):
            return bytes(self._alphabet[c] for c in symbol)
        byte = _BYTE.fullmatch(symbol)
        return bytes([int(byte[1], 16)]) if byte else symbol.replace(_SPACE, " ").encode()

    def joined(self, tokens: Sequence[int]) -> str:
        """Return the texts of tokens as one text."""
        return b"".join(map(self.bytes, tokens)).decode(errors="replace")

    def text(self, token: int) -> str:
        """Return the token's text, with U+FFFD for bytes that are not whole characters."""
        return self.bytes(token).decode(errors="replace")


@dataclass(frozen=True)
class Limits:
    """Limits on requests and connections.

    Attributes:
        queue: requests that wait while one runs; one more is answered 429.
        open_requests: requests accepted and not yet answered completely, in any state; one more is answered 429.
        prompt_tokens, max_tokens: per request; None: the size of the context, even if it slides.
        body_bytes: longest request body.
        body_seconds: time that a client has to send the body.
        head_seconds: time that a new connection has to send the head of a request.
        kept_seconds: time after an answer in which the next head may come; clients close a connection earlier.
        idle_connections: connections that may wait for a request; one more closes the oldest.
        backlog: connections that may wait to be accepted.
        stall_seconds: time after which a stream is closed whose client reads nothing.
        keepalive_seconds: time without data after which a stream sends a comment.
        grace_seconds: time that the running request has to finish when the server shuts down.
    """

    queue: int = 64
    open_requests: int = 256
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    head_seconds: float = 10.0
    kept_seconds: float = 30.0
    idle_connections: int = 256
    backlog: int = 128
    stall_seconds: float = 60.0
    keepalive_seconds: float = 10.0
    grace_seconds: float = 10.0


@dataclass(frozen=True)
class Settings:
    """Address and access of the server, and defaults of requests.

    Attributes:
        host: the address of the server.
        port: 0 lets the system choose one.
        allowed_hosts: names to accept in a request's `Host` besides this machine's, for example a proxy's, if `host`
            is a loopback address.
        allowed_origins: origins of web pages (`https://NAME:PORT`) that may ask this server from a browser.
        api_key: clients must send it as `Authorization: Bearer KEY`; None: no key is needed.
        drafter: the drafter of requests that name none.
        policy: the draft policy, by name.
        draft_table: file that the drafter `learned` starts with, if it exists, and that is saved at the end.
        guard_margin: for engines whose rows differ in their last bits with the width of a pass: rows whose two best
            logits are closer than this run again alone; 0: none.
        context_policy: what happens when the context is full: stop, or slide on.
        prefix_cache: bytes for prefixes of earlier texts, see `decode.prefixes`; 0 keeps none.
        system_prompt: the system prompt of many requests, which is kept from the start; empty: none.
        ungated: what gates of the build say that have not passed.
        limits: limits on requests and connections.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_key: str | None = None
    drafter: str = "ngram"
    policy: str = "cost_model"
    draft_table: Path | None = None
    guard_margin: float = 0.0
    context_policy: ContextPolicy = "stop"
    prefix_cache: int = 1 << 30
    system_prompt: str = ""
    ungated: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Model:
    """A resident model.

    Attributes:
        name: the model's name for clients.
        engine: computes the logits.
        engine_name: the engine that runs the programs: coreml or portable.
        tokenizer: the model's tokenizer.
        eos: tokens that end an answer.
        template: messages -> text that ends where the assistant's answer begins; None if the checkpoint has none.
        template_variables: the template's own variables, which a request may set.
        tools: how the template teaches the model to call functions; None if it does not, or in an unknown way.
        thoughts: the marks around the model's thoughts; None if the template contains none.
        sampling: the sampling of requests that name no temperature; empty: OpenAI's defaults.
        draft_session: a session on a second model's engine, for the drafter `draft_model`.
        head: the engine of the build's own drafter, if it has one.
        head_name: the name of that drafter.
        calibration: of the probabilities of labels; None: they are as the model gives them.
        fingerprint: changes when the model does.
        tokenizer_digest: changes when the tokenizer does.
        threads: number of the engine's threads, if it can choose.
        build: the folder with the model's adapters; None: it takes none.
        checked: what `shardmill check` found of it on this machine; empty: nothing was compared.
        pictures: what reads the pictures of requests; None: it takes none.
        sounds: what reads the sounds of requests; None: it takes none.
    """

    name: str
    engine: Engine
    engine_name: str
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    template: ChatTemplate | None = None
    template_variables: frozenset[str] = frozenset()
    tools: ToolFormat | None = None
    thoughts: ThoughtFormat | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    draft_session: Session | None = None
    head: TrainedEngine | None = None
    head_name: str = ""
    calibration: LabelCalibration | None = None
    fingerprint: str = ""
    tokenizer_digest: str = ""
    threads: int | None = None
    build: Path | None = None
    checked: str = ""
    pictures: PictureReader | None = None
    sounds: SoundReader | None = None
    _grammar: Lock = field(default_factory=Lock, repr=False, compare=False)
    _prepared: list[GrammarTokenizer] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Return the text of single tokens."""
        return Vocabulary(self.tokenizer)

    def adapters(self) -> list[str]:
        """Return the names of the model's adapters; one that was added a moment ago is among them."""
        return adapter_names(self.build) if self.build else []

    def tools_of(self, request: GenerationRequest) -> ToolFormat | None:
        """Return the format of the calls in an answer; None if the answer is text. Harmony always has channels."""
        if self.tools is None or not isinstance(request, ChatRequest):
            return None
        free = request.response_format is None and request.structured_outputs is None
        channels = self.channels if free else None
        return self.tools if request.functions else channels

    @property
    def channels(self) -> ToolFormat | None:
        """Return the format of answers in channels, harmony's; None if answers have none."""
        return self.tools if self.tools is not None and self.tools.style == "harmony" else None

    def grammar_tokenizer(self) -> GrammarTokenizer:
        """Return the tokenizer in the form that grammars need; built by the first request while others wait.

        Raises:
            DecodeError: the grammar library is missing, or it can't use the tokenizer.
        """
        with self._grammar:
            if not self._prepared:
                self._prepared.append(
                    GrammarTokenizer(self.tokenizer.to_str(), vocab=self.engine.vocab, eos=self.eos[0])
                )
        return self._prepared[0]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a text.

        Args:
            text: the text.
            special: True to add the special tokens that the tokenizer puts before a text.

        Raises:
            ApiError: the text contains half of a surrogate pair, which no tokenizer accepts.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid("the prompt is not valid Unicode: it contains half of a surrogate pair") from error
        if special:
            return encode_beginning(self.tokenizer, text)
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens of a text."""
        text: str = self.tokenizer.decode(tokens)
        return text

    def decoder(self, written: Sequence[str]) -> Detokenize:
        """Return a function that decodes tokens, and writes the special tokens in the texts `written` as text."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        dropped = {i for i, token in added if token.special and not any(token.content in text for text in written)}

        def decode(tokens: Sequence[int]) -> str:
            shown = [token for token in tokens if token not in dropped]
            return str(self.tokenizer.decode(shown, skip_special_tokens=False))

        return decode


DECIDE_CALIBRATION = "decide_calibration.json"  # of the checkpoint, beside its tokenizer


def read_decide_calibration(file: Path) -> LabelCalibration:
    """Return a checkpoint's calibration of decisions; the file has the form of `runtime.spans.read_calibration`.

    Raises:
        ShardmillError: the file is no calibration.
    """
    try:
        point = load_json(file)["operating_points"]["default"]
        biases = {str(label): float(bias) for label, bias in point.get("biases", {}).items()}
        calibration = LabelCalibration(float(point.get("temperature", 1.0)), biases)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ShardmillError(f"{file}: no calibration of decisions: {error}; correct it, and build again") from error
    if not (0 < calibration.temperature < float("inf") and all(abs(bias) < float("inf") for bias in biases.values())):
        raise ShardmillError(f"{file}: the temperature must be above 0, and all numbers finite; build again")
    return calibration


def load_model(
    build: Path,
    draft_build: Path | None,
    precision: str,
    context_policy: ContextPolicy = "stop",
    chat_template: Path | None = None,
) -> Model:
    """Load a built model, and its draft model if it has one.

    Args:
        build: folder of a finished build.
        draft_build: the draft model's build folder.
        precision: the portable engine's precision, "fp32" or "fp16"; ignored on Core ML.
        context_policy: what happens when the context is full, also for the draft model.
        chat_template: a file with a chat template to use instead of the checkpoint's.

    Raises:
        DecodeError: the context is too small to slide.
        ShardmillError: a folder is not a finished build, or a file in it can't be loaded.
    """
    manifest = read_manifest(build)
    choose_layout(context_policy, manifest["context"], verify_width(manifest))
    tokenizer = read_tokenizer(build / manifest["tokenizer"]["path"])
    template = load_template((build / manifest["tokenizer"]["path"]).parent, chat_template)
    facts = template.facts() if template else TemplateFacts()
    texts = manifest.get("texts", {})
    calibrated = DECIDE_CALIBRATION in texts.get("files", {})
    engine = process.load_engine(build, precision)
    return Model(
        name=manifest["model"],
        tokenizer=tokenizer,
        template=template,
        template_variables=facts.variables,
        tools=find_format(facts.tools),
        thoughts=find_thoughts(facts.text + facts.tools),
        engine=engine,
        engine_name=machine.engine_name(precision),
        eos=_ends(manifest, tokenizer, template, chosen=chat_template is not None, channels=CHANNEL in facts.text),
        sampling=manifest.get("sampling", {}),
        draft_session=Session(process.load_engine(draft_build, precision), context_policy=context_policy)
        if draft_build
        else None,
        calibration=read_decide_calibration(build / texts["path"] / DECIDE_CALIBRATION) if calibrated else None,
        fingerprint=digest(manifest),
        tokenizer_digest=manifest["tokenizer"].get("sha256", ""),
        head=engine.load_drafter() if "drafter" in manifest else None,
        head_name=manifest["drafter"]["kind"] if "drafter" in manifest else "",
        threads=engine.threads,
        build=build if "adapters" in manifest else None,
        pictures=picture_reader(manifest, tokenizer),
        sounds=sound_reader(manifest, tokenizer),
    )


def _ends(
    manifest: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None, *, chosen: bool, channels: bool
) -> tuple[int, ...]:
    """Return the tokens that end an answer.

    Args:
        manifest: model.json's content.
        tokenizer: the model's tokenizer.
        template: the chat template, if there is one.
        chosen: whether the template is not the checkpoint's; `chat` in model.json describes only the checkpoint's.
        channels: whether an answer has several messages, each with an end of its own, as in harmony.
    """
    if "chat" in manifest and not chosen:
        return tuple(dict.fromkeys([*manifest["eos_token_ids"], *manifest["chat"]["stop"]]))
    end = turn_end(template, tokenizer) if template and not channels else None
    return tuple(dict.fromkeys([*manifest["eos_token_ids"], *([] if end is None else [end])]))

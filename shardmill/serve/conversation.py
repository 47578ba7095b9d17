"""One person's conversation with a resident model, turn by turn, in the caller's thread.

With a chat template, every turn renders all messages; without one, the text simply continues. Either way a turn begins
with all earlier text, so the session runs only the new tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import replace
from typing import cast

from drafted_decoding import (
    SEEDS,
    ContextPolicy,
    Drafter,
    GenerationResult,
    Options,
    Sampling,
    Session,
    TokenEvent,
    create_policy,
    generate,
)

from shardmill.media.prompt import SeenPicture
from shardmill.serve.model import Model
from shardmill.serve.pictures import Gallery, Shower
from shardmill.serve.protocol import invalid
from shardmill.serve.thoughts import ThoughtReader, answer_deltas
from shardmill.serve.tool_reader import AnswerDelta, CallReader
from shardmill.templates.render import Message
from shardmill.templates.thoughts import thought_fields


class Conversation:
    """The messages of a conversation so far.

    Args:
        model: the model that answers.
        system: the system message, for a model with a chat template.
    """

    def __init__(self, model: Model, system: str | None = None) -> None:
        self._model = model
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages = list(self._opening)
        self.text: list[int] = []  # tokens of the continued text, without a template
        self.pictures: list[SeenPicture] = []  # of the messages in order, and of the next one
        self._waiting = 0  # how many of these are the next message's

    def show(self, picture: SeenPicture) -> None:
        """Add a picture to the next message, before its text. The model has a template, and takes pictures."""
        self.pictures.append(picture)
        self._waiting += 1

    def _asked(self, line: str) -> Message:
        """Return the next message of the user."""
        if not self._waiting:
            return {"role": "user", "content": line}
        parts = [{"type": "image"} for _ in range(self._waiting)]
        return {"role": "user", "content": [*parts, {"type": "text", "text": line}]}

    def prompt(self, line: str) -> tuple[Sequence[int], bool]:
        """Return the tokens to answer after the message `line`, and whether they end in a thought.

        Raises:
            ApiError: the template rejects the messages.
            MediaError: it shows another number of pictures.
        """
        if self._model.template is None:
            return [*self.text, *self._model.encode(f"\n{line}" if self.text else line, special=not self.text)], False
        reader, messages = self._model.pictures, [*self.messages, self._asked(line)]
        prompt = reader.prompt(self.pictures) if reader and self.pictures else None
        try:
            text = self._model.template(prompt.hide(messages) if prompt else messages)
        except Exception as error:  # templates may raise any exception
            raise invalid(f"the chat template refused the messages: {error}") from error
        thoughts = self._model.thoughts
        tokens = prompt.tokens(text) if prompt else self._model.encode(text, special=False)
        return tokens, thoughts is not None and thoughts.opened_by(text)

    def add(self, line: str, prompt: Sequence[int], tokens: Sequence[int], answer: str, thought: str) -> None:
        """Append a turn; after a stop, with the part of the answer that was given.

        A turn that ended in its thought is left out if the template refuses an answer without text, as Mistral's do.
        """
        asked = self._asked(line)
        said: Message = {"role": "assistant", "content": answer} | thought_fields(thought)
        if answer or self._takes([*self.messages, asked, said, asked]):
            self.messages += [asked, said]
            self._waiting = 0
        self.text = [*prompt, *(token for token in tokens if token not in self._model.eos)]

    def _takes(self, messages: Sequence[Message]) -> bool:
        """Return whether the template takes messages."""
        try:
            return self._model.template is None or bool(self._model.template(messages))
        except Exception:  # templates may raise any exception
            return False


class Talk:
    """A resident model and its settings for answers.

    Args:
        model: the model, used only by this talk.
        drafter: the drafter.
        sampling: how tokens are chosen; each turn adds one to the seed.
        max_new_tokens: the most tokens of an answer.
        context_policy: what happens when the context is full.
        adapter: the adapter that answers; None: the bare model.

    Raises:
        DecodeError: the context is too small to slide.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        sampling: Sampling,
        max_new_tokens: int,
        context_policy: ContextPolicy = "stop",
        adapter: str | None = None,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._session = Session(model.engine, context_policy=context_policy)
        self._session.use_adapter(adapter)
        self._gallery = Gallery(cast(Shower, model.engine))
        self._policy = create_policy("cost_model", self._session.widths)
        self._turns = 0

    @property
    def accept_top_p(self) -> float | None:
        """Return the top-p of lossy acceptance; None if decoding is exact."""
        return self._sampling.accept_top_p

    def turn(self, conversation: Conversation, line: str, stopped: Sized) -> Iterator[AnswerDelta | GenerationResult]:
        """Yield the answer's text and the thought before it as they become final, and the result unless it was stopped.

        Args:
            conversation: the conversation to continue.
            line: the user's message.
            stopped: the answer ends early when this is no longer empty; checked after every pass and token.
        """
        prompt, thinks = conversation.prompt(line)
        form, channels = self._model.thoughts, self._model.channels
        thoughts = ThoughtReader(form, opened=thinks) if form else None
        reader = CallReader(channels, {}) if channels else None
        written = (*((form.begin, form.end) if form else ()), *(channels.tokens if channels else ()))
        decode = self._model.decoder(written) if written else self._model.decode
        seed = (self._sampling.seed + self._turns) % SEEDS  # otherwise equal turns get equal answers
        self._turns += 1
        rows = [row for picture in conversation.pictures for row in picture.shown]
        self._gallery.take(rows)
        events = generate(
            self._session,
            prompt,
            max_new_tokens=self._max_new_tokens,
            eos=self._model.eos,
            drafter=self._drafter,
            policy=self._policy,
            options=Options(sampling=replace(self._sampling, seed=seed), detokenize=decode),
        )
        tokens, said = list[int](), {"thought": "", "content": ""}

        def digest(text: str, ended: bool) -> Iterator[AnswerDelta]:
            for delta in answer_deltas(thoughts, reader, text, ended=ended):
                if delta.kind in said:  # not a call, since the prompt has no functions
                    said[delta.kind] += delta.text
                    yield delta

        try:
            for event in events:
                if isinstance(event, TokenEvent):
                    tokens.append(event.token)
                    yield from digest(event.text, ended=False)
                elif isinstance(event, GenerationResult):
                    yield from digest(event.tail, ended=True)
                    yield event
                if len(stopped) and not isinstance(event, GenerationResult):
                    yield from digest("", ended=True)
                    break
        finally:
            self._gallery.give_back(rows)
        conversation.add(line, prompt, tokens, said["content"], said["thought"])

"""The marks of thoughts that chat templates know: what a model writes between them comes before its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtFormat:
    """The marks around a thought. A mark may be, or begin with, a special token.

    Attributes:
        begin: the text before a thought.
        end: the text after it.
    """

    begin: str
    end: str

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt ends in a thought, which the model continues."""
        return prompt.rstrip().endswith(self.begin.rstrip())


FORMATS = (  # as vLLM's parsers know them (vllm/reasoning)
    ThoughtFormat("<|channel>thought\n", "<channel|>"),  # gemma4_reasoning_parser.py
    ThoughtFormat("<seed:think>", "</seed:think>"),  # seedoss_reasoning_parser.py
    ThoughtFormat("[THINK]", "[/THINK]"),  # mistral_reasoning_parser.py
    ThoughtFormat("<think>", "</think>"),  # qwen3_reasoning_parser.py and most others
)
CHANNEL = "<|channel|>"  # before the name of a channel in harmony, whose thoughts are in the channel `analysis`


def find_thoughts(template: str) -> ThoughtFormat | None:
    """Return the marks of thoughts that a chat template's text contains; None if it contains none."""
    return next((form for form in FORMATS if form.begin.rstrip() in template or form.end in template), None)


def thought_fields(thought: str | None) -> dict[str, str]:
    """Return an earlier thought as a message has it for a chat template, under both names that templates know."""
    return {"reasoning_content": thought, "thinking": thought} if thought else {}

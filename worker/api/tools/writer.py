"""The parts that parsers find in an answer, in order: content, reasoning, calls."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of one call: `id` and `name` come first, then pieces of its arguments. `broken`: it is
    no call after all, and its text is content. `content_before` counts the characters of content
    before it.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    broken: bool = False
    content_before: int = 0


@dataclass(slots=True)
class Said:
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerWriter:
    """Owns the parts not yet taken. `hidden` are control tokens, which are not content."""

    def __init__(
        self,
        new_id: Callable[[], str],
        *,
        hidden: Collection[str] = (),
        known_names: Collection[str] = (),
        only_one: bool = False,
        shows_reasoning: bool = True,
    ) -> None:
        """`known_names` are the request's functions; `only_one` drops calls after the first."""
        self.hidden = tuple(hidden)
        self.known_names = frozenset(known_names)
        self.num_calls = 0  # that are complete
        self._new_id = new_id
        self._only_one = only_one
        self._shows_reasoning = shows_reasoning
        self._said = Said()
        self._next_index = 0
        self._open: int | None = None
        self._dropping = False
        self._blanks = ""
        self._reasoning_blanks = ""
        self._num_content_chars = 0
        self._has_reasoned = False  # if only blanks
        self._has_thought = False

    def take(self) -> Said:
        said, self._said = self._said, Said()
        return said

    def content(self, text: str) -> None:
        text = self._blanks + text
        # Blanks at the end are held back: before a call they are no content.
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if not shown:
            return
        if not self._num_content_chars and (self.num_calls or self._has_reasoned):
            shown = shown.lstrip()
        self._num_content_chars += len(shown)
        self._said.content += shown

    def reasoning(self, text: str) -> None:
        text = self._reasoning_blanks + text
        shown = text.rstrip()
        self._reasoning_blanks = text[len(shown) :]
        self._has_reasoned = True
        if shown and not self._has_thought:
            self._has_thought = True
            shown = shown.lstrip()
        if self._shows_reasoning:
            self._said.reasoning += shown

    def begin(self, name: str) -> None:
        self._dropping = self._only_one and self.num_calls > 0
        if self._dropping:
            return
        self._open = self._next_index
        self._next_index += 1
        self._add(CallDelta(self._open, id=self._new_id(), name=name))

    def arguments(self, text: str) -> None:
        if self._open is not None:
            self._add(CallDelta(self._open, text))

    def _add(self, call: CallDelta) -> None:
        self._said.calls.append(replace(call, content_before=self._num_content_chars))

    def end(self) -> None:
        self._open = None
        self.num_calls += not self._dropping
        self._dropping = False

    def fail(self, raw: str, *, truncated: bool) -> None:
        """Turn the call into content, unless the answer is `truncated` and arguments began."""
        begun = self._open is not None or self._dropping
        if begun and truncated:
            self.end()
            return
        if self._open is not None:
            self._add(CallDelta(self._open, broken=True))
        self._open, self._dropping = None, False
        self.leftover(raw)

    def leftover(self, raw: str) -> None:
        for token in self.hidden:
            raw = raw.replace(token, "")
        self.content(raw)

    def finish(self) -> None:
        if not self.num_calls and (self._num_content_chars or not self._has_reasoned):
            self._said.content += self._blanks
        self._blanks = ""

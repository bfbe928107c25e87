"""A look at a chat template: whether it renders system messages within a conversation."""

from functools import lru_cache
from itertools import takewhile

from worker.errors import RequestError
from worker.tokenizer.chat import ChatTemplate


@lru_cache(maxsize=8)
def takes_system_turns(template: ChatTemplate | None) -> bool:
    """Return whether a template renders a system message within a conversation in its place.
    Without a template no conversation is rendered.
    """
    # Behind a turn of the assistant, and behind one of the user.
    return template is None or all(_inserts_system_turn(template, place) for place in (3, 4))


def _inserts_system_turn(template: ChatTemplate, place: int) -> bool:
    roles = ("system", "user", "assistant", "user")
    turns = [{"role": role, "content": f"probe {n}"} for n, role in enumerate(roles)]
    turn = {"role": "system", "content": "probed"}
    try:
        plain = template.render(turns)
        text = template.render([*turns[:place], turn, *turns[place:]])
    except RequestError:
        return False
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(plain, text, strict=False))))
    rest = plain[same:]  # at least the generation prompt, which must follow the turn
    return bool(rest) and text.endswith(rest) and "probed" in text[same : -len(rest)]

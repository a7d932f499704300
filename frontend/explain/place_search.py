"""Which place of a chat a token of its prompt belongs to, found with few of them looked up.

To find a place in a prompt takes some renderings of the chat, so of many only those that bisection asks for are found.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from frontend.prompt.chat import Chat
from frontend.prompt.places import MessagePlace, Place, TokenRange, ToolPlace, innermost, parts_of, places_of

FindPlaces = Callable[[Sequence[Place]], Awaitable[Mapping[Place, TokenRange]]]

# So many are looked up together.
_AT_ONCE = 16


async def place_of(chat: Chat, find: FindPlaces, token: int) -> Place | None:
    """The innermost place that shows the token; None if that is text of the chat template, in no place.

    `find` says where places are in the prompt of `chat`.
    """
    places = places_of(chat)
    if len(places) <= _AT_ONCE:
        return innermost(await find(places), token)
    ranges: dict[Place, TokenRange] = {}
    messages = [MessagePlace(i) for i in range(len(chat.messages))]
    for siblings in (messages, [ToolPlace(i) for i in range(len(chat.tools))]):
        await _narrow(siblings, find, token, ranges)
    message = innermost(ranges, token)
    if isinstance(message, MessagePlace):
        parts = [MessagePlace(message.message, j) for j in range(len(parts_of(chat.messages[message.message])))]
        await _narrow(parts, find, token, ranges)
    return innermost(ranges, token)


async def _narrow(siblings: Sequence[Place], find: FindPlaces, token: int, ranges: dict[Place, TokenRange]) -> None:
    """Add to `ranges` those of `siblings`, which stand in their order in the prompt, that may show `token`."""
    first, end = 0, len(siblings)
    while end - first > _AT_ONCE:
        stride = -(-(end - first) // _AT_ONCE)
        found = await find(siblings[first:end:stride])
        behind = [i for i in range(first, end, stride) if found[siblings[i]].shown <= token]
        first = behind[-1] if behind else first
        end = min(end, first + stride)
    if first < end:
        ranges.update(await find(siblings[first:end]))


async def tools_range(chat: Chat, find: FindPlaces) -> TokenRange | None:
    """The tokens that show all of the chat's tools; None if it has none, or they are not shown."""
    if not chat.tools:
        return None
    first, last = ToolPlace(0), ToolPlace(len(chat.tools) - 1)
    ranges = await find([first] if first == last else [first, last])
    together = TokenRange(ranges[first].start, ranges[first].shown, ranges[last].end)
    return together if together.shown < together.end else None

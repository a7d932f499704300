"""Is what an engine says of a request true? Beside a reference that compares with the tokens of all requests before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_core import EngineCore, EngineRequest
from ipc.vocabulary import CacheProbe


@dataclass(frozen=True)
class Computed:
    """What a reference remembers of a request: all tokens that were computed, and its salts."""

    tokens: list[int]
    salts: tuple[tuple[int, str], ...]


def compare(request: EngineRequest, salts: Sequence[tuple[int, str]], other: Computed) -> tuple[int, bool]:
    """How many first tokens both have, salts included, and whether the request may hear of how the other goes on."""
    pairs = zip(request.prompt_token_ids, other.tokens)
    num = next((place for place, (one, two) in enumerate(pairs) if one != two), None)
    if num is None:
        num = min(len(request.prompt_token_ids), len(other.tokens))
    hidden = min((at for at, _ in set(salts) ^ set(other.salts)), default=len(other.tokens) + 1)
    return min(num, hidden), hidden > num


def check_truth(
    engine: EngineCore,
    request: EngineRequest,
    salts: Sequence[tuple[int, str]],
    probe: CacheProbe,
    before: Sequence[Computed],
    *,
    evicts: bool,
) -> None:
    """Assert that what `engine` says of `request` is so, `before` being all that it ever cached.

    `evicts`: some of that may be gone.
    """
    found, block_size = probe.explanation, engine.config.block_size
    assert found is not None
    tokens, place = list(request.prompt_token_ids), found.token_index
    compared = [(*compare(request, salts, other), other) for other in before]
    following = [other.tokens[place:] for num, may_hear, other in compared if may_hear and num == place]
    block_end = (probe.num_hit_tokens // block_size + 1) * block_size
    match probe.miss_reason:
        case "none":
            assert probe.num_hit_tokens == len(tokens) - 1
        case "diverged":
            assert any(others and others[0] != tokens[place] for others in following)
        case "block_boundary":
            assert place > probe.num_hit_tokens and following
        case "continued":
            assert place == probe.num_hit_tokens
        case "evicted" | "reset":
            whole = [other.tokens for other in before if other.tokens[:block_end] == tokens[:block_end]]
            assert whole and found.lost_since_s is not None
        case "not_found":
            assert place == probe.num_hit_tokens == 0
    if probe.miss_reason in ("diverged", "continued", "not_found"):
        copies = engine.config.prefix_match_unit == "token"
        longest = max((num for num, may_hear, _ in compared if copies or may_hear), default=0)
        assert longest < block_end, "what has a block more in common was evicted"
        assert evicts or place == max(longest, probe.num_hit_tokens), "no relative has more in common"
    if found.relative_token_ids:
        shown = found.relative_token_ids
        assert any(others[: len(shown)] == shown for others in following), "one who may be heard of goes on like this"

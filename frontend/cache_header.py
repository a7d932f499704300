"""The header that tells what the prefix cache did for an answer, whatever API it is of."""

from __future__ import annotations

from .prepared import TokenCounts

CACHE_HEADER = "x-foreword-cache"


def cache_headers(counts: TokenCounts, tenant_label: str | None) -> dict[str, str]:
    """Of an answer whose first token is known: a Structured Field as RFC 9211 has it.

    `hit; tokens=1024; prompt=2048; reason=diverged; kept=1500; kept-wanted=2048; tenant=t91bc…`, with what is known.
    In a stream of several prompts it is about those that have a token by then. `tenant_label` is the caller's in
    `/metrics`, if it has one of its own.
    """
    fields = ["hit" if counts.cached_tokens else "miss"]
    fields += [f"tokens={counts.cached_tokens}", f"prompt={counts.looked_up_tokens}"]
    if counts.miss_reason not in (None, "none"):
        fields.append(f"reason={counts.miss_reason}")
    if (kept := counts.kept_tokens) is not None:
        fields += [f"kept={kept.kept}", f"kept-wanted={kept.asked}"]
    if tenant_label is not None:
        fields.append(f"tenant={tenant_label}")
    return {CACHE_HEADER: "; ".join(fields)}

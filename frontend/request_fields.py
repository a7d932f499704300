"""Types that fields of several APIs have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw

NotYet = Meta(description="Not supported yet: only values that change nothing are accepted.")
Ignored = Meta(description="Accepted and ignored: it does not change the answer.")

# msgpack, between frontend and engine, ends there.
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
# Decoded where it takes nobody's time, in canonical order; see `prompt.canonical_json`.
JsonObject = Annotated[Raw, Meta(extra_json_schema={"type": "object", "nullable": True})]

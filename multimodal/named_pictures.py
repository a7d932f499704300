"""Pictures that clients named with a `uuid`, so that they need not send them again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from .byte_lru import ByteLRU
from .errors import MediaError
from .picture import PictureContent


@dataclass(frozen=True, slots=True, eq=False)
class KnownContent:
    """A picture's content and what decoding it told: its size, and the digest of its pixels."""

    content: PictureContent = field(repr=False)
    pixels_digest: bytes
    height: int
    width: int


class NamedPictures:
    """Names are bound to pixels, within a tenant, for as long as the content is kept: `max_bytes` of it, least recently
    used first. For one thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._known: ByteLRU[bytes, KnownContent] = ByteLRU(max_bytes)

    def get(self, uuid: str, tenant: str) -> KnownContent:
        """Raises MediaError: never bound, or no longer kept."""
        known = self._known.get(_name_key(uuid, tenant))
        if known is None:
            raise MediaError(f"the picture named by uuid {shown(uuid)} is not known here (any more); send it again")
        return known

    def bind(self, uuid: str, tenant: str, known: KnownContent) -> None:
        """From now on `uuid` means these pixels. Raises MediaError: it means others."""
        key = _name_key(uuid, tenant)
        bound = self._known.get(key)
        if bound is not None and bound.pixels_digest != known.pixels_digest:
            raise MediaError(
                f"uuid {shown(uuid)} names another picture; a name is bound to the picture it was first sent with"
            )
        content = known.content
        self._known.put(key, known, content.nbytes if isinstance(content, np.ndarray) else len(content))


def shown(uuid: str) -> str:
    """For a message: a client's text, of any length."""
    return repr(uuid if len(uuid) <= 64 else uuid[:61] + "...")


def _name_key(uuid: str, tenant: str) -> bytes:
    # Hashed, so that long names cost no more than short ones.
    owner = tenant.encode()
    return hashlib.sha256(len(owner).to_bytes(8, "little") + owner + uuid.encode()).digest()

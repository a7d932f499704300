"""What can be wrong with a picture. Each is the caller's fault; the API in front says which of its fields it was."""

from __future__ import annotations


class MediaError(ValueError):
    """No picture can be made of this. The message is for the caller."""

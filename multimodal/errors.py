"""What goes wrong with what a caller sent."""

from __future__ import annotations


class MediaError(ValueError):
    """A picture that cannot be used, for a reason its sender can act on.

    The message is meant for that sender: it has the numbers, and neither secrets of a URL nor paths of this machine. It
    does not say where in a request the picture stood; whoever knows that puts it in front.
    """

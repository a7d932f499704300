"""The command line. One file per command; this package stays light, so that `--help` answers at once."""

from .app import main
from .options import USER_ERROR_EXIT_CODE

__all__ = ["USER_ERROR_EXIT_CODE", "main"]

"""What all tests share."""

# Before anything loads torch: it decides how the model's threads wait, and without it tests crawl on busy machines.
import engine_core.model  # noqa: F401

"""What every request needs, whatever API it comes through: the engine, the prompt's makers, the model's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from frontend.detokenizer import Detokenizer
from frontend.engine_errors import EngineUnavailableError
from frontend.engine_pool import EnginePool, reason_for_clients
from frontend.errors import model_not_found
from frontend.isolation import IsolationMode
from frontend.metrics import Metrics
from frontend.prompt.processor import PromptProcessor
from ipc.vocabulary import AdapterInfo, EngineCapabilities

# Of many adapters, an error names as many as one would read.
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind this server, under one or several names, and its LoRA adapters, each under its own; answers bear
    the name they were asked under. Names of the model go before those of adapters.

    `adapters` is a view of what is loaded now.
    """

    names: tuple[str, ...]
    created_s: int
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)

    def check(self, name: str | None) -> str:
        """The name to answer under: `name`, or the first of the model. Raises ApiError (404) if it is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names and name not in self.adapters:
            raise model_not_found(f"the model '{name}' does not exist; served here: {_listed(self.served_names)}")
        return name

    def adapter_of(self, name: str) -> str:
        """The adapter that requests for `name`, which is served, ask for; empty where it is the model itself."""
        return "" if name in self.names else name

    @property
    def served_names(self) -> list[str]:
        """The model's, then those of adapters."""
        return [*self.names, *(name for name in self.adapters if name not in self.names)]


@dataclass(slots=True)
class Serving:
    """`new_detokenizer_of_calls` makes those that spell out the tags of tool calls, special tokens or not.

    `token_bytes`: a token's id → what it stands for by itself (`detokenizer.token_bytes_of`).

    `isolation`: whose requests share what is cached. `is_shutting_down`: what fails from now on fails because of that.
    """

    client: EnginePool
    prompts: PromptProcessor
    new_detokenizer: Callable[[], Detokenizer]
    new_detokenizer_of_calls: Callable[[], Detokenizer]
    token_bytes: Callable[[int], bytes]
    model: ServedModel
    metrics: Metrics
    isolation: IsolationMode = "salt"
    is_shutting_down: bool = False

    def capabilities(self) -> EngineCapabilities:
        """Of the engine that is there now and takes the longest requests. Raises EngineUnavailableError if none is."""
        if self.client.state != "ready" or self.client.capabilities is None:
            raise EngineUnavailableError(reason_for_clients(self.client))
        return self.client.capabilities

    def tenant_label(self, tenant: str) -> str | None:
        """What `tenant` is called in `/metrics`; None if it is nobody's name."""
        return self.metrics.requests.tenants.label(tenant) if tenant else None


def _listed(names: list[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names[:_MAX_LISTED])
    return listed if len(names) <= _MAX_LISTED else f"{listed} and {len(names) - _MAX_LISTED} more (/v1/models)"

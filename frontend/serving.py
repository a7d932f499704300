"""What every request needs, whatever API it comes through: the engine, the prompt's makers, the model's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from frontend.detokenizer import Detokenizer
from frontend.engine_errors import EngineUnavailableError
from frontend.engine_pool import EnginePool, reason_for_clients
from frontend.errors import ApiError
from frontend.isolation import IsolationMode
from frontend.metrics import Metrics
from frontend.prompt.processor import PromptProcessor
from ipc.messages import EngineCapabilities


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind this server, under one or several names; answers bear the name they were asked under."""

    names: tuple[str, ...]
    created_s: int

    def check(self, name: str | None) -> str:
        """The name to answer under: `name`, or the first served one. Raises ApiError (404) if it is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(f"'{served}'" for served in self.names)
            raise ApiError(
                404,
                f"the model '{name}' does not exist; served here: {served}",
                kind="invalid_request_error",
                param="model",
                code="model_not_found",
            )
        return name


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

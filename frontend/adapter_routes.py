"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import Struct

from ipc.vocabulary import RequestError

from .api_key import check_may_administer
from .engine_errors import RequestRefusedError
from .errors import ApiError, invalid_request, not_supported
from .refusals import FieldNames, client_errors
from .request_body import read_body
from .request_decode import decode_body
from .serving import Serving

_NOT_FOUND = {"path_not_found", "unknown_adapter"}
# What the engine calls by its own settings, a client's operator calls by their options.
_HINTS = {
    "lora_disabled": "start the server with --enable-lora, and with --lora-root DIR to load adapters from there",
    "outside_lora_root": "adapters are loaded from below the directory that --lora-root names",
    "too_many_adapters": "unload one, or start the server with a larger --max-cpu-loras",
    "name_taken": "unload it, or replace it with load_inplace: true",
}


class LoadLoraAdapterRequest(Struct, forbid_unknown_fields=True):
    """`lora_path` is a directory in PEFT format on the engine's machine, below the server's `--lora-root`. With
    `load_inplace` it takes the place of an adapter that is loaded under this name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadLoraAdapterRequest(Struct, forbid_unknown_fields=True):
    """`lora_int_id` is ignored: names are enough."""

    lora_name: str
    lora_int_id: int | None = None


_decode_load = msgspec.json.Decoder(LoadLoraAdapterRequest)
_decode_unload = msgspec.json.Decoder(UnloadLoraAdapterRequest)


def adapter_routes(serving: Serving) -> list[HTTPRouteHandler]:
    """Route handlers that load and unload LoRA adapters in the engines of `serving`.

    A client that leaves does not stop what it has asked for.
    """

    @post("/v1/load_lora_adapter", status_code=200)
    async def load_lora_adapter(request: Request) -> ASGIResponse:
        check_may_administer(request)
        asked = decode_body(_decode_load, await read_body(request))
        _check_filled("lora_name", asked.lora_name)
        _check_filled("lora_path", asked.lora_path)
        if asked.is_3d_lora_weight:
            raise not_supported("is_3d_lora_weight", "a LoRA of fused experts")
        if asked.lora_name in serving.model.names:
            raise invalid_request(f"lora_name: '{asked.lora_name}' is the model itself", "lora_name", "name_taken")
        with _adapter_errors(serving):
            await serving.client.adapters.load(asked.lora_name, asked.lora_path, replaces=asked.load_inplace)
        return _success(asked.lora_name, "added")

    @post("/v1/unload_lora_adapter", status_code=200)
    async def unload_lora_adapter(request: Request) -> ASGIResponse:
        check_may_administer(request)
        asked = decode_body(_decode_unload, await read_body(request))
        _check_filled("lora_name", asked.lora_name)
        with _adapter_errors(serving):
            await serving.client.adapters.unload(asked.lora_name)
        return _success(asked.lora_name, "removed")

    return [load_lora_adapter, unload_lora_adapter]


def _check_filled(name: str, value: str) -> None:
    if not value:
        raise invalid_request(f"{name} is empty", name)


def _success(name: str, what: str) -> ASGIResponse:
    return ASGIResponse(body=f"Success: LoRA adapter '{name}' {what} successfully.".encode(), media_type="text/plain")


@contextmanager
def _adapter_errors(serving: Serving) -> Iterator[None]:
    """Inside, errors of the engines become ApiErrors that name `lora_name` or `lora_path`."""
    with client_errors(serving, FieldNames("lora_path")):
        try:
            yield
        except RequestRefusedError as error:
            if error.error.code != "invalid":
                raise
            raise _refused(error.error) from error


def _refused(error: RequestError) -> ApiError:
    hint = _HINTS.get(error.reason or "")
    return ApiError(
        404 if error.reason in _NOT_FOUND else 400,
        error.message if hint is None else f"{error.message}; {hint}",
        kind="invalid_request_error",
        param=error.param,
        code=error.reason,
    )

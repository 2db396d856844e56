"""The administrative routes: pause, resume, reset the prefix cache, new weights. They exist only when there is a token."""

from __future__ import annotations

import asyncio
import hmac
from pathlib import Path

import pydantic
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from isomodel import weights
from isomodel.config import ModelConfig
from isomodel.rollout.engine_config import ON_UPDATE
from isomodel.rollout.server import description
from isomodel.rollout.server.errors import ApiError
from isomodel.rollout.server.requests import Strict
from isomodel.rollout.server.service import Service


class UpdateBody(Strict):
    """Of /admin/update_weights."""

    folder: str = pydantic.Field(description="a folder with safetensors, on the server's disk")
    version: int = pydantic.Field(description="an integer above the present version")
    on_update: str = pydantic.Field("finish", description="one of " + ", ".join(ON_UPDATE))


def add_routes(app: FastAPI, service: Service) -> None:
    """Adds them; each asks for `Authorization: Bearer TOKEN`."""

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they came
        if not hmac.compare_digest(given, f"Bearer {service.admin_token}".encode()):
            raise ApiError(403, "this needs the header Authorization: Bearer TOKEN, with the server's admin token")

    said = description.answers("application/json", codes=("4XX", 500, 503))

    @app.post("/admin/pause", summary="take requests, but run none", responses=said)
    async def pause(request: Request) -> JSONResponse:
        check(request)
        service.thread.set_paused(True)
        return JSONResponse({"paused": True})

    @app.post("/admin/resume", summary="go on", responses=said)
    async def resume(request: Request) -> JSONResponse:
        check(request)
        service.thread.set_paused(False)
        return JSONResponse({"paused": False})

    @app.post("/admin/reset_prefix_cache", summary="forget pages kept for later requests", responses=said)
    async def reset_prefix_cache(request: Request) -> JSONResponse:
        check(request)
        return JSONResponse({"dropped_pages": await service.thread.call(lambda engine: engine.reset_prefix_cache())})

    body = description.body(UpdateBody)

    @app.post("/admin/update_weights", summary="sample with other weights", openapi_extra=body, responses=said)
    async def update_weights(request: Request) -> JSONResponse:
        check(request)
        asked = UpdateBody.parse(await request.body())
        if asked.on_update not in ON_UPDATE:
            raise ApiError(400, f"on_update must be one of {', '.join(ON_UPDATE)}", param="on_update")
        try:
            params = await asyncio.to_thread(_load, service, asked.folder)
            dropped = await service.thread.update_weights(params, asked.version, asked.on_update)
        except (ValueError, OSError) as e:
            raise ApiError(400, f"nothing has changed: {e}") from e
        return JSONResponse({"version": asked.version, "dropped_pages": dropped})


def _load(service: Service, folder: str):
    """The folder's weights, in the compute dtype."""
    if (Path(folder) / "config.json").is_file() and ModelConfig.load(folder) != service.cfg:
        raise ValueError(f"{folder} has the config of another model")
    return weights.load(folder, service.cfg, service.numerics.compute_dtype)

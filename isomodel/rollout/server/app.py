"""The FastAPI application: routes, and how an answer, a stream or an error becomes a response."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from isomodel.rollout.outputs import Completion
from isomodel.rollout.sampling_params import SamplingParams
from isomodel.rollout.server import admin, description, responses
from isomodel.rollout.server.errors import ApiError, Disconnected
from isomodel.rollout.server.metrics import CONTENT_TYPE
from isomodel.rollout.server.requests import Body, ChatBody, CompletionBody, RolloutBody, TextBody
from isomodel.rollout.server.service import Run, Service
from isomodel.tokenizer import TokenizerError

log = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The application. Its start starts the engine's thread, its end ends it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI):
        service.thread.start()
        yield
        await asyncio.to_thread(service.thread.stop)

    app = FastAPI(title="isomodel", lifespan=lifespan, docs_url=None, redoc_url=None)
    started = int(time.time())

    def post(path: str, body: type[Body], answer: Callable[[Service, Run], Awaitable[Response]], summary: str) -> None:
        async def route(request: Request) -> Response:
            return await _handled(service, request, path, answer)

        described = description.body(
            body,
            name=service.name,
            vocab_size=service.cfg.vocab_size,
            prompt_limit=service.prompt_limit,
            top_logprobs=service.config.top_logprobs,
            limits=service.limits,
        )
        media = ("application/json", "text/event-stream") if issubclass(body, TextBody) else ("application/json",)
        said = description.answers(*media, codes=("4XX", 500, 503))
        app.post(path, summary=summary, name=path, openapi_extra=described, responses=said)(route)

    post("/v1/completions", CompletionBody, _completions, "complete texts or token ids")
    post("/v1/chat/completions", ChatBody, _chat, "the next message of a conversation")
    post("/v1/rollout", RolloutBody, _rollout, "token ids in; token ids, log-probabilities and weight versions out")

    model = {
        "id": service.name,
        "object": "model",
        "created": started,
        "owned_by": "isomodel",
        "max_model_len": service.config.max_model_len,
    }

    @app.get("/v1/models", summary="the served model")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model]})

    by_name = description.answers("application/json", codes=("4XX",))

    @app.get("/v1/models/{name:path}", summary="the served model, by its name", responses=by_name)
    async def model_by_name(name: str) -> JSONResponse:
        service.check_name(name)
        return JSONResponse(model)

    unwell = {503: {"description": "no more requests are taken", "content": {"application/json": {}}}}

    @app.get("/health", summary="200: it serves; 503: it is shutting down or has failed", responses=unwell)
    async def health() -> JSONResponse:
        fault = service.thread.fault
        status = "failed" if fault else "draining" if service.draining else "paused" if service.thread.paused else "ok"
        return JSONResponse({"status": status, "reason": fault}, 503 if status in ("failed", "draining") else 200)

    @app.get(
        "/metrics",
        summary="Prometheus's text format",
        response_class=PlainTextResponse,
        responses=description.answers("text/plain"),
    )
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/contract", summary="what reaches the bits here; see `isomodel contract`")
    async def contract() -> JSONResponse:
        return JSONResponse(service.contract.to_json())

    if service.admin_token is not None:
        admin.add_routes(app, service)

    @app.exception_handler(ApiError)
    async def refused(request: Request, e: ApiError) -> Response:
        return e.response()

    @app.exception_handler(404)
    async def unknown_path(request: Request, e: Exception) -> Response:
        return ApiError(404, f"there is no {request.url.path[:200]} here; see /openapi.json").response()

    @app.exception_handler(405)
    async def wrong_method(request: Request, e: Exception) -> Response:
        return ApiError(
            405, f"{request.method} is not what {request.url.path[:200]} takes; see /openapi.json"
        ).response()

    @app.exception_handler(500)
    async def failed(request: Request, e: Exception) -> Response:
        return ApiError(500, f"the server failed on this request ({type(e).__name__}); others go on").response()

    return app


async def _handled(
    service: Service, request: Request, endpoint: str, answer: Callable[[Service, Run], Awaitable[Response]]
) -> Response:
    """Runs `answer`; a response that streams closes the run itself, at its end."""
    try:
        run = service.admit(request, endpoint)
    except ApiError as e:
        service.metrics.answered(endpoint, e.status)
        return e.response()
    response = None
    try:
        response = await answer(service, run)
    except ApiError as e:
        run.status = e.status
        return e.response()
    except Disconnected:
        run.status = 499
        return Response(status_code=499)
    except Exception as e:
        log.exception("a request failed")
        run.status = 500
        return ApiError(500, f"the server failed on this request ({type(e).__name__}); others go on").response()
    finally:
        if not isinstance(response, StreamingResponse):
            run.close()
    return response


async def _completions(service: Service, run: Run) -> Response:
    body = CompletionBody.parse(await run.body())
    service.check_name(body.model)
    wanted = body.logprobs is not None
    answer = responses.TextAnswer(
        service.tokenizer, service.name, service.fingerprint, logprobs=wanted, token_ids=body.return_token_ids
    )
    if not body.echo:
        return await _text(run, body, body.prompts(), body.sampling(logprobs=wanted, top_logprobs=body.logprobs or 0), answer)
    most = 1 if body.only_echo else body.max_tokens
    params = body.sampling(
        logprobs=wanted, prompt_logprobs=wanted, top_logprobs=body.logprobs or 0, max_tokens=most
    )
    prompts = await run.start(body.prompts(), params, stream=False)
    completions = await run.completions()
    if body.only_echo:
        completions = [[responses.nothing_of(completion) for completion in group] for group in completions]
    return JSONResponse(answer.whole(prompts, completions, echo=True))


async def _chat(service: Service, run: Run) -> Response:
    body = ChatBody.parse(await run.body())
    service.check_name(body.model)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling(logprobs=body.logprobs, top_logprobs=body.top_logprobs, max_tokens=most)
    tokenizer, given = service.tokenizer, body.chat_template_kwargs
    if unread := [name for name in given if not tokenizer.template_reads(name)]:
        message = f"the chat template of this model does not read {', '.join(unread)}; leave it out"
        raise ApiError(400, message, param="chat_template_kwargs")
    try:
        prompt = await asyncio.to_thread(tokenizer.apply_chat_template, body.chat(), **given)
    except TokenizerError as e:
        raise ApiError(400, str(e), param="messages") from e
    answer = responses.ChatAnswer(
        service.tokenizer, service.name, service.fingerprint, logprobs=body.logprobs, token_ids=body.return_token_ids
    )
    return await _text(run, body, [prompt], params, answer)


async def _text(
    run: Run, body: TextBody, prompts: list[str | list[int]], params: SamplingParams, answer: responses.TextAnswer
) -> Response:
    prompts = await run.start(prompts, params, stream=body.stream)
    if body.stream:
        events = _events(run, prompts, params, answer, with_usage=body.wants_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
    return JSONResponse(answer.whole(prompts, await run.completions()))


async def _events(
    run: Run, prompts: list[list[int]], params: SamplingParams, answer: responses.TextAnswer, *, with_usage: bool
) -> AsyncIterator[str]:
    """The server-sent events of an answer; a fault on the way is the last of them."""
    choices = [responses.Choice(answer, i, params.stop) for i in range(len(prompts) * params.n)]
    tokens = 0
    try:
        if openings := [opening for choice in choices if (opening := choice.opening())]:
            yield _event(answer.chunk(openings))
        async for events in run.events():
            pieces = []
            for event in events:
                tokens += event.what.token_ids.size if isinstance(event.what, Completion) else 0
                piece = choices[event.prompt * params.n + event.index].piece(event.what)
                if piece is not None:
                    pieces.append(piece)
            if pieces:
                yield _event(answer.chunk(pieces))
        if with_usage:
            yield _event(answer.chunk([], usage=responses.usage(prompts, tokens)))
        yield "data: [DONE]\n\n"
    except ApiError as e:
        run.status = e.status
        yield _event(e.body())
    except Disconnected:
        run.status = 499
    except (asyncio.CancelledError, GeneratorExit):  # nobody reads on
        run.status = 499
        raise
    except Exception as e:
        log.exception("a stream failed")
        run.status = 500
        yield _event(ApiError(500, f"the server failed on this request ({type(e).__name__}); others go on").body())
    finally:
        run.close()


def _event(values: responses.Json) -> str:
    return f"data: {json.dumps(values, ensure_ascii=False, allow_nan=False)}\n\n"


async def _rollout(service: Service, run: Run) -> Response:
    body = RolloutBody.parse(await run.body())
    service.check_name(body.model)
    params = body.sampling(prompt_logprobs=body.prompt_logprobs, top_logprobs=body.top_logprobs)
    await run.start(body.prompts(), params, stream=False)
    return JSONResponse(responses.rollout(await run.completions(), service.name, service.fingerprint))

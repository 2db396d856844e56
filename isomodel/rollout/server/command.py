"""`isomodel serve`: loads a model and serves it over HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import sys

from isomodel import contract, fetch, program_cache, weights
from isomodel.config import ModelConfig
from isomodel.numerics import Numerics
from isomodel.rollout.command import add_engine_options, kv_size
from isomodel.rollout.engine import Engine
from isomodel.rollout.engine_config import EngineConfig
from isomodel.rollout.server.limits import ServerLimits
from isomodel.rollout.server.process import DrainingServer
from isomodel.rollout.server.service import Service
from isomodel.tokenizer import Tokenizer
from pallas_kernels import environment

TOKEN_VARIABLE = "ISOMODEL_ADMIN_TOKEN"
LOOK_S = 0.1
"""Seconds between two looks of a server's engine: streams would otherwise stutter at EngineConfig's default."""


def add_commands(subparsers) -> None:
    """Adds `serve` to the command line; it sets `run(args) -> exit code`."""
    most = ServerLimits()
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model: OpenAI's /v1/completions, /v1/chat/completions and /v1/models; /v1/rollout (token ids "
        "in; token ids, log-probabilities and weight versions out); /health, /metrics, /contract, /openapi.json. SIGTERM "
        "lets requests in flight finish. There is no access control but the admin token: bind to a network you trust.",
    )
    parser.add_argument("model", help="a folder, a name that `isomodel fetch` knows, or a Hugging Face id")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="(default 8000)")
    parser.add_argument("--name", help="what clients call the model; default: as it is given here")
    parser.add_argument(
        "--admin-token",
        metavar="TOKEN",
        help=f"switches on /admin/...; better in the environment, as {TOKEN_VARIABLE}: a command line is seen by others",
    )
    parser.add_argument(
        "--look-s",
        type=float,
        default=LOOK_S,
        metavar="SECONDS",
        help="most time between two looks at the device, as far as one step allows: streams bring their tokens then, and new "
        f"requests begin; more is a little faster for many requests (default {LOOK_S})",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-requests", type=int, default=most.requests, help=f"in flight (default {most.requests})")
    limits.add_argument("--max-n", type=int, default=most.n, help=f"samples of one prompt (default {most.n})")
    limits.add_argument(
        "--max-prompts", type=int, default=most.prompts, help=f"of one request (default {most.prompts})"
    )
    limits.add_argument("--max-prompt-tokens", type=int, help="of one prompt; default: what max-model-len leaves")
    limits.add_argument(
        "--max-logprobs",
        type=int,
        default=0,
        help="alternatives at each token (OpenAI's logprobs and top_logprobs); computed for all requests (default 0)",
    )
    limits.add_argument("--max-body-bytes", type=int, default=most.body_bytes, help=f"(default {most.body_bytes})")
    add_engine_options(parser, most_tokens="2048, or the model's own limit where that is less")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns exit code 0.

    Raises:
      ValueError, OSError, FetchError, Unsupported, EnvironmentFault: the model cannot be served here.
    """
    limits = ServerLimits(
        body_bytes=args.max_body_bytes,
        prompt_tokens=args.max_prompt_tokens,
        prompts=args.max_prompts,
        n=args.max_n,
        requests=args.max_requests,
    )
    token = args.admin_token if args.admin_token is not None else os.environ.get(TOKEN_VARIABLE)
    if token is not None and not token.strip():
        raise ValueError("the admin token is empty; leave it out, or choose one that cannot be guessed")
    environment.use(args.numerics)
    program_cache.keep()
    numerics = Numerics(args.numerics, args.backend, args.dtype)
    numerics.impl  # noqa: B018  (refuses a backend that cannot serve before anything is loaded)
    folder = fetch.resolve(args.model)
    with _bound(args.host, args.port) as listener:  # so does an address that is taken
        cfg = ModelConfig.load(folder)
        tokenizer = Tokenizer(folder)
        config = EngineConfig(
            max_seqs=args.max_seqs,
            max_model_len=args.max_model_len,
            **kv_size(args),
            look_s=args.look_s,
            prefix_cache=not args.no_prefix_cache,
            top_logprobs=args.max_logprobs,
        )
        engine = Engine(cfg, weights.load(folder, cfg, args.dtype), numerics, config, tokenizer=tokenizer)
        derived = contract.derive(cfg, numerics, engine.traces())
        service = Service(engine, tokenizer, derived, args.name or args.model, limits, token)
        host = f"[{args.host}]" if ":" in args.host else args.host
        where = f"http://{host}:{listener.getsockname()[1]}"
        ready = f"serving {service.name} at {where} ({service.fingerprint})"
        DrainingServer(service, lambda: print(ready, file=sys.stderr, flush=True)).run(sockets=[listener])
    return 0


def _bound(host: str, port: int) -> socket.socket:
    """A socket at an address. It does not listen yet: whoever connects before the model is there is turned away.

    Raises:
      ValueError: it is no address, or taken.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port} must be from 0 to 65535; 0 takes any that is free")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as e:
        bound.close()
        raise ValueError(f"cannot listen at {host}, port {port}: {e.strerror or e}") from e
    return bound

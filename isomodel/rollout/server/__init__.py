"""The HTTP server: OpenAI-compatible completions, token-in token-out rollouts, health, metrics, contract.

`engine_thread` owns the engine; `service` holds what the routes share; `requests` and `responses` are the shapes on the
wire, `description` what /openapi.json says of them; `app` routes; `process` runs it and drains it; `command` is `isomodel serve`.
"""

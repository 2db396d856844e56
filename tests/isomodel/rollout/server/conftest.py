"""One server for the tests that do not end or break theirs."""

from __future__ import annotations

import pytest

from tests.isomodel.rollout.server import served


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return served.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(folder):
    server = served.Served(folder, served.LIMITS, served.TOKEN)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After each test with the shared server, it holds no page and no request, and works."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").settled()

"""Test who may use the server."""

import platform
import urllib.error
import urllib.request

import openai
import pytest

from serving.access import require_names
from serving.server import Access
from system.errors import UserError
from tests.serving.served import FakeEngine, ask, echo, fetch, served

OWN = ["localhost:8000", "192.168.0.7:8000", "[::1]:8000", "[2001:db8::7]", platform.node()]
PROXIES = ["chat.example.com", "CHAT.example.com:443", "a.b.ngrok.app"]
FOREIGN = [
    "evil.example",
    "evil.example:80",
    "127.0.0.1.evil.example",
    "ngrok.app",
    "evilngrok.app",
    "*",
    "*.ngrok.app:1",
]


def status(client: openai.OpenAI, host: str) -> int:
    request = urllib.request.Request(str(client.base_url.join("models")), headers={"Host": host})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        assert f"--allowed_hosts={host.partition(':')[0]}" in error.read().decode()
        return error.code


def test_only_requests_for_this_machine_are_answered():
    with served(FakeEngine(echo)) as client:
        assert {status(client, host) for host in OWN} == {200}
        assert {status(client, host) for host in [*FOREIGN, *PROXIES]} == {403}


def test_requests_for_allowed_names_are_answered_too():
    with served(FakeEngine(echo), access=Access(["chat.example.com", "*.ngrok.app"])) as client:
        assert {status(client, host) for host in [*OWN, *PROXIES]} == {200}
        assert {status(client, host) for host in FOREIGN if host != "*.ngrok.app:1"} == {403}
    with served(FakeEngine(echo), access=Access(["*"])) as client:
        assert {status(client, host) for host in [*OWN, *PROXIES, *FOREIGN]} == {200}


@pytest.mark.parametrize("name", ["https://chat.example.com", "chat.example.com:443", "a*.example.com", "", "*."])
def test_what_is_no_name_is_a_mistake(name):
    with pytest.raises(UserError, match="is no name of a host; give chat"):
        require_names(["localhost", name])


def test_with_a_key_only_those_who_have_it_are_answered(capfd):
    secret = "secret-4711"
    with served(FakeEngine(echo), access=Access(key=secret)) as client:
        assert ask(client).choices[0].message.content == "HELLO"
        assert [model.id for model in client.models.list()] == ["tiny"]
        for key in ("wrong", secret + "x", secret[:-1]):
            with pytest.raises(openai.AuthenticationError, match="the API key is not this server's") as refused:
                ask(client.with_options(api_key=key))
            assert refused.value.response.headers["www-authenticate"] == "Bearer"
        assert fetch(client, "/health")[0] == 200
        assert urllib.request.urlopen(str(client.base_url.join("/"))).status == 200
        assert fetch(client, "/v1/models")[0] == fetch(client, "/v1/nothing")[0] == 401
    assert secret not in "".join(capfd.readouterr())

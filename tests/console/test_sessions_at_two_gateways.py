"""A session of the console is one at every gateway on the database, and ended at one it is ended at all of them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

from tests.cli.world import World, wait_for
from tests.conftest import make_home
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


def _answer(url: str, cookie: str, fields: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Status, where it leads, and the page; redirects are not followed."""
    data = None if fields is None else urllib.parse.urlencode(fields).encode()
    request = urllib.request.Request(url, data=data, headers={"Cookie": f"console_session={cookie}"})  # noqa: S310
    try:
        with urllib.request.build_opener(_Stay).open(request, timeout=HANG_S) as answer:
            return answer.status, "", answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, str(error.headers["location"]), str(error.headers["set-cookie"])


class Pair:
    """Two gateways on one home: one database, one set of keys."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.start()
        self._told = world.home / "second.out"
        self._second: subprocess.Popen[str] | None = None
        self.start_second()

    def start_second(self) -> None:
        with self._told.open("w") as told:
            self._second = subprocess.Popen(
                [sys.executable, "-m", "app.main", "serve"],
                env=self.world.environment(TGA_PORT="0"),
                stdout=told,
                stderr=subprocess.STDOUT,
                text=True,
            )
        wait_for(lambda: "administrator's key" in self._told.read_text())
        self.second_url = self._told.read_text().split("Listening on ")[1].split()[0]

    def stop_second(self) -> None:
        if self._second is not None:
            self._second.send_signal(signal.SIGTERM)
            self._second.wait(timeout=HANG_S)
            self._second = None

    def sign_in(self) -> str:
        fields = {"key": str(self.world.admin_key())}
        status, _, cookie = _answer(f"{self.world.url}/console/sign-in", "", fields)
        assert status == 303
        return cookie.partition("=")[2].partition(";")[0]

    def is_in(self, url: str, cookie: str) -> bool:
        status, at, _ = _answer(f"{url}/console/calls", cookie)
        assert status == 200 or "/sign-in" in at, (status, at)
        return status == 200

    def sign_out(self, url: str, cookie: str) -> None:
        _, _, page = _answer(f"{url}/console/calls", cookie)
        found = re.search(r'name="csrf" value="([^"]+)"', page)
        assert found is not None
        assert _answer(f"{url}/console/sign-out", cookie, {"csrf": found[1]})[0] == 303


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    home = make_home()
    world = World(home)
    made = None
    try:
        made = Pair(world)
        yield made
    finally:
        if made is not None:
            made.stop_second()
        world.close()
        shutil.rmtree(home)


def test_signing_out_at_one_gateway_counts_at_the_other_which_knew_the_session(pair: Pair) -> None:
    cookie, other = pair.sign_in(), pair.sign_in()
    for url in (pair.world.url, pair.second_url):
        assert pair.is_in(url, cookie), "a session of one gateway is none of the other"
        assert pair.is_in(url, other)
    pair.sign_out(pair.second_url, cookie)
    assert not pair.is_in(pair.second_url, cookie)
    wait_for(lambda: not pair.is_in(pair.world.url, cookie))  # heard a moment after its commit
    assert pair.is_in(pair.world.url, other)


def test_a_sign_out_outlives_the_gateway_that_was_told(pair: Pair) -> None:
    cookie = pair.sign_in()
    pair.sign_out(pair.second_url, cookie)
    pair.stop_second()
    pair.start_second()
    assert not pair.is_in(pair.second_url, cookie)


def test_what_is_stored_of_it_opens_nothing_and_goes_when_it_is_old(pair: Pair) -> None:
    cookie = pair.sign_in()
    pair.sign_out(pair.world.url, cookie)
    pair.world.sql("UPDATE tga.spent_sessions SET until = now() - interval '2 hours'")
    pair.sign_out(pair.world.url, pair.sign_in())
    (row,) = pair.world.sql("SELECT count(*) AS rows, min(octet_length(digest)) AS size FROM tga.spent_sessions")
    assert (row["rows"], row["size"]) == (1, 32)

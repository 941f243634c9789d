"""Somebody who sends requests to the console by hand: with cookies, and without a browser."""

from __future__ import annotations

import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field

from tests.console.browsing import Desk
from tests.patience import HANG_S


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


@dataclass
class Visitor:
    """Somebody with cookies and no browser."""

    url: str
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, path: str, form: dict[str, str] | None = None, **headers: str) -> tuple[int, dict[str, str], str]:
        raw = None if form is None else urllib.parse.urlencode(form).encode()
        sent = {"Cookie": f"console_session={self.cookie}"} if self.cookie else {}
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/console{path}",
            data=raw,
            headers={**sent, **{k.replace("_", "-"): v for k, v in headers.items()}},
        )
        try:
            with urllib.request.build_opener(_Stay).open(request, timeout=HANG_S) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read().decode()

    def sign_in(self, key: str) -> None:
        status, headers, _ = self.ask("/sign-in", {"key": key, "next": "/console/"})
        assert status == 303, status
        self.cookie = re.findall(r"console_session=([^;]+)", headers["set-cookie"])[0]

    def csrf(self) -> str:
        return str(re.findall(r'name="csrf" value="([^"]+)"', self.ask("/calls")[2])[0])


def visitor(desk: Desk, who: str) -> Visitor:
    made = Visitor(desk.world.url)
    made.sign_in(desk.keys[who])
    return made

"""The console as one application: sign-in, pages, forms, live updates, static files, and the API as a session.

Every page stands in PAGES, every form in FORMS. A page answers GET and changes nothing; a form answers POST, is sent
from a page of the same session, and leads to a page.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.console import live
from app.console.gateway_api import ApiProblem, GatewayApi
from app.console.issuer_sign_in import BEGIN, CALLBACK, IssuerSignIn
from app.console.pages import acts, approvals, call, calls, ledger, overview, policy, run, runs, servers, sign_in
from app.console.rendering import HEADERS, PATH, SANDBOX, Renderer
from app.console.sessions import Session, Sessions
from app.console.visit import (
    THEME_COOKIE,
    TIMES_COOKIE,
    Visit,
    form_of,
    here_of,
    own_path,
    theme_of,
    verify_csrf,
)
from app.core.errors import MethodNotAllowed, RouteNotFound, TgaError, Unauthenticated
from app.domain.identity import Principal
from app.edge.oidc import OidcProvider
from app.edge.problems import document_of, status_of
from app.edge.services import Services, header_of

logger = logging.getLogger("tga")

COOKIE: Final = "console_session"
Page = Callable[[Visit], Awaitable[Response]]

PAGES: Final[dict[str, Page]] = {
    "/": overview.show,
    "/acts": acts.show,
    "/approvals": approvals.show,
    "/approvals/{trace_id}": approvals.show_one,
    "/calls": calls.show,
    "/calls/{trace_id}": call.show,
    "/calls/{trace_id}/value": call.show_value,
    "/find": calls.find,
    "/ledger": ledger.show,
    "/policy": policy.show,
    "/runs": runs.show,
    "/runs/{run_id}": run.show,
    "/servers": servers.show,
}
FORMS: Final[dict[str, Page]] = {
    "/approvals/{trace_id}": approvals.decide,
    "/calls/{trace_id}/resolve": call.resolve,
    "/calls/{trace_id}/recover": call.recover,
    "/calls/{trace_id}/withdraw": call.withdraw,
    "/ledger/verifications/{verification_id}/stop": ledger.stop,
    "/ledger/compare": ledger.compare,
    "/ledger/verify": ledger.verify,
    "/runs/{run_id}/answer": run.answer,
    "/runs/{run_id}/cancel": run.cancel,
    "/runs/{run_id}/retry": run.retry,
    "/runs/{run_id}/fork": run.fork,
    "/servers/accept": servers.accept,
}


def _is_from_elsewhere(request: Request) -> bool:
    """Whether another site led the browser here: it says so itself, where it is not too old for that."""
    said = [header_of(request.scope, name) for name in (b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest")]
    return said == ["cross-site", "navigate", "document"]


class ConsoleSite:
    """Behind the gateway's middleware. `api`: makes the API on services that authenticate sessions."""

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        api: Callable[[Services], ASGIApp],
        provider: OidcProvider | None = None,
    ) -> None:
        """`provider`: where people can sign in beside an API key."""
        self._services = services
        self._sessions = sessions
        self._as_sessions = replace(services, authenticator=sessions)
        self._make_api = api
        self._made_api: GatewayApi | None = None
        self._renderer = Renderer(PAGES)
        self._issuer = None
        if provider is not None:
            self._issuer = IssuerSignIn(provider, sessions, sessions.seals, services.clock, self._renderer)
        routes = [Route(PATH + path, self._page(page), methods=["GET"]) for path, page in PAGES.items()]
        routes += [Route(PATH + path, self._form(page), methods=["POST"]) for path, page in FORMS.items()]
        routes += [
            Route(PATH, self._home, methods=["GET"]),
            Route(f"{PATH}/sign-in", self._sign_in_page, methods=["GET"]),
            Route(f"{PATH}/sign-in", self._sign_in, methods=["POST"]),
            Route(f"{PATH}/sign-out", self._form(self._sign_out), methods=["POST"]),
            Route(f"{PATH}/theme", self._look("theme", THEME_COOKIE, "light", "dark"), methods=["POST"]),
            Route(f"{PATH}/times", self._look("times", TIMES_COOKIE, "utc", "local"), methods=["POST"]),
            Route(f"{PATH}/static/{{name}}", self._static, methods=["GET"]),
            Route(f"{PATH}/live", self._live, methods=["GET"]),
        ]
        if self._issuer is not None:
            routes += [
                Route(BEGIN, self._issuer.begin, methods=["GET"]),
                Route(CALLBACK, self._back, methods=["GET"]),
            ]
        self._router = Router(routes=routes, redirect_slashes=False)
        self._watch = live.Watch(self._as_sessions)

    @property
    def _api(self) -> GatewayApi:
        if self._made_api is None:  # the first visitor's: most gateways are not looked at when they start
            self._made_api = GatewayApi(self._make_api(self._as_sessions))
        return self._made_api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            if scope["path"].startswith(f"{PATH}/api/v1/") and scope["method"] == "GET":
                await self._pass_on(request, send)
                return
            if not any(route.matches(scope)[0] is Match.FULL for route in self._router.routes):
                is_known = any(route.matches(scope)[0] is Match.PARTIAL for route in self._router.routes)
                raise MethodNotAllowed("not here") if is_known else RouteNotFound("there is no such page")
            await self._router(scope, receive, send)
        except TgaError as error:
            await (await self._told(request, status_of(error), document_of(error)))(scope, receive, send)
        except ApiProblem as problem:
            await (await self._told(request, problem.status, problem.document))(scope, receive, send)

    # What is wrapped around pages and forms.
    def _page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            visit = await self._visit(request)
            return self._to_sign_in(request) if visit is None else await page(visit)

        return answer

    def _form(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            form = await form_of(request)
            visit = await self._visit(request)
            if visit is None:
                return self._to_sign_in(request)
            verify_csrf(visit.session, form)
            visit.form = form
            return await page(visit)

        return answer

    async def _visit(self, request: Request) -> Visit | None:
        session = self._session(request)
        principal = None if session is None else await self._principal(session)
        if session is None or principal is None:
            return None
        api = self._api.as_session(session.cookie)
        return Visit(request, principal, session, api, self._renderer, self._services.clock)

    def _session(self, request: Request) -> Session | None:
        return self._sessions.read(request.cookies.get(COOKIE))

    async def _principal(self, session: Session) -> Principal | None:
        try:
            return await self._sessions.authenticate(f"Session {session.cookie}")
        except Unauthenticated:
            return None

    def _to_sign_in(self, request: Request) -> Response:
        """Back to the page that was asked for, once signed in. A form that came too late was not sent.

        Who follows a link from elsewhere, a message say, comes without the session: browsers keep a Strict cookie from
        navigations that another site began. A page of ours asks again for the same one, which begins here.
        """
        if request.method == "GET" and COOKIE not in request.cookies and _is_from_elsewhere(request):
            context = {"next": here_of(request), "theme": theme_of(request), "now": self._services.clock.now()}
            return self._renderer.page("arriving.html", context)
        ended = "&ended=1" if request.cookies.get(COOKIE) else ""
        at = here_of(request) if request.method == "GET" else f"{PATH}/"
        return RedirectResponse(f"{PATH}/sign-in?next={sign_in.quoted(at)}{ended}", status_code=303, headers=HEADERS)

    async def _told(self, request: Request, status: int, document: dict[str, object]) -> Response:
        """An error as a page: what it is, whether anything was recorded, what to do, the code."""
        if status == 401:
            return self._to_sign_in(request)
        visit = None
        try:
            visit = await self._visit(request)
            if visit is not None:
                return await visit.page("problem.html", nav="", status=status, problem=document)
        except (TgaError, ApiProblem):
            pass  # the store is away: the page without its frame says what is to be said
        context = {"problem": document, "theme": theme_of(request), "now": self._services.clock.now()}
        return self._renderer.page("problem_alone.html", context, status=status)

    # What is there for everyone.
    async def _home(self, _: Request) -> Response:
        return RedirectResponse(f"{PATH}/", status_code=303, headers=HEADERS)

    async def _static(self, request: Request) -> Response:
        found = self._renderer.static(request.path_params["name"])
        if found is None:
            raise RouteNotFound("there is no such file")
        return found

    def _look(self, name: str, cookie: str, *values: str) -> Callable[[Request], Awaitable[Response]]:
        """How pages look to this browser: one of a few words, kept in a cookie that says nothing else."""

        async def answer(request: Request) -> Response:
            form = await form_of(request)
            made = RedirectResponse(own_path(form.get("next")), status_code=303, headers=HEADERS)
            if form.get(name) in values:
                made.set_cookie(cookie, form[name], max_age=31_536_000, path=PATH, samesite="strict", httponly=True)
            return made

        return answer

    async def _sign_in_page(self, request: Request) -> Response:
        if await self._visit(request) is not None:
            return RedirectResponse(f"{PATH}/", status_code=303, headers=HEADERS)
        return sign_in.page(self._renderer, request, self._services.clock.now(), issuer=self._issuer_name)

    async def _sign_in(self, request: Request) -> Response:
        form = await form_of(request)
        try:
            session = await self._sessions.open(form.get("key", "").strip())
        except Unauthenticated:
            now, issuer = self._services.clock.now(), self._issuer_name
            return sign_in.page(self._renderer, request, now, form=form, is_refused=True, issuer=issuer)
        made = RedirectResponse(own_path(form.get("next")), status_code=303, headers=HEADERS)
        is_secure = request.url.scheme == "https" or header_of(request.scope, b"x-forwarded-proto") == "https"
        made.set_cookie(COOKIE, session.cookie, path=PATH, httponly=True, samesite="strict", secure=is_secure)
        return made

    async def _back(self, request: Request) -> Response:
        if self._issuer is None:
            raise RouteNotFound("there is no such page")
        return await self._issuer.back(request, COOKIE)

    @property
    def _issuer_name(self) -> str | None:
        return None if self._issuer is None else self._issuer.provider.name

    async def _sign_out(self, visit: Visit) -> Response:
        await self._sessions.end(visit.session)
        made = None if self._issuer is None else await self._issuer.ended(visit.request, visit.session)
        if made is None:
            made = RedirectResponse(f"{PATH}/sign-in", status_code=303, headers=HEADERS)
        made.delete_cookie(COOKIE, path=PATH, httponly=True, samesite="strict")
        return made

    # What scripts of pages ask for.
    async def _live(self, request: Request) -> Response:
        session = self._session(request)
        if session is None or await self._principal(session) is None:
            return Response(status_code=204, headers=HEADERS)  # tells an EventSource not to come back
        return self._watch.stream(request, session.cookie)

    async def _pass_on(self, request: Request, send: Send) -> None:
        session = self._session(request)
        if session is None:
            raise Unauthenticated("the session has ended")
        path = request.scope["path"].removeprefix(f"{PATH}/api")

        async def sandboxed(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in SANDBOX.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await self._api.pass_on(request.scope, request.receive, sandboxed, path=path, cookie=session.cookie)

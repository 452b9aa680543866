"""`jaxroll ui`: the dashboard's server. It reads the runs' files, and answers only clients with the token.

A browser gets a session in exchange for the token or for the code in the printed link, which works once. Names of
other sites that resolve to this machine are refused (`Host`), and so are requests that another page sends (`Origin`,
and a header that such a page cannot set).
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxroll import lifeline
from jaxroll.errors import ConfigError, DataError, JaxRollError
from jaxroll.policy.limiter import max_age
from jaxroll.rpc import http
from jaxroll.ui import rollouts, series
from jaxroll.ui import runs as run_list
from jaxroll.ui.runs import Runs, encoded

STATIC = Path(__file__).parent / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
OPEN_FILES = ("login.js", "style.css", "icon.svg")  # without a session
SESSIONS_KEPT, SESSION_S = 64, 7 * 24 * 3600.0
MAX_BODY_BYTES = 64 << 10
READ_S = 5.0  # Prometheus waits for ten seconds
MAX_POINTS, MAX_RUNS_SHOWN, MAX_NAMES = 4000, 12, 40
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
OWN_HEADER = b"x-jaxroll"  # a page of another origin cannot set it without our consent

Query = Mapping[str, str]


class Dashboard:
    """The application: pages for a browser, JSON for its scripts. `host_name` is the name given with --host."""

    def __init__(self, runs: Runs, token: str, host_name: str = "") -> None:
        self.runs, self._token, self._host_name = runs, token.encode(), host_name
        self.code = secrets.token_urlsafe(24)  # of the printed link; used up by the first login
        self._sessions: dict[str, float] = {}  # → end
        self.cookie = "jaxroll_ui"
        views: dict[str, Callable[[Request], Any]] = {
            "runs": self._runs,
            "run": self._run,
            "curves": self._curves,
            "timeline": self._timeline,
            "ages": self._ages,
            "versions": self._versions,
            "faults": self._faults,
            "roles": self._roles,
            "rollouts": self._rollouts,
            "rollout": self._rollout,
            "member": self._member,
            "configs": self._configs,
        }
        routes = [
            Route("/", self._page),
            Route("/login", self._login, methods=["POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{path:path}", self._static),
            Route("/api/control", self._control, methods=["POST"]),
            Route("/metrics", self._metrics),
            *(Route(f"/api/{name}", self._view(view)) for name, view in views.items()),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((JaxRollError, HTTPException), _refused)
        self.app: ASGIApp = self._guarded(Starlette(routes=routes, exception_handlers=handlers))

    # --- access

    def _guarded(self, app: ASGIApp) -> ASGIApp:
        """`app` behind the checks of host, origin and session; every response has `HEADERS`."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)

            async def with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                    message["headers"] = [*message["headers"], *added]
                await send(message)

            refusal = self._refusal(Request(scope))
            await (app if refusal is None else refusal)(scope, receive, with_headers)

        return guarded

    def _refusal(self, request: Request) -> Response | None:
        if not self._is_our_host(request.headers.get("host", "")):
            return _error(421, "this name is not one of this server's: use its address, or name it with --host")
        if request.method not in ("GET", "HEAD") and not self._is_our_page(request):
            return _error(403, "a request that changes something must come from the dashboard itself")
        path = request.url.path
        if path in ("/", "/login") or path in {f"/static/{name}" for name in OPEN_FILES} or self.is_admitted(request):
            return None
        return _error(
            401,
            "log in first, or send `Authorization: Bearer TOKEN` with the token of the file that the "
            "server names at its start",
        )

    def _is_our_host(self, value: str) -> bool:
        """True if no other site can have this name: an address, localhost, or the name given with --host."""
        name = urlsplit(f"//{value}").hostname or ""
        if name == "localhost" or (self._host_name and hmac.compare_digest(name, self._host_name.lower())):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_our_page(self, request: Request) -> bool:
        origin = request.headers.get("origin")
        own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        fetched = request.headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        return own and fetched and any(name == OWN_HEADER for name, _ in request.scope["headers"])

    def is_admitted(self, request: Request) -> bool:
        """True for a session of a browser, and for a client that shows the token."""
        kind, _, shown = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), self._token):
            return True
        shown = request.cookies.get(self.cookie, "")
        return any(
            hmac.compare_digest(shown.encode(), known.encode()) and end > time.monotonic()
            for known, end in self._sessions.items()
        )

    async def _login(self, request: Request) -> Response:
        shown = await _body(request)
        code, token = shown.get("code"), shown.get("token")
        used = isinstance(code, str) and bool(self.code) and hmac.compare_digest(code.encode(), self.code.encode())
        if used:
            self.code = ""
        if not used and not (isinstance(token, str) and hmac.compare_digest(token.strip().encode(), self._token)):
            await asyncio.sleep(0.2)
            return _error(401, "that is not the token" if token else "the link was used before: enter the token")
        session = secrets.token_urlsafe(32)
        now = time.monotonic()
        self._sessions = {known: end for known, end in self._sessions.items() if end > now}
        while len(self._sessions) >= SESSIONS_KEPT:
            self._sessions.pop(next(iter(self._sessions)))
        self._sessions[session] = now + SESSION_S
        response = _json({})
        response.set_cookie(self.cookie, session, max_age=int(SESSION_S), httponly=True, samesite="strict", path="/")
        return response

    async def _logout(self, request: Request) -> Response:
        self._sessions.pop(request.cookies.get(self.cookie, ""), None)
        response = _json({})
        response.delete_cookie(self.cookie, path="/", httponly=True, samesite="strict")
        return response

    # --- files

    async def _page(self, request: Request) -> Response:
        return _file("page.html") if self.is_admitted(request) else _file("login.html", status=401)

    async def _static(self, request: Request) -> Response:
        return _file(request.path_params["path"])

    async def _control(self, request: Request) -> Response:
        shown = await _body(request)
        path = await run_in_threadpool(self.runs.path, str(shown.get("run")))
        return _json({"text": await run_list.control(path, str(shown.get("action")))})

    async def _metrics(self, request: Request) -> Response:
        return Response(await run_in_threadpool(self._exposition), media_type="text/plain; version=0.0.4")

    def _exposition(self) -> str:
        """The newest numbers of the live runs in Prometheus' text format."""
        found: list[series.Sample] = []
        until_s = time.monotonic() + READ_S
        for run in self.runs.listed():
            if run.get("state") == "live":
                look = partial(series.samples, run["name"])
                samples, are_newest = self.runs.with_content(run["name"], look, max(0.0, until_s - time.monotonic()))
                found += samples if are_newest else ()  # a long file is read in parts, and its first rows are old
                found += [("jaxroll_trained_steps", f"run={series.quoted(run['name'])}", float(run["trained"]))]
        return series.exposition(found)

    # --- views: JSON

    def _view(self, view: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answered(request: Request) -> Response:
            return _json(await run_in_threadpool(view, request))

        return answered

    def _runs(self, request: Request) -> Any:
        return {"folder": str(self.runs.folder), "runs": self.runs.listed()}

    def _run(self, request: Request) -> Any:
        name = request.query_params.get("run", "")
        path, about = self.runs.path(name), self.runs.about(name)
        config = about.pop("config")

        def look(content: series.Content) -> dict[str, Any]:
            rows = {f"{role}/{kind}": row for (role, kind), row in content.latest.items() if kind in ("step", "store")}
            evals = [row for (_, kind), row in content.latest.items() if kind == "eval"]
            return {
                "rows": content.rows,
                "names": series.names(content),
                "latest": rows,
                "eval": evals[:1],
                "last_t": content.last_t,
                "first_t": content.first_t,
            }

        found, ready = self.runs.with_content(name, look)
        return {
            "name": name,
            "about": about,
            "ready": ready,
            **found,
            **self.runs.state(path),
            "steps": config["schedule"]["steps"],
            "alpha": config["schedule"]["alpha"],
            "skipped": self.runs.followed(name)[0].skipped,
            "now": time.time(),
        }

    def _curves(self, request: Request) -> Any:
        query = request.query_params
        runs, names = query.getlist("run")[:MAX_RUNS_SHOWN], query.getlist("name")[:MAX_NAMES]
        points, window = _points(query), (_number(query, "from"), _number(query, "to"))
        x = "time" if query.get("x") == "time" else "step"
        curves: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        all_read = True
        for run in runs:
            found, ready = self.runs.with_content(run, lambda content: series.curves(content, names, x, points, window))
            all_read = all_read and ready
            for name, several in found.items():
                curves[name] += [{"run": run, **one} for one in several]
        return {"x": x, "curves": curves, "ready": all_read}

    def _timeline(self, request: Request) -> Any:
        query = request.query_params
        start, end, points = _number(query, "from"), _number(query, "to"), _points(query)
        found, ready = self.runs.with_content(
            query.get("run", ""), lambda content: series.lanes(content, start, end, points)
        )
        return found | {"ready": ready}

    def _ages(self, request: Request) -> Any:
        name, last = request.query_params.get("run", ""), _whole(request.query_params, "last")
        alpha = self.runs.about(name)["config"]["schedule"]["alpha"]
        found, ready = self.runs.with_content(name, lambda content: series.age_histogram(content, last))
        return {"ages": found, "alpha": alpha, "bound": max_age(alpha), "ready": ready}

    def _versions(self, request: Request) -> Any:
        name = request.query_params.get("run", "")
        with self.runs.reading(self.runs.path(name)) as db:
            found = [] if db is None else rollouts.versions(db)

        def look(content: series.Content) -> dict[str, Any]:
            return {role: row.get("version") for (role, kind), row in content.latest.items() if kind == "stats"}

        return {"versions": found, "samplers": self.runs.with_content(name, look)[0]}

    def _faults(self, request: Request) -> Any:
        name = request.query_params.get("run", "")
        with self.runs.reading(self.runs.path(name)) as db:
            found = {} if db is None else rollouts.faults(db)

        def look(content: series.Content) -> dict[str, Any]:
            return {"restarts": dict(content.restarts), "events": list(content.events)[-300:][::-1]}

        return found | self.runs.with_content(name, look)[0]

    def _roles(self, request: Request) -> Any:
        name = request.query_params.get("run", "")
        about = self.runs.about(name)
        with self.runs.reading(self.runs.path(name)) as db:
            leases = {} if db is None else dict(rollouts.holders(db))

        def look(content: series.Content) -> dict[str, Any]:
            rows: dict[str, dict[str, Any]] = {}
            for (role, kind), row in content.latest.items():
                if kind in ("devices", "stats", "step", "eval"):
                    rows.setdefault(role, {})[kind] = {k: v for k, v in row.items() if k not in ("correct", "examples")}
            store = next((row for (_, kind), row in content.latest.items() if kind == "store"), None)
            return {"roles": rows, "restarts": dict(content.restarts), "store": store}

        about.pop("config")
        return {"about": about, "leases": leases, **self.runs.with_content(name, look)[0]}

    def _rollouts(self, request: Request) -> Any:
        query = request.query_params
        search = rollouts.Search(
            text=query.get("text", "")[:500],
            answer=query.get("answer", "")[:500],
            state=query.get("state", ""),
            holder=query.get("holder", ""),
            step=_whole(query, "step"),
            order=query.get("order", "newest"),
            offset=_whole(query, "offset") or 0,
            reward_from=_number(query, "reward_from"),
            reward_to=_number(query, "reward_to"),
            limit=_whole(query, "limit") or rollouts.PAGE,
        )
        with self.runs.reading(self.runs.path(query.get("run", ""))) as db:
            if db is None:
                return {"total": 0, "offset": 0, "limit": search.limit, "groups": [], "states": {}}
            return rollouts.page(db, search, self.runs.decoder(query.get("run", ""))[0] if search.answer else None)

    def _rollout(self, request: Request) -> Any:
        group = _whole(request.query_params, "group")
        with self.runs.reading(self.runs.path(request.query_params.get("run", ""))) as db:
            return rollouts.group_facts(_logged(db), -1 if group is None else group)

    def _member(self, request: Request) -> Any:
        query, name = request.query_params, request.query_params.get("run", "")
        group, member = _whole(query, "group"), _whole(query, "member")
        decode, why = self.runs.decoder(name)
        with self.runs.reading(self.runs.path(name)) as db:
            found = rollouts.member_facts(
                _logged(db), -1 if group is None else group, -1 if member is None else member, decode
            )
        return found | {"no_text": why}

    def _configs(self, request: Request) -> Any:
        names = request.query_params.getlist("run")[:MAX_RUNS_SHOWN]
        return {"configs": {name: self.runs.about(name)["config"] for name in names}}


def _logged(db: Any) -> Any:
    if db is None:
        raise DataError("the run has no log yet: its store makes it when it starts")
    return db


def _number(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        raise ConfigError(name, text[:40], "is not a number", "Leave it out, or give a number.") from None
    return value if value is None or abs(value) < 1e15 else None


def _whole(query: Query, name: str) -> int | None:
    value = _number(query, name)
    return None if value is None else int(value)


def _points(query: Query) -> int:
    return min(max(10, _whole(query, "points") or 500), MAX_POINTS)


# --- requests and responses


async def _body(request: Request) -> dict[str, Any]:
    read = bytearray()
    async for part in request.stream():
        read += part
        if len(read) > MAX_BODY_BYTES:
            raise HTTPException(413, "the body is too large")
    try:
        found = msgspec.json.decode(bytes(read))
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        raise HTTPException(400, "the body is not a JSON object")
    return found


def _json(value: Any, status: int = 200) -> Response:
    return Response(encoded(value), status, media_type="application/json")


def _error(status: int, text: str) -> Response:
    return _json({"error": text}, status)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, str(error.detail))
    return _error(404 if isinstance(error, ConfigError) else 503, str(error))


def _file(name: str, status: int = 200) -> Response:
    path = STATIC / name
    if ".." in Path(name).parts or path.suffix not in KINDS or not path.is_file():
        return _error(404, "there is no such file")
    return Response(path.read_bytes(), status, media_type=KINDS[path.suffix])


# --- the command


def main(folder: Path, options: argparse.Namespace) -> int:
    """Serve until a stop signal and return 0."""
    token_file = Path(options.token_file) if options.token_file else http.user_token_file("ui.token")
    dashboard = Dashboard(Runs(folder), http.token(None, token_file), options.host)
    listening = http.listen(options.host, options.port, insecure=options.insecure)
    dashboard.cookie = f"jaxroll_ui_{listening.getsockname()[1]}"  # cookies are shared by all ports of a host
    url = http.address(options.host, listening)
    stop = Future[None]()
    lifeline.on_stop(lambda: stop.done() or stop.set_result(None))
    print(f"shows the runs in {folder}")
    print(f"open {url}/#code={dashboard.code}  (this link works once; the token is in {token_file})", flush=True)
    asyncio.run(_serve(dashboard, listening, stop))
    return 0


async def _serve(dashboard: Dashboard, listening: Any, stop: Future[None]) -> None:
    dashboard.runs.start()
    serving = asyncio.ensure_future(http.serve(dashboard.app, listening))
    await asyncio.wait([serving, asyncio.wrap_future(stop)], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    dashboard.runs.close()

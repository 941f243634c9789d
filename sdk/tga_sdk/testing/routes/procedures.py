"""Programs: registered, listed, read."""

from __future__ import annotations

from tga_sdk.testing import messages as m
from tga_sdk.testing import views
from tga_sdk.testing.reading import body_of, parameters
from tga_sdk.testing.routes.routing import Asked, Reply, json_reply, page_of, route


@route("POST", "/v1/procedures")
async def register(asked: Asked) -> Reply:
    parameters(asked.query)
    said = body_of(m.ProcedureSaid, asked.raw)
    with asked.gateway.lock:
        program, is_new = asked.gateway.engine.register(said, asked.principal)
        return json_reply({**views.program_document(program), "is_new": is_new})


@route("GET", "/v1/procedures")
async def list_procedures(asked: Asked) -> Reply:
    given = parameters(asked.query, "procedure", "cursor", "limit")
    with asked.gateway.lock:
        items = []
        for name in sorted(asked.gateway.engine.programs):
            if given.get("procedure") in (None, name):
                programs = list(reversed(asked.gateway.engine.programs[name].values()))
                items += [{**views.program_document(one), "is_newest": at == 0} for at, one in enumerate(programs)]
        page, goes_on = page_of(items, given)
        return json_reply({"items": page, "next": goes_on})


@route("GET", "/v1/procedures/{name}")
async def load_procedure(asked: Asked) -> Reply:
    given = parameters(asked.query, "version", "program_digest")
    with asked.gateway.lock:
        found = asked.gateway.engine.find_program(
            asked.named["name"], given.get("version"), given.get("program_digest")
        )
        return json_reply(views.procedure_document(found))

"""Programs that are registered, and runs that are started of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tga_sdk.canonical import canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.run import (
    MemoryRun,
    Record,
    blobs_of,
    folded,
)
from tga_sdk.testing.schema import misfit, verify_schema
from tga_sdk.testing.store import Program, Store, verify_size


class Starting(Store):
    def register(self, said: m.ProcedureSaid, principal: str) -> tuple[Program, bool]:
        if said.language == "lua":
            raise Problem("LUA_UNAVAILABLE", "a gateway in memory executes no Lua procedures")
        for name in ("input_schema", "output_schema", "state_schema"):
            verify_schema(f"the body at /{name}", getattr(said, name))
        programs = self.programs.setdefault(said.name, {})
        key = (said.version, said.program_digest)
        known = programs.get(key)
        if known is not None and canonical(known.said) == canonical(said.to_json()):
            return known, False
        self._numbers += 1
        programs.pop(key, None)  # said again in other words, it is the newest
        programs[key] = Program(said.to_json(), self.now(), principal, self._numbers)
        return programs[key], True

    def find_program(self, name: str, version: str | None = None, digest: str | None = None) -> Program:
        programs = list(reversed(self.programs.get(name, {}).values()))
        for program in programs:
            if version in (None, program.said["version"]) and digest in (None, program.said["program_digest"]):
                return program
        if not programs:
            raise Problem("PROCEDURE_NOT_FOUND", f"nobody has registered a procedure {name}")
        told = ", ".join(dict.fromkeys(program.said["version"] for program in programs))
        raise Problem(
            "PROCEDURE_NOT_FOUND",
            f"nobody has registered this version of {name}",
            expected=f"one of {told}",
            found=version or digest,
        )

    def judged(self, procedure: str, version: str | None, given: Mapping[str, Any]) -> Program:
        verify_size(given, "the input")
        program = self.find_program(procedure, version)
        schema = program.said["input_schema"]
        if schema is not None and given["tier"] == "inline":
            found = misfit(schema, given["value"])
            if found is not None:
                raise Problem(
                    "ARGUMENTS_INVALID", f"the input does not fit procedure {program.said['name']}", expected=found
                )
        return program

    def start(
        self,
        program: Program,
        given: dict[str, Any],
        principal: str,
        *,
        run_id: str,
        trigger: tuple[str, str | None] = ("call", None),
        policy: dict[str, Any] | None = None,
        tags: Sequence[str] = (),
        parent: dict[str, Any] | None = None,
        is_strict: bool = False,
    ) -> tuple[MemoryRun, bool]:
        """The run, and whether it was there already. Problem when the id is another run's."""
        said: dict[str, Any] = {
            "run_id": run_id,
            "principal": {"principal_id": principal, "tenant": "default", "roles": ["admin"]},
            "procedure": program.said["name"],
            "version": program.said["version"],
            "program_digest": program.said["program_digest"],
            "input": given,
            "started_at": self.now(),
            "trigger": {"type": trigger[0], "id": trigger[1]},
            "parent": parent,
            "forked_from": None,
            "policy": policy or {**program.said["policy"], "on_parent_end": "cancel"},
            "tags": list(tags),
            "allowed_by": {"policy_digest": None, "policy_ids": []},
        }
        if is_strict:
            said["strict_determinism"] = True
        return self._born(said, None)

    def _born(self, said: dict[str, Any], source: MemoryRun | None) -> tuple[MemoryRun, bool]:
        found = self.runs.get(said["run_id"])
        if found is not None:
            names = ("procedure", "input", "parent", "forked_from")
            is_same = all(canonical(found.start[name]) == canonical(said[name]) for name in names)
            if not is_same or found.start["principal"]["principal_id"] != said["principal"]["principal_id"]:
                raise Problem(
                    "RUN_ID_TAKEN",
                    "a run with this id was started otherwise",
                    expected="the same procedure and input",
                    found="another procedure, input or starter",
                )
            return self.load(said["run_id"]), True
        for ref in blobs_of(said):
            self._verify_blob(ref)
        run = MemoryRun(said["run_id"])
        run.add("run_start", said, at=self.now(), source=source)
        run.salt = self.new_salt(run.run_id, "digests") if source is None else source.salt
        run.draw_salt = self.new_salt(run.run_id, "draws") if source is None else source.draw_salt
        self.runs[run.run_id] = run
        if source is not None:
            self.sources[run.run_id] = source
        self._changed(run, 0)
        return run, False

    def fork(self, run_id: str, body: m.ForkBody, principal: str) -> tuple[MemoryRun, bool]:
        origin = self.load(run_id)
        last = origin.sequence_number
        number = (self._forked_at(body.run_id, run_id) or last) if body.at is None else body.at
        if not 1 <= number <= last:
            raise Problem("RUN_ENDED", f"run {run_id} has no entry {body.at}", expected=f"1 to {last}", found=body.at)
        source = self.at(run_id, number)
        program = self.find_program(origin.start["procedure"], body.version or source.version)
        is_same = body.version is None
        said = {
            **copy.deepcopy(origin.start),
            "run_id": body.run_id or self.new_id(),
            "principal": {"principal_id": principal, "tenant": "default", "roles": ["admin"]},
            "version": source.version if is_same else program.said["version"],
            "program_digest": source.program_digest if is_same else program.said["program_digest"],
            "started_at": self.now(),
            "trigger": {"type": "fork", "id": run_id},
            "parent": None,
            "forked_from": {
                "run_id": run_id,
                "sequence_number": number,
                "entry_digest": source.entry_digest,
                "state_change": [change.to_json() for change in body.state_change],
            },
        }
        return self._born(said, source)

    def _forked_at(self, run_id: str | None, source_id: str) -> int | None:
        """After which entry this run was forked from the source: told again it is the same fork."""
        found = self.runs.get(run_id or "")
        origin = None if found is None else found.start["forked_from"]
        return origin["sequence_number"] if origin is not None and origin["run_id"] == source_id else None

    def at(self, run_id: str, number: int) -> MemoryRun:
        """The run as it stood after this entry."""
        run = self.load(run_id)
        stood = folded(run_id, run.records[:number], source=self.sources.get(run_id))
        stood.salt, stood.draw_salt = run.salt, run.draw_salt
        return stood

    def first_seq(self, run: MemoryRun) -> int:
        origin = run.start["forked_from"]
        return 0 if origin is None else self.first_seq(self.sources[run.run_id]) - origin["sequence_number"]

    def journal_of(self, run: MemoryRun) -> list[tuple[int, Record]]:
        """All records with their numbers; a fork's begins with its source's, under numbers that end at 0."""
        own = [(record.sequence_number, record) for record in run.records]
        origin = run.start["forked_from"]
        if origin is None:
            return own
        before = self.journal_of(self.sources[run.run_id])
        return [(number - origin["sequence_number"], record) for number, record in before] + own

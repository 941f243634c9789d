"""Five MCP servers that nobody here wrote, behind a tap that counts what is sent to them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mcp.npm import npm_servers
from tests.mcp.standing import TAP

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Real:
    """A server; a tool that reads, one that writes, a call that fails; and what `hold` is tried with."""

    name: str
    command: list[str]
    version: str
    read: Call
    write: Call
    fails: Call
    held: Call
    env: dict[str, str] = field(default_factory=dict)

    def config(self, folder: Path) -> str:
        command = [sys.executable, str(TAP), str(self.book(folder)), *self.command]
        lines = [
            f"[servers.{self.name}]",
            'transport = "mcp-stdio"',
            f"command = {json.dumps(command)}",
            "timeout_ms = 20000",
            "env = { " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in self.env.items()) + " }",
            f'[servers.{self.name}.tools."{self.held[0]}"]',
            'on_unknown_outcome = "hold"',
        ]
        return "\n".join(lines) + "\n"

    def book(self, folder: Path) -> Path:
        return folder / f"{self.name}.book"

    def sends(self, folder: Path, tool: str | None = None) -> list[dict[str, Any]]:
        book = self.book(folder)
        lines = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
        return [line["params"] for line in lines if tool in (None, line["params"]["name"])]

    def keep_answers_back(self, folder: Path) -> Path:
        held = Path(f"{self.book(folder)}.hold")
        held.touch()
        return held


NAMES = ["everything", "files", "memory", "git", "time"]


def real_server(name: str, folder: Path) -> Real:
    match name:
        case "everything":
            return Real(
                name,
                ["node", str(npm_servers() / "server-everything" / "dist" / "index.js")],
                "2025-11-25",
                read=("get-tiny-image", {}),
                write=("echo", {"message": "héllo"}),
                fails=("get-resource-reference", {"resourceType": "Text", "resourceId": -1}),
                held=("get-sum", {"a": 1, "b": 2}),
            )
        case "files":
            root = folder / "root"
            root.mkdir(exist_ok=True)
            (root / "a.txt").write_text("alpha")
            return Real(
                name,
                ["node", str(npm_servers() / "server-filesystem" / "dist" / "index.js"), str(root)],
                "2025-11-25",
                read=("read_text_file", {"path": str(root / "a.txt")}),
                write=("write_file", {"path": str(root / "b.txt"), "content": "beta"}),
                fails=("read_text_file", {"path": "/etc/passwd"}),
                held=("create_directory", {"path": str(root / "made")}),
            )
        case "memory":
            entity = {"name": "Ada", "entityType": "person", "observations": ["counts"]}
            relation = {"from": "Ada", "to": "Babbage", "relationType": "knows"}
            return Real(
                name,
                ["node", str(npm_servers() / "server-memory" / "dist" / "index.js")],
                "2025-11-25",
                read=("read_graph", {}),
                write=("create_entities", {"entities": [entity]}),
                fails=("add_observations", {"observations": [{"entityName": "Nobody", "contents": ["x"]}]}),
                held=("create_relations", {"relations": [relation]}),
                env={"MEMORY_FILE_PATH": str(folder / "memory.jsonl")},
            )
        case "git":
            repo = folder / "repo"
            if not repo.exists():
                subprocess.run(["git", "init", "-q", str(repo)], check=True)
                identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
                commit = ["git", *identity, "commit", "-q", "--allow-empty", "-m", "first"]
                subprocess.run(commit, cwd=repo, check=True)
                (repo / "new.txt").write_text("new")
            at = {"repo_path": str(repo)}
            return Real(
                name,
                [sys.executable, "-m", "mcp_server_git", "--repository", str(repo)],
                "2026-07-28",
                read=("git_log", at),
                write=("git_add", {**at, "files": ["new.txt"]}),
                fails=("git_checkout", {**at, "branch_name": "nowhere"}),
                held=("git_create_branch", {**at, "branch_name": "branched"}),
            )
        case "time":
            convert = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            return Real(
                name,
                [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"],
                "2026-07-28",
                read=("get_current_time", {"timezone": "UTC"}),
                write=("get_current_time", {"timezone": "Europe/Paris"}),
                fails=("get_current_time", {"timezone": "Nowhere/Nothing"}),
                held=("convert_time", convert),
            )
    raise ValueError(name)

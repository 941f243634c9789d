"""`tga demo`: the gateway over HTTP, a small real tool server beside it, one call made, and what to try next."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer
from yarl import URL

from app.cli.client import GatewayClient
from app.cli.installation import ROOT, own_command
from app.cli.running import cancelled_by_signals, context_of, run
from app.cli.showing import output
from app.cli.traces import show_trace
from app.config import load_config
from app.connectors.mcp import child_guard
from app.core.errors import SettingInvalid, TgaError
from app.settings import Settings

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway

_BANK: Final = "bank"
_STOP_S: Final = 10.0


def add_to(application: typer.Typer) -> None:
    application.command("demo")(demo_command)


def demo_command(context: typer.Context) -> None:
    """Run the gateway beside a small tool server, make one call, and say what to try; until SIGINT or SIGTERM.

    It is `tga serve` on TGA_HOME, TGA_HOST and TGA_PORT, with the configuration that `tga serve` would use. Where that
    names a server `bank` on this machine, as the packaged one does, this command runs the bank there.
    """
    settings = context_of(context).settings

    async def work() -> bool:
        with _bank_of(settings) as with_bank:
            async with context_of(context).open_with(with_bank) as gateway:
                return await _show(gateway, with_bank)

    run(cancelled_by_signals(work()))


async def _show(gateway: Gateway, settings: Settings) -> bool:
    from app.gateway.serving import serve  # here, because the web framework takes long to load

    async def on_listening(url: str) -> None:
        try:
            await _make_a_call(dataclasses.replace(settings, url=url, api_key=None))
        except TgaError as error:  # a configuration of one's own may have no bank
            output.print(f"\nThe demonstration's call was not made: {error}", markup=False)
        _tell_what_to_try(settings, url)

    return await serve(gateway, settings, on_listening=on_listening)


async def _make_a_call(settings: Settings) -> None:
    body = {
        "server_id": _BANK,
        "tool_name": "charge",
        "arguments": {"amount": 4200},
        "idempotency_key": "order-7",
        "intent": "charge for order 7",
    }
    async with GatewayClient.open(settings) as client:
        answer = (await client.post("/v1/tool-calls", body)).document
        output.print("\nOne tool call over HTTP, from request to effect:\n")
        await show_trace(client, answer["trace_id"], as_json=False)


def _tell_what_to_try(settings: Settings, url: str) -> None:
    key = shlex.quote(str(settings.admin_key_file))
    call = '{"server_id":"bank","tool_name":"%s","arguments":{"amount":%d},"idempotency_key":"%s"}'
    curl = f'curl -s {url}/v1/tool-calls -H "Authorization: Bearer $(cat {key})" -d'
    tga = own_command()
    exports = [f"export TGA_HOME={shlex.quote(str(settings.home))}"]
    if settings.url != "http://127.0.0.1:8420":
        exports.append(f"export TGA_URL={url}")
    suggestions = {
        "A call over HTTP; again, and it is answered from the record: charged once": [
            f"{curl} '{call % ('charge', 42, 'order-8')}'"
        ],
        "The same with the command tga, which finds the gateway and the key by itself": [
            *exports,
            f"{tga} call bank charge -a amount=42 -k order-9",
            f"{tga} traces",
        ],
        "A refund waits for a person: ask for one, look, approve it (or deny it)": [
            f"{curl} '{call % ('refund', 5, 'refund-1')}'",
            f"{tga} approvals",
            f"{tga} approve ID",
        ],
    }
    if (ROOT / "tools" / "crash.py").is_file():  # in a clone
        python = shlex.quote(os.path.relpath(sys.executable))
        suggestions["Kill a gateway in the middle of a call: the call is finished, once"] = [f"{python} tools/crash.py"]
        suggestions["Change the record as a superuser: it is found"] = [f"{python} tools/tamper.py"]
    output.print("\n[bold]Try, in another terminal in this folder:[/]")
    for title, commands in suggestions.items():
        output.print(f"\n  [dim]# {title}[/]")
        for command in commands:
            output.print(f"  {command}", markup=False)
    output.print(f"\n  [dim]# The console, in a browser; sign in with the key in {key}:[/] {url}/console")
    output.print(f"\n  [dim]# The API:[/] {url}/docs")
    output.print("\nCtrl-C stops everything.\n")


@contextlib.contextmanager
def _bank_of(settings: Settings) -> Iterator[Settings]:
    """The bank, where the configuration says that it is, for as long as this lasts and no longer than this process.

    Gives the settings to open the gateway with: another port, where that of the packaged configuration is taken.
    """
    _verify_free(settings.host, settings.port, "TGA_PORT=8430 chooses another port for this gateway.")
    server = load_config(settings.config_file).servers.get(_BANK)
    address = None if server is None or server.base_url is None else URL(server.base_url)
    if address is None or address.host not in ("127.0.0.1", "localhost") or address.port is None:
        output.print(
            f"{settings.config_file} has no server `{_BANK}` on this machine: no bank is started.", markup=False
        )
        yield settings
        return
    settings.home.mkdir(parents=True, exist_ok=True, mode=0o711)
    port, is_own = address.port, settings.config_file != _packaged()
    if is_own:
        _verify_free("127.0.0.1", port, "The configured tool server is started there: does another `tga demo` run?")
    elif not _is_free("127.0.0.1", port):
        port = 0
    book = settings.home / "bank.jsonl"
    # By its path: the bank knows nothing of the gateway, and its package is importable here alone.
    program = str(resources.files("app.demo").joinpath("tool_server.py"))
    theirs, ours = os.pipe()
    bank = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", child_guard.__file__, str(theirs)),
            *(sys.executable, program, "--port", str(port), "--book", str(book)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(theirs,),
        start_new_session=True,  # Ctrl-C is for the gateway; the bank ends after it
    )
    os.close(theirs)
    try:
        url = bank.stdout.readline().strip() if bank.stdout else ""
        if not url:
            raise SettingInvalid("the demonstration's tool server did not start", remedy="What it said is shown above.")
        output.print(f"A tool server of its own is at {url}; its book of executions is {book}", markup=False)
        if port == 0:
            output.print(f"(Port {address.port}, where it is otherwise, is taken.)")
            settings = _with_bank_at(settings, url)
        output.print("Starting …")
        yield settings
    finally:
        os.close(ours)  # the guard sees it, as it would see our death, and ends the bank
        with contextlib.suppress(subprocess.TimeoutExpired):
            bank.wait(timeout=_STOP_S)
        output.print("Stopped.")


def _packaged() -> Path:
    return Path(str(resources.files("app.demo").joinpath("tga.toml")))


def _with_bank_at(settings: Settings, url: str) -> Settings:
    """The same with the packaged configuration but for the bank's address; a file of its own in the home directory."""
    text = re.sub(r'(?m)^base_url = ".*"$', f'base_url = "{url}"', _packaged().read_text("utf-8"), count=1)
    made = settings.home / "demo.toml"
    made.write_text(text, "utf-8")
    return dataclasses.replace(settings, config=made)


def _is_free(host: str, port: int) -> bool:
    try:
        _verify_free(host, port, "")
    except SettingInvalid:
        return False
    return True


def _verify_free(host: str, port: int, remedy: str) -> None:
    """Raise SettingInvalid unless one could listen there now."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server((str(address[0]), port), family=family).close()
    except OSError as error:
        raise SettingInvalid(
            f"port {port} of {host} is taken", expected="a free port", found=error.strerror, remedy=remedy
        ) from None

"""Keys are made once, kept from others, rotated without a gap, and shown nowhere."""

from __future__ import annotations

import base64
import logging
import os
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from app.core.ed25519 import key_id_of, verify_signature
from app.core.errors import SecretMissing, SettingInvalid
from app.keys.keyring import Keyring
from tests.patience import HANG_S

OTHER = {
    "TGA_SIGNING_KEY": base64.b64encode(b"s" * 32).decode(),
    "TGA_SEALING_KEY": base64.b64encode(b"e" * 32).decode(),
}


@pytest.fixture
def folder(home: Path) -> Path:
    return home / "new" / "keys"


def opened(folder: Path) -> Keyring:
    return Keyring.open(folder, {})


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_first_start_makes_both_keys_for_their_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        opened(folder)
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    assert {file.name: mode_of(file) for file in folder.iterdir()} == {
        ".lock": 0o600,
        "signing.key": 0o600,
        "sealing.key": 0o600,
    }
    for name in ("signing.key", "sealing.key"):
        (line, rest) = (folder / name).read_bytes().split(b"\n")
        assert rest == b""
        assert len(base64.b64decode(line, validate=True)) == 32


def test_later_starts_find_the_same_keys(folder: Path) -> None:
    first = opened(folder)
    again = opened(folder)
    assert (first.key_id, first.sealing_key_id) == (again.key_id, again.sealing_key_id)
    assert again.unseal(first.seal(b"x", context="c"), context="c") == b"x"


def test_a_folder_in_which_nothing_can_be_written_is_enough_once_the_keys_are_there(folder: Path) -> None:
    first = opened(folder)
    (folder / ".lock").unlink()
    assert opened(folder).key_id == first.key_id
    assert not (folder / ".lock").exists()


def test_many_processes_that_start_at_once_end_with_the_same_keys(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from app.keys.keyring import Keyring\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(repr(Keyring.open(Path(sys.argv[1]), {})))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = {process.communicate(timeout=HANG_S)[0] for process in processes}
    assert said == {f"{opened(folder)!r}\n"}
    assert sorted(file.name for file in folder.iterdir()) == [".lock", "sealing.key", "signing.key"]


def test_what_a_crash_left_half_written_is_no_key_and_goes_away(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    (folder / "signing.key.unfinished").write_bytes(b"AAAA")
    opened(folder)
    assert not (folder / "signing.key.unfinished").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
@pytest.mark.parametrize("name", ["signing.key", "sealing.key", "sealing.old.retired"])
def test_a_key_that_others_may_touch_is_refused_with_the_chmod_to_run(folder: Path, name: str, mode: int) -> None:
    opened(folder)
    key = folder / name
    if not key.exists():
        key.write_bytes((folder / "sealing.key").read_bytes())
    key.chmod(mode)
    with pytest.raises(SettingInvalid, match=f"chmod 600 {key}"):
        opened(folder)
    key.chmod(0o600)
    opened(folder)


@pytest.mark.parametrize("mode", [0o710, 0o755, 0o777])
def test_a_folder_in_which_others_may_look_is_refused(folder: Path, mode: int) -> None:
    opened(folder)
    folder.chmod(mode)
    with pytest.raises(SettingInvalid, match=f"chmod 700 {folder}"):
        opened(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_refused(folder: Path) -> None:
    opened(folder)
    os.chown(folder / "signing.key", 12345, -1)
    with pytest.raises(SettingInvalid, match="belongs to another user"):
        opened(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        base64.b64encode(b"k" * 31) + b"\n",
        base64.b64encode(b"k" * 33) + b"\n",
        base64.b64encode(b"SECRETSECRETSECRETSECRETSECRETSE")[:-1] + b"!\n",
        base64.b64encode(b"k" * 32) + b"\n" + base64.b64encode(b"k" * 32) + b"\n",
        b"\xff" * 44,
        b"A" * 10_000_000,
    ],
)
def test_what_is_no_key_is_refused_and_neither_shown_nor_replaced(folder: Path, content: bytes) -> None:
    opened(folder)
    key = folder / "signing.key"
    key.write_bytes(content)
    with pytest.raises(SettingInvalid) as caught:
        opened(folder)
    assert "SECRET" not in str(caught.value)
    assert content[:12].decode("latin-1") not in str(caught.value) or len(content) < 2
    assert key.read_bytes() == content


@pytest.mark.parametrize("put", ["directory", "pipe"])
def test_what_is_no_file_is_refused_without_waiting_for_it(folder: Path, put: str) -> None:
    opened(folder)
    key = folder / "sealing.key"
    key.unlink()
    if put == "pipe":
        os.mkfifo(key, 0o600)
    else:
        key.mkdir(mode=0o700)
    with pytest.raises(SettingInvalid, match="is no file"):
        opened(folder)


def test_a_folder_that_cannot_be_made_is_named(home: Path) -> None:
    (home / "file").write_text("")
    with pytest.raises(SettingInvalid, match=str(home / "file")):
        opened(home / "file" / "keys")


def test_keys_from_the_environment_need_no_folder_and_make_none(folder: Path) -> None:
    keyring = Keyring.open(folder, {name: f" {value}\n" for name, value in OTHER.items()})
    assert keyring.public_key_bytes == Ed25519PrivateKey.from_private_bytes(b"s" * 32).public_key().public_bytes_raw()
    assert keyring.unseal(keyring.seal(b"x", context="c"), context="c") == b"x"
    assert not folder.exists()
    for rotate in (keyring.rotate_signing, keyring.rotate_sealing):
        with pytest.raises(SettingInvalid, match="TGA_S"):
            rotate()


def test_a_key_from_the_environment_comes_before_the_file_which_still_opens_what_it_sealed(folder: Path) -> None:
    by_file = opened(folder)
    sealed = by_file.seal(b"x", context="c")
    by_environment = Keyring.open(folder, OTHER)
    assert by_environment.key_id != by_file.key_id
    assert by_environment.sealing_key_id != by_file.sealing_key_id
    assert by_environment.unseal(sealed, context="c") == b"x"
    with pytest.raises(SecretMissing):
        by_file.unseal(by_environment.seal(b"y", context="c"), context="c")


@pytest.mark.parametrize("variable", ["TGA_SIGNING_KEY", "TGA_SEALING_KEY"])
@pytest.mark.parametrize("value", ["tooshortSECRET", base64.b64encode(b"SECRET" * 5).decode(), "kéy"])
def test_a_wrong_variable_is_named_and_its_value_is_not(folder: Path, variable: str, value: str) -> None:
    with pytest.raises(SettingInvalid, match=variable) as caught:
        Keyring.open(folder, {variable: value})
    assert value not in str(caught.value)


def test_a_signature_is_verified_by_an_independent_reader(folder: Path) -> None:
    keyring = opened(folder)
    signature = keyring.sign(b"message")
    assert signature.key_id == keyring.key_id == key_id_of(keyring.public_key_bytes)
    assert keyring.key_id.startswith("ed25519:")
    assert len(keyring.key_id) == len("ed25519:") + 16
    Ed25519PublicKey.from_public_bytes(keyring.public_key_bytes).verify(base64.b64decode(signature.value), b"message")


def test_a_sealed_value_has_the_documented_form(folder: Path) -> None:
    keyring = opened(folder)
    sealed = keyring.seal(b"value", context="trace:1/arguments")
    assert sealed[:1] == b"\x01"
    assert sealed[1:9].hex() == keyring.sealing_key_id
    raw = base64.b64decode((folder / "sealing.key").read_bytes())
    assert AESGCM(raw).decrypt(sealed[9:21], sealed[21:], b"trace:1/arguments") == b"value"


def test_two_seals_of_one_value_do_not_look_alike(folder: Path) -> None:
    keyring = opened(folder)
    one, other = (keyring.seal(b"value", context="c") for _ in range(2))
    assert one[9:21] != other[9:21]
    assert one[21:] != other[21:]


def test_a_sealed_value_opens_only_in_its_context_and_unchanged(folder: Path) -> None:
    keyring = opened(folder)
    sealed = keyring.seal(b"value", context="trace:1")
    with pytest.raises(SecretMissing, match="another place"):
        keyring.unseal(sealed, context="trace:2")
    for place in range(len(sealed)):
        with pytest.raises(SecretMissing):
            keyring.unseal(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :], context="trace:1")
    for length in range(len(sealed)):
        with pytest.raises(SecretMissing):
            keyring.unseal(sealed[:length], context="trace:1")
    assert keyring.unseal(sealed, context="trace:1") == b"value"


_shared = Keyring.open(Path("/nonexistent"), OTHER)


@given(st.binary(max_size=64))
def test_whatever_bytes_are_given_nothing_but_secret_missing_is_raised(sealed: bytes) -> None:
    with pytest.raises(SecretMissing):
        _shared.unseal(sealed, context="c")
    with pytest.raises(SecretMissing):
        _shared.unseal(b"\x01" + bytes.fromhex(_shared.sealing_key_id) + sealed, context="c")


@given(st.binary(max_size=200), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_what_is_sealed_opens(value: bytes, context: str) -> None:
    assert _shared.unseal(_shared.seal(value, context=context), context=context) == value


def test_a_rotated_signing_key_is_kept_as_retired_and_verifies_what_it_signed(folder: Path) -> None:
    keyring = opened(folder)
    old_file, old_id, old_public, signed = (
        (folder / "signing.key").read_bytes(),
        keyring.key_id,
        keyring.public_key_bytes,
        keyring.sign(b"m"),
    )
    assert keyring.rotate_signing() == keyring.key_id != old_id
    assert opened(folder).key_id == keyring.key_id
    retired = folder / f"signing.{old_id.partition(':')[2]}.retired"
    assert (retired.read_bytes(), mode_of(retired)) == (old_file, 0o600)
    assert verify_signature(old_public, signed, b"m")
    assert not verify_signature(keyring.public_key_bytes, signed, b"m")


def test_after_rotating_the_sealing_key_old_and_new_values_open(folder: Path) -> None:
    keyring = opened(folder)
    sealed = [keyring.seal(b"0", context="c")]
    for turn in (b"1", b"2", b"3"):
        keyring.rotate_sealing()
        sealed.append(keyring.seal(turn, context="c"))
    assert len({value[1:9] for value in sealed}) == 4
    for reader in (keyring, opened(folder)):
        assert [reader.unseal(value, context="c") for value in sealed] == [b"0", b"1", b"2", b"3"]


def test_a_running_process_opens_what_another_sealed_after_it_rotated(folder: Path) -> None:
    running, other = opened(folder), opened(folder)
    before = running.seal(b"before", context="c")
    other.rotate_sealing()
    assert running.unseal(other.seal(b"after", context="c"), context="c") == b"after"
    assert other.unseal(before, context="c") == b"before"


def test_a_value_whose_retired_key_is_gone_is_missing_and_the_key_is_named(folder: Path) -> None:
    keyring = opened(folder)
    sealed, key_id = keyring.seal(b"x", context="c"), keyring.sealing_key_id
    keyring.rotate_sealing()
    retired = folder / f"sealing.{key_id}.retired"
    kept = retired.read_bytes()
    retired.unlink()
    reader = opened(folder)
    with pytest.raises(SecretMissing, match=key_id):
        reader.unseal(sealed, context="c")
    retired.write_bytes(kept)
    retired.chmod(0o600)
    assert reader.unseal(sealed, context="c") == b"x"


@pytest.mark.parametrize("at", ["retired", "in use"])
def test_a_crash_while_rotating_loses_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    keyring = opened(folder)
    sealed = keyring.seal(b"x", context="c")
    replace = Path.replace

    def crash(self: Path, target: Path) -> Path:
        if target.name.endswith(".retired") == (at == "retired"):
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            keyring.rotate_sealing()
    after = opened(folder)
    assert after.sealing_key_id == keyring.sealing_key_id
    assert after.unseal(sealed, context="c") == b"x"
    after.rotate_sealing()
    assert opened(folder).unseal(sealed, context="c") == b"x"


def test_no_key_is_shown_in_repr_errors_logs_or_attributes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keyring = opened(folder)
    sealed = keyring.seal(b"x", context="c")
    keyring.rotate_sealing()
    shown = [repr(keyring), str(keyring), repr(vars(keyring)), f"{keyring}"]
    try:
        keyring.unseal(sealed, context="other")
    except SecretMissing as error:
        shown += [str(error), repr(error), "".join(traceback.format_exception(error))]
    shown.append(caplog.text)
    for file in (*folder.glob("*.key"), *folder.glob("*.retired")):
        raw = base64.b64decode(file.read_bytes())
        for form in (raw.hex(), base64.b64encode(raw).decode(), repr(raw)):
            assert all(form[:16] not in text for text in shown), file

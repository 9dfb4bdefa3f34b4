"""`virta doctor` names what is wrong with broken set-ups."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import virta
from virta.cli.doctor import doctor
from virta.cli.operating import setup_checks


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """A directory with a virta.toml of the test's own; free ports, no other settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("VIRTA_", "THORIUM_", "SUBTUB_"))]:
        monkeypatch.delenv(name)

    def write(**settings):
        settings = {
            "server_port": 0,
            "journal_port": 0,
            "data_dir": str(tmp_path / "data"),
        } | settings
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        (tmp_path / "virta.toml").write_text("[server]\n" + "\n".join(lines) + "\n")
        return tmp_path

    return write


def diagnose():
    """Return the exit code, and what is not ok, as one text."""
    done = CliRunner().invoke(doctor, ["--json"])
    findings = json.loads(done.output)
    return done.exit_code, "\n".join(
        f"{f['check']}: {f['detail']}" for f in findings if f["state"] in ("wrong", "warning")
    )


def test_a_good_setup(setup):
    """Nothing wrong, exit code 0."""
    setup()
    assert diagnose()[0] == 0


def test_an_unknown_setting(setup):
    """1. A misspelt key."""
    setup(sever_port=1)
    code, said = diagnose()
    assert code == 1
    assert "unknown key 'sever_port'" in said


def test_a_setting_out_of_range(setup):
    """2. A value that cannot be used."""
    setup(server_port=99999)
    code, said = diagnose()
    assert code == 1
    assert "server_port is 99999" in said


def test_an_exposed_server_without_tokens(setup):
    """3. Listening for everyone without tokens."""
    setup(host="0.0.0.0")
    code, said = diagnose()
    assert code == 1
    assert "can be reached from other machines" in said


def test_a_token_file_that_others_can_read(setup, tmp_path):
    """4. Mode 0644 on a token file."""
    (tmp_path / "tokens").write_text("a-token-of-many-characters\n")
    (tmp_path / "tokens").chmod(0o644)
    setup(token_file=str(tmp_path / "tokens"))
    code, said = diagnose()
    assert code == 1
    assert "chmod 600" in said


def test_a_missing_token_file(setup, tmp_path):
    """5. A token file that is not there."""
    setup(token_file=str(tmp_path / "none"))
    code, said = diagnose()
    assert code == 1
    assert "cannot read token file" in said


def test_a_certificate_without_its_key(setup, tmp_path):
    """6. Half of a certificate, and one that cannot be read."""
    setup(tls_cert=str(tmp_path / "cert.pem"))
    assert "go together" in diagnose()[1]
    (tmp_path / "cert.pem").write_text("nothing")
    setup(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "cert.pem"))
    code, said = diagnose()
    assert code == 1
    assert "cannot be used" in said


def test_a_port_that_is_taken(setup):
    """7. Another program listens there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        setup(server_port=taken.getsockname()[1])
        code, said = diagnose()
    assert code == 1
    assert "choose another --server-port" in said


def test_a_data_directory_that_is_a_file(setup, tmp_path):
    """8. The data directory cannot be made."""
    (tmp_path / "file").write_text("")
    setup(data_dir=str(tmp_path / "file" / "data"))
    code, said = diagnose()
    assert code == 1
    assert "is no directory" in said


def test_a_damaged_log(setup, tmp_path):
    """9. The log's META cannot be read."""
    virta.open(tmp_path / "data" / "log").close()
    (tmp_path / "data" / "log" / "META").write_text("{")
    setup()
    code, said = diagnose()
    assert code == 1
    assert "cannot be opened" in said


def test_a_full_disk(setup, monkeypatch):
    """10. Hardly any space left."""
    usage = type("Usage", (), {"free": 4096})
    monkeypatch.setattr(setup_checks.shutil, "disk_usage", lambda path: usage)
    setup()
    code, said = diagnose()
    assert code == 1
    assert "free some space" in said


def test_a_data_directory_open_to_others(setup, tmp_path):
    """11. Other users can read the data: a warning."""
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data").chmod(0o755)
    setup()
    done = CliRunner().invoke(doctor, ["--json", "--data-dir", str(tmp_path / "data")])
    assert "warning" in {f["state"] for f in json.loads(done.output) if f["check"] == "data directory"}  # fmt: skip


def test_native_parts_that_are_not_built(tmp_path):
    """12. Without the native modules it says so, for each of them."""
    code = (
        "import sys; sys.modules['virta.log._native'] = None\n"
        "from virta.cli.doctor import check_native\n"
        "print([f.state for f in check_native() if f.check == 'virta.log._native'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent)  # fmt: skip
    assert done.stdout.strip() == "['missing']"

"""What stands in deploy/: units, images, proxies, manifests, dashboards."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest
import yaml
from server_harness import Server, event

from virta.server.metrics import PIPELINE_FIGURES
from virta.server.settings import SETTINGS
from waiting import wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b(?:virta|thorium)_[a-z0-9_]+")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    """Return the names that a server with a journal gives, and those of pipelines."""
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as server:
        server.publish("a", event("1"))
        server.request("GET", "/none")
        text = server.request("GET", "/metrics").body.decode()
    names = set(re.findall(r"^([a-z_0-9]+)[ {]", text, re.MULTILINE))
    return names | {f"virta_pipeline_{name}" for name, _ in PIPELINE_FIGURES} | {"virta_pipeline_failed"}  # fmt: skip


def expressions():
    board = json.loads((DEPLOY / "grafana" / "virta.json").read_text())
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    found = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_every_metric_of_board_and_alerts_exists(metrics):
    """A panel or an alert on a metric that nobody gives would be silent for ever."""
    named = {name for expression in expressions() for name in METRIC.findall(expression)}

    assert len(named) > 20
    assert named - metrics == set()


def test_alerts_say_what_is_wrong():
    """Each alert has a severity and a summary."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert rule["annotations"]["summary"]


def test_prometheus_accepts_the_rules():
    """`promtool check rules`, where Debian's prometheus is installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine")
    subprocess.run([promtool, "check", "rules", DEPLOY / "prometheus" / "alerts.yml"], check=True)


def test_systemd_accepts_the_units(tmp_path):
    """`systemd-analyze verify`, with a program that exists and the unit's user."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze on this machine")
    for name in ("virta.service", "virta.socket"):
        text = (DEPLOY / "systemd" / name).read_text()
        (tmp_path / name).write_text(text.replace("/opt/virta/bin/virta", sys.executable).replace("=virta\n", "=root\n", 2))  # fmt: skip
    done = subprocess.run([analyze, "verify", "--man=no", tmp_path / "virta.service", tmp_path / "virta.socket"], capture_output=True, text=True, check=False)  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "virta." in line]

    assert done.returncode == 0, done.stderr
    assert ours == []


def test_the_server_uses_a_passed_socket(tmp_path):
    """As systemd does it: descriptor 3, LISTEN_FDS and LISTEN_PID of the process itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = (
            "import os, sys\n"
            "os.dup2(int(sys.argv[1]), 3)\n"
            "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
            "os.execv(sys.executable, [sys.executable, '-m', 'virta', 'serve', *sys.argv[2:]])\n"
        )
        command = [sys.executable, "-c", code, str(listener.fileno()), "--server-port", "1"]
        command += ["--journal-port", "none", "--data-dir", str(tmp_path / "data")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[listener.fileno()])
    try:
        said = next(line for line in process.stdout if b'"listening"' in line)
        assert json.loads(said)["url"] == f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=20)


def test_the_image_is_safe():
    """Two stages, no root, a health check, and settings that exist."""
    text = (DEPLOY / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+)", text, re.MULTILINE)

    assert len(stages) == 2
    (user,) = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert f"--uid {user} " in text
    assert "HEALTHCHECK" in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (DEPLOY.parent / name).exists(), name
    known = {name for setting in SETTINGS for name in setting.environment}
    for path in DEPLOY.rglob("*"):
        if path.is_file():
            named = set(re.findall(r"\bVIRTA_[A-Z_]+\b", path.read_text())) - {"VIRTA_PORT"}
            assert named <= known, path


def test_the_image_is_linted():
    """hadolint finds nothing; what is ignored has its reason beside it."""
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("no hadolint on this machine")
    ran = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)  # fmt: skip

    assert (ran.returncode, ran.stdout) == (0, "")


def test_manifests_are_hardened():
    """Kubernetes and compose: no root, nothing writable but data and tmp, flags that exist."""
    service, workload = yaml.safe_load_all((DEPLOY / "kubernetes" / "virta.yaml").read_text())
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    flags = {flag for setting in SETTINGS for flag in setting.flags}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["virta"]

    assert service["kind"] == "Service"
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {a for a in container["args"] if a.startswith("--")} <= flags
    assert compose["read_only"]
    assert compose["cap_drop"] == ["ALL"]


def test_nginx_accepts_its_site(tmp_path):
    """`nginx -t`, where it is installed."""
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("no nginx on this machine")
    site = (DEPLOY / "proxy" / "nginx.conf").read_text()
    with socket.create_server(("127.0.0.1", 0)) as free:  # nginx refuses port 0
        port = free.getsockname()[1]
    site = re.sub(r"listen 443 ssl;", f"listen 127.0.0.1:{port};", site)
    site = re.sub(r"ssl_certificate\w*\s+\S+;", "", site)
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\nevents {{}}\nhttp {{\naccess_log off;\n{site}\n}}\n")  # fmt: skip
    done = subprocess.run([nginx, "-t", "-c", tmp_path / "nginx.conf", "-p", tmp_path], capture_output=True, text=True, check=False, env=os.environ)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_caddy_passes_streams(tmp_path):
    """`caddy validate`, where it is installed; through the proxy an event arrives on a stream that stays open."""
    caddy = shutil.which("caddy")
    if caddy is None:
        pytest.skip("no caddy on this machine")
    source = DEPLOY / "proxy" / "Caddyfile"
    options = {"capture_output": True, "text": True, "env": os.environ | {"HOME": str(tmp_path)}}  # fmt: skip
    for command in (["validate", "--adapter", "caddyfile", "--config", source], ["fmt", source]):
        done = subprocess.run([caddy, *command], check=False, **options)
        assert done.returncode == 0, done.stderr
    assert done.stdout == source.read_text()  # as `caddy fmt` writes it

    with Server(tmp_path / "data", "--durability", "none") as server:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        site = source.read_text().replace("virta.example.com {", f"http://127.0.0.1:{port} {{", 1)
        (tmp_path / "Caddyfile").write_text("{\n\tadmin off\n}\n" + site.replace("8232", str(server.port)))  # fmt: skip
        command = [caddy, "run", "--adapter", "caddyfile", "--config", tmp_path / "Caddyfile"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=options["env"]) as proxy:
            try:
                stream = HTTPConnection("127.0.0.1", port, timeout=20)
                wait_until(lambda: connects(port), "the proxy")
                stream.request("GET", "/channels/a")
                answer = stream.getresponse()
                assert answer.readline() == b"event: connect\n"
                server.publish("a", event("through"))
                while b'"through"' not in answer.readline():
                    pass
                stream.close()
            finally:
                proxy.terminate()


def connects(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0

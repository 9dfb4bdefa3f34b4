"""The source archive and the wheel, used outside of the tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from virta import native

ROOT = Path(__file__).parents[2]
WHEEL_BYTES_MAX = 3 * 1024 * 1024
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build as `make wheel` does: a source archive, and a wheel from that archive alone."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    tree = tmp_path_factory.mktemp("tree") / "virta"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if name.startswith(("src/", "native/")) or "/" not in name:
            source = ROOT / name
            if source.is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                (tree / name).write_bytes(source.read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The wheel in a directory of its own; its dependencies are those of this environment."""
    (wheel,) = built.glob("*.whl")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", target, wheel], check=True)
    return target


def run(installed, code, cwd):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("VIRTA_")}
    environ["PYTHONPATH"] = str(installed)
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_archive_has_what_a_build_needs(built):
    """Native sources with their headers, the console, types; nothing that was built."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}

    for needed in ("native/log.c", "native/crc.h", "native/vendor/yyjson/yyjson.c", "src/virta/console/index.html", "src/virta/py.typed", "LICENSE"):  # fmt: skip
        assert needed in names, needed
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_wheel_is_small_and_whole(built):
    """Stripped native modules, the whole console, and nothing of the tests."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()

    assert wheel.stat().st_size < WHEEL_BYTES_MAX
    assert len([name for name in names if name.endswith(".so")]) == len(native.MODULES)
    served = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/virta/console").rglob("*") if path.suffix in {".js", ".css", ".html", ".svg"}}  # fmt: skip
    assert served <= set(names)
    assert not [name for name in names if name.startswith("tests/")]


def test_the_log_works_from_the_wheel(installed, tmp_path):
    """The installed package is used, with its native parts."""
    code = (
        "import json, virta, virta.native\n"
        "log = virta.open('events'); log.append('a', 'k', b'v')\n"
        "print(json.dumps([virta.__file__, [bytes(r.value).decode() for r in log.read('a')],"
        " [m for m in virta.native.MODULES if virta.native.load(m) is None]]))"
    )
    file, values, plain = json.loads(run(installed, code, tmp_path))

    assert Path(file).is_relative_to(installed)
    assert values == ["v"]
    assert plain == []


def test_the_console_is_served_from_the_wheel(installed, tmp_path):
    """`virta serve` from the wheel serves the page and its modules."""
    code = (
        "import json, subprocess, sys, urllib.request\n"
        "p = subprocess.Popen([sys.executable, '-m', 'virta', 'serve', '--server-port', '0', '--journal-port', '0', '--data-dir', 'd'], stdout=subprocess.PIPE)\n"
        "url = next(json.loads(l)['url'] for l in p.stdout if b'\"listening\"' in l)\n"
        "get = lambda path: urllib.request.urlopen(url + path).status\n"
        "print(get('/'), get('/console/js/main.js'), get('/console/js/screens/channel.js'), get('/stats'))\n"
        "p.terminate(); p.wait()"
    )
    assert run(installed, code, tmp_path).split() == ["200"] * 4

"""
Build of the native hot loops.

Everything else lives in pyproject.toml. The extensions are optional: without a compiler
the plain-Python twins take over, slower but equal.

They are stripped: a Python built with -g would otherwise make the matcher 9 MB instead of 0.5 MB.
VIRTA_SANITIZE=1 builds with ASan and UBSan, and keeps symbols, for `make fuzz`.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

SANITIZE = os.environ.get("VIRTA_SANITIZE") == "1"
FLAGS = (
    ["-O1", "-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    if SANITIZE
    else ["-O3", "-g0"]
)
LINK = ["-fsanitize=address,undefined"] if SANITIZE else ["-s"]

EXTENSIONS = [
    Extension(
        "virta.log._native",
        ["native/log.c"],
        depends=[*map(str, Path("native").glob("log_*.h")), "native/crc.h", "native/guard.h"],
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.journal._native",
        ["native/journal.c", "native/client_io.c"],
        depends=sorted(map(str, Path("native").glob("journal*.h"))),
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.hub._native",
        ["native/hub.c"],
        depends=[
            *map(str, Path("native").glob("hub_*.h")),
            *("native/crc.h", "native/json_scan.h", "native/log_format.h"),
        ],
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.views._native",
        ["native/views.c"],
        depends=[*map(str, Path("native").glob("views_*.h")), "native/json_scan.h"],
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.spark._arrow",
        ["native/arrow.c"],
        depends=["native/crc.h", "native/log_compressed.h", "native/log_format.h"],
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.spark._jsoncols",
        ["native/jsoncols.c"],
        depends=sorted(map(str, Path("native").glob("jsoncols_*.h"))),
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.spark._variant",
        ["native/variant.c"],
        extra_compile_args=[*FLAGS, "-std=c11", "-Wall", "-Wextra"],
        extra_link_args=LINK,
        optional=True,
    ),
    Extension(
        "virta.match._core",
        sorted(map(str, Path("native").glob("match_*.cpp"))),
        depends=sorted(map(str, Path("native").glob("match_*.hpp"))),
        # No fused operations: geometry must round as it does in Python.
        extra_compile_args=[
            *FLAGS,
            "-std=c++17",
            "-Wall",
            "-Wextra",
            "-ffp-contract=off",
            "-fvisibility=hidden",
        ],
        extra_link_args=LINK,
        optional=True,
    ),
]

setup(ext_modules=EXTENSIONS)

"""Jars from Maven Central for tests of connectors, kept in ~/.cache/virta/maven; tests skip where there are none."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyspark
import pytest

CENTRAL = "https://repo1.maven.org/maven2"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "virta" / "maven"
TIMEOUT_S = 30
# What the connectors need beyond themselves. Not every mirror has the token provider of each version; any one works.
TOKENS = "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0"
MORE = {
    "kafka": (TOKENS, "org.apache.kafka:kafka-clients:3.9.2", "org.apache.commons:commons-pool2:2.13.1"),
    "delta": ("io.delta:delta-storage:4.4.0",),
    "iceberg": (),
}  # fmt: skip
BROKER = "4.1.2"
BROKER_JARS = (
    *(f"org.apache.kafka:{name}:{BROKER}" for name in (
        "kafka_2.13", "kafka-clients", "kafka-coordinator-common", "kafka-group-coordinator-api",
        "kafka-group-coordinator", "kafka-metadata", "kafka-raft", "kafka-server-common", "kafka-server",
        "kafka-share-coordinator", "kafka-storage-api", "kafka-storage", "kafka-tools-api",
        "kafka-transaction-coordinator",
    )),
    *(f"com.fasterxml.jackson.core:jackson-{name}:2.19.4" for name in ("annotations", "core", "databind")),
    *(f"com.fasterxml.jackson.dataformat:jackson-dataformat-{name}:2.19.4" for name in ("csv", "yaml")),
    *(f"org.apache.logging.log4j:log4j-{name}:2.25.3" for name in ("api", "core")),
    *(f"org.scala-lang:scala-{name}:2.13.16" for name in ("library", "reflect")),
    "com.fasterxml.jackson.datatype:jackson-datatype-jdk8:2.19.4",
    "at.yawk.lz4:lz4-java:1.10.1",
    "com.dynatrace.hash4j:hash4j:0.22.0",
    "com.github.ben-manes.caffeine:caffeine:3.2.0",
    "com.github.luben:zstd-jni:1.5.6-10",
    "com.google.re2j:re2j:1.8",
    "com.typesafe.scala-logging:scala-logging_2.13:3.9.5",
    "com.yammer.metrics:metrics-core:2.2.0",
    "commons-validator:commons-validator:1.10.1",
    "net.sf.jopt-simple:jopt-simple:5.0.4",
    "net.sourceforge.argparse4j:argparse4j:0.7.0",
    "org.bitbucket.b_c:jose4j:0.9.6",
    "org.hdrhistogram:HdrHistogram:2.2.2",
    "org.pcollections:pcollections:4.0.2",
    "org.slf4j:slf4j-api:1.7.36",
    "org.xerial.snappy:snappy-java:1.1.10.7",
    "org.yaml:snakeyaml:2.4",
)  # fmt: skip


def url_of(coordinates: str) -> str:
    group, artifact, version = coordinates.split(":")
    return f"{CENTRAL}/{group.replace('.', '/')}/{artifact}/{version}/{artifact}-{version}.jar"


def is_on_central(coordinates: str) -> bool:
    """Return whether Maven Central has a jar; skip the test where it cannot be reached."""
    request = urllib.request.Request(url_of(coordinates), method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError as error:
        pytest.skip(f"Maven Central is not reachable: {error}")


def jar(coordinates: str) -> Path:
    """Return the path of a jar, downloaded once."""
    url = url_of(coordinates)
    path = CACHE / url.rpartition("/")[2]
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            draft.write_bytes(answer.read())
        draft.replace(path)
    return path


def jars(coordinates) -> list[str]:
    """Return paths of jars; skip the test where Maven Central cannot be reached."""
    try:
        with ThreadPoolExecutor(8) as pool:
            return [str(path) for path in pool.map(jar, coordinates)]
    except (urllib.error.URLError, OSError) as error:
        pytest.skip(f"Maven Central is not reachable: {error}")


def released(*names: str) -> list[str]:
    """Return those connectors that have a release for the running Spark; skip the test if there is none."""
    from virta.spark.connectors import COORDINATES, spark_version

    found = [name for name in names if spark_version() in COORDINATES[name]]
    if not found:
        newest = max(version for name in names for version in COORDINATES[name])
        pytest.skip(
            f"no {' or '.join(names)} connector for Spark {pyspark.__version__} on Maven Central:"
            f" make test-spark SPARK={newest}"
        )
    return found


def connector_jars(*names: str) -> list[str]:
    """Return the jars of those connectors that have a release for the running Spark."""
    from virta.spark.connectors import COORDINATES, spark_version

    wanted = [(COORDINATES[name][spark_version()], *MORE[name]) for name in released(*names)]
    return jars([one for some in wanted for one in some])

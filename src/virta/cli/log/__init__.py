"""`virta log`: the group with all its commands."""

from virta.cli.log.records import log as log

"""`virta journal`: the group with all its commands."""

from virta.cli.journal import attempts as attempts
from virta.cli.journal import jobs as jobs
from virta.cli.journal import keys as keys
from virta.cli.journal import serve as serve
from virta.cli.journal import work as work
from virta.cli.journal.group import journal as journal

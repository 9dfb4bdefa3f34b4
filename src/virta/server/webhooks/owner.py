"""
The owner of a subscription: the principal that created it, with its rights at that time.

A webhook gets only events that its owner may read: the row filters of the owner's rights to `read` and to `webhooks`
are joined with the subscription's own filters. They are stored with the subscription, so they also hold after a
restart and when the server is started without credentials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from virta.access.grants import ALL_RIGHTS, Rights, read_grants
from virta.errors import AccessError, HubError
from virta.hub.event_matcher import restrict

if TYPE_CHECKING:
    from virta.access.principal import Principal
    from virta.filters import Filter

MEMBER = "owner"  # of a subscription's record; the API accepts no member of this name


class Owner(msgspec.Struct, frozen=True):
    """A principal; the default is that of records of older versions, which had none."""

    principal: str = ""
    grants: list[dict[str, Any]] | None = None  # None: all rights

    def row_filter(self, channel: str) -> Filter | None:
        """
        Return the filter that events of a channel must satisfy; None if there is none.

        Raises:
            HubError: the owner may not read the channel, or deliver it.
        """
        try:
            rights = ALL_RIGHTS if self.grants is None else Rights(read_grants(self.grants))
        except AccessError as error:
            raise HubError(f"its owner's rights: {error.message}", code="invalid-owner") from error
        found: Filter | None = None
        for verb in ("read", "webhooks"):
            permission = rights.permission(verb, channel)
            if permission is None:
                raise HubError(
                    f"{self.principal} has no right to `{verb}` on {channel[:200]!r}",
                    code="forbidden",
                )
            row_filter = permission.row_filter
            if row_filter is not None and row_filter != found:
                found = row_filter if found is None else restrict(found, row_filter)[0]
        return found


def owner_of(principal: Principal) -> Owner:
    """Return the owner for a principal's subscriptions."""
    if principal.rights is ALL_RIGHTS:
        return Owner(principal.id)
    return Owner(principal.id, principal.rights.describe())

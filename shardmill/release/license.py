"""May a model that is made of this checkpoint be given to others?

A build holds the checkpoint's weights in another form, so publishing it is passing on a changed copy. Whether that is
allowed is a question of the license; this module only knows the identifiers that hubs use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from shardmill.errors import ShardmillError

# Those that let changed copies be passed on, some under conditions, which the card repeats by linking the license.
ALLOWING = re.compile(
    r"apache-2\.0|mit|mit-0|bsd.*|isc|unlicense|cc0-1\.0|cc-by-4\.0|cc-by-3\.0|cc-by-2\.0|cc-by-sa-[234]\.0|cc-by-nc(-sa)?-[234]\.0"
    r"|openrail(\+\+)?|bigscience-.*|creativeml-openrail-m|psf-2\.0|python-2\.0|zlib|wtfpl|0bsd|odc-by|pddl|mpl-2\.0"
    r"|a?gpl-[23]\.0|lgpl.*|llama[234].*|gemma|deepseek|lfm1\.0|modified-mit|afl-3\.0|artistic-2\.0|ecl-2\.0|epl-[12]\.0"
)
FORBIDDING = re.compile(r".*-nd(-.*)?|other-no-derivatives|proprietary|all-rights-reserved")


@dataclass(frozen=True)
class License:
    """What a card says of it: the hub's identifier and, where the hub calls it `other`, its name and address."""

    id: str
    name: str | None = None
    link: str | None = None


def check_license(found: License | None, may: bool) -> License:
    """The license under which a build may be published.

    Args:
        found: the checkpoint's; None where it is not known.
        may: whether the user answers for it.

    Raises:
        ShardmillError: it is not known, forbids changed copies, or is none that is known to allow them.
    """
    if found is None:
        raise ShardmillError("the checkpoint's license is not known; say it with --license, e.g. --license apache-2.0")
    if may or ALLOWING.fullmatch(found.id):
        return found
    if FORBIDDING.fullmatch(found.id):
        raise ShardmillError(f"license {found.id} forbids to pass on what was made of it; --i-may if you have leave")
    raise ShardmillError(f"license {found.id} is not known to allow changed copies; read it, then --i-may")


def license_of(repo: str, commit: str) -> License | None:
    """The license in the card of a hub repository; None where it has none. Raises CheckpointError."""
    from shardmill.checkpoint.hub import HubAccess
    from shardmill.checkpoint.hub_limits import SMALL_SECONDS, explained, understood, within

    access = HubAccess()
    with explained(repo, commit, access.endpoint), understood(access.endpoint):
        asked = partial(access.api.model_info, repo, revision=commit)
        card = within(SMALL_SECONDS, asked, access.endpoint).card_data
    if card is None or not card.license:
        return None
    ids = card.license if isinstance(card.license, list) else [card.license]
    return License(str(ids[0]), card.license_name, card.license_link)
